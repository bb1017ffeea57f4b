"""Discovery, labelling, agreement and the judge of fit, with a scripted asker that answers by rule, and end to end over
HTTP with the scripted server and the real store."""

import json
import re
import time
import tracemalloc

import pandas as pd
import pytest

from db import open_store
from errors import LabelError, ProviderError
from models.providers.analyst import Analyst, AnalystSettings, Answer, Refused
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.providers.client import ModelClient
from models.providers.litellm_client import CallFailed
from tasks.mining.agreement import agreement
from tasks.mining.judging import judge_fit
from tasks.mining.labelling import MinedCapability, MiningSettings, Transcript, discover, label
from tasks.mining.selection import select
from tests.models.providers.scripted_analyst import ScriptedAnalyst, failed, good, refused, truncated

CONTEXT = "## Policy\nBe careful.\n## Tools\nget_order, cancel_order"


def transcript(n, passed):
    calls = ["get_order", "cancel_order"] if passed else ["cancel_order"]
    messages = [{"role": "user", "content": f"Cancel order W{n}."}]
    for name in calls:
        messages.append({"role": "assistant", "tool_calls": [{"name": name, "arguments": {"order_id": f"W{n}"}}]})
        messages.append({"role": "tool", "content": "ok"})
    return Transcript(f"trajectory-{'good' if passed else 'bad'}-{n}", messages, passed)


TRANSCRIPTS = [transcript(n, n % 2 == 0) for n in range(12)]
CANDIDATES = tuple(
    MinedCapability(name, "A definition that is long enough to be one.", (), (), "h")
    for name in ("check_before_cancel", "be_polite_always")
)


def labels_for(content):
    """LACKING where a trajectory cancels without looking; nobody needs politeness."""
    rows = []
    for alias, text in re.findall(r"### (T\d+)[^\n]*\n(.*?)(?=\n\n###|\Z)", content, re.S):
        shown = "PRESENT" if "get_order" in text else "LACKING"
        rows += [
            {"trajectory": alias, "capability": "check_before_cancel", "label": shown},
            {"trajectory": alias, "capability": "be_polite_always", "label": "NA"},
        ]
    return {"labels": rows}


def answer_to(request):
    task, content = request["messages"][0]["content"], request["messages"][1]["content"]
    if task.startswith("Name at most"):
        failed_ids, passed_ids = (
            re.findall(r"### (T\d+) \(FAILED", content),
            re.findall(r"### (T\d+) \(PASSED", content),
        )
        found = [
            {
                "name": c.name,
                "definition": c.definition,
                "failed_examples": failed_ids[:2],
                "passed_examples": passed_ids[:1],
            }
            for c in CANDIDATES
        ]
        return {"capabilities": found}
    if task.startswith("Label every pair"):
        return labels_for(content)
    return {"cause": "agent", "reason": "It can look first."}


class ScriptedAsker:
    """Answers by a rule without HTTP, through the schema and the check, as the analyst does."""

    def __init__(self, rule=answer_to):
        self.rule, self.questions = rule, []

    def ask(self, question):
        self.questions.append(question)
        value = question.schema.model_validate(self.rule({"messages": question.messages}))
        if question.check:
            question.check(value)
        return Answer(value, f"request-{len(self.questions)}", False)

    def ask_many(self, questions):
        answers = []
        for question in questions:
            try:
                answers.append(self.ask(question))
            except ProviderError as error:
                answers.append(error)
        return answers


def test_the_agreement_of_all_is_over_what_every_run_labels():
    """Of `b` one run says nothing: the others disagree about it, which is no part of the whole."""
    rows = [(run, t, "a", "LACKING" if t == "t1" else "NA") for run in (1, 2, 3) for t in ("t1", "t2")]
    rows += [(run, t, "b", "LACKING" if (t == "t1") == (run == 1) else "NA") for run in (1, 2) for t in ("t1", "t2")]
    labels = pd.DataFrame(rows, columns=["run", "trajectory_id", "capability", "label"])
    assert agreement(labels) == (1.0, {"a": 1.0, "b": -1.0})
    assert agreement(labels[labels["run"] == 1]) == (None, {"a": None, "b": None})


def test_mining_selects_what_the_failures_lack():
    analyst = ScriptedAsker()
    candidates = discover(analyst, TRANSCRIPTS, CONTEXT, MiningSettings())
    labels = label(analyst, TRANSCRIPTS, candidates, CONTEXT, MiningSettings()).labels
    selections = select(labels, k=8, n=10)
    assert [(row.name, row.selected) for row in selections] == [
        ("check_before_cancel", True),
        ("be_polite_always", False),
    ]
    best = selections[0]
    assert (best.mean_cov, best.mean_delta, best.runs_passed) == (1.0, 1.0, 10)
    assert {votes for _, votes in best.evidence} == {10}
    assert {trajectory for trajectory, _ in best.evidence} == {t.id for t in TRANSCRIPTS if not t.passed}
    assert agreement(labels) == (1.0, {"check_before_cancel": 1.0, "be_polite_always": None})
    evidence = [trajectory for trajectory, _ in best.evidence]
    assert judge_fit(analyst, candidates[0], evidence, TRANSCRIPTS, CONTEXT, MiningSettings()).trainable
    assert set(candidates[0].failed_examples) <= {t.id for t in TRANSCRIPTS if not t.passed}


def test_raters_see_neither_outcome_nor_ids_unless_asked_to():
    asker = ScriptedAsker()
    label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=2))
    seen = json.dumps([question.messages for question in asker.questions])
    assert not re.search(r"PASSED|FAILED|trajectory-|good|bad", seen)
    asker = ScriptedAsker()
    label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=1, show_outcome=True))
    assert "(FAILED)" in json.dumps([question.messages for question in asker.questions])


def test_every_label_leads_back_to_its_run_request_and_trajectory():
    asker = ScriptedAsker()
    frame = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=3, batch=5)).labels
    assert len(frame) == 3 * 12 * 2
    for row in frame.itertuples():
        question = asker.questions[int(row.request_hash.removeprefix("request-")) - 1]
        number = row.trajectory_id.rsplit("-", 1)[1]
        assert f"Cancel order W{number}." in question.messages[1]["content"]
        assert question.sample == row.run
        assert question.temperature > 0


def test_runs_differ_in_order_and_repeat_exactly():
    def contents(seed):
        asker = ScriptedAsker()
        label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=2, seed=seed))
        return [question.messages[1]["content"] for question in asker.questions]

    first = contents(0)
    assert first == contents(0)
    assert first[:3] != first[3:]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: rows[1:], "have no label"),
        (lambda rows: [*rows, rows[0]], "labelled twice"),
        (lambda rows: [*rows[1:], rows[0] | {"trajectory": "T99"}], "unknown pair"),
        (lambda rows: [*rows[1:], rows[0] | {"capability": "flying_about"}], "unknown pair"),
    ],
)
def test_labels_that_are_no_partition_are_refused_with_what_is_wrong(spoil, said):
    def rule(request):
        return {"labels": spoil(labels_for(request["messages"][1]["content"])["labels"])}

    with pytest.raises(ValueError, match=said):
        label(ScriptedAsker(rule), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=1))


def test_a_run_with_a_failed_request_is_refused_as_a_whole_and_named():
    asked = []

    def rule(request):
        asked.append(1)
        if len(asked) == 4:
            raise CallFailed("m failed (402): no credits", "no credits", 402, transient=False)
        return answer_to(request)

    found = label(ScriptedAsker(rule), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=3))
    assert [run for run, _ in found.refused] == [1]
    assert "no credits" in found.refused[0][1]
    assert sorted(found.labels["run"].unique()) == [0, 2]

    def nothing(request):
        raise ProviderError("no answer")

    with pytest.raises(LabelError, match="none of 3 labelling runs"):
        label(ScriptedAsker(nothing), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=3))


def test_a_model_that_does_not_answer_now_leaves_runs_that_wait():
    asked = []

    def dies(request):
        asked.append(1)
        if len(asked) > 4:
            raise ProviderError("it is down", transient=True)
        return answer_to(request)

    found = label(ScriptedAsker(dies), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=5))
    assert sorted(found.labels["run"].unique()) == [0]
    assert found.waiting == (1, 2, 3, 4)
    # Run 1 was answered in part, run 2 not at all: no other run was tried.
    assert [run for run, _ in found.refused] == [1, 2]

    def down(request):
        raise ProviderError("it is down", transient=True)

    with pytest.raises(ProviderError, match="may answer later") as raised:
        label(ScriptedAsker(down), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=3))
    assert raised.value.transient


@pytest.mark.parametrize(("status", "transient"), [(402, False), (503, True)])
def test_as_soon_as_too_few_runs_can_be_complete_nothing_more_is_asked(status, transient):
    asker = ScriptedAsker()

    def cannot_be_paid(request):
        if len(asker.questions) % 3 == 0 and len(asker.questions) > 3:  # one of each run's three, from run 1 on
            raise CallFailed(f"m failed ({status})", "Insufficient credits", status, transient=transient)
        return answer_to(request)

    asker.rule = cannot_be_paid
    with pytest.raises(ProviderError, match=r"1 of 10 .* 8 needed, and the model may answer later") as raised:
        label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(), 8)
    assert raised.value.transient is transient, "a bill is not paid by asking again at once"
    assert raised.value.unpaid is (status == 402), "the round waits for whoever pays it"
    assert len(asker.questions) == 4 * 3
    asker = ScriptedAsker(lambda request: (_ for _ in ()).throw(ProviderError("no usable answer")))
    with pytest.raises(LabelError, match="none of 10 labelling runs is complete, 8 needed"):
        label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(), 8)
    assert len(asker.questions) == 3 * 3


def test_a_trajectory_that_is_refused_also_alone_is_in_no_run_and_costs_none():
    asker = ScriptedAsker()
    asked = asker.questions

    def filtering(request):
        content = request["messages"][1]["content"]
        if "order W3." in content or ("order W5." in content and len(asked) > 8):
            raise Refused("the provider's filter stopped it")
        return answer_to(request)

    asker.rule = filtering
    found = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=10), 8)
    gone = {TRANSCRIPTS[3].id, TRANSCRIPTS[5].id}
    assert set(found.filtered) == gone
    assert (found.refused, found.waiting) == ((), ())
    per_run = found.labels.groupby("run")["trajectory_id"].apply(set)
    assert all(ids == {t.id for t in TRANSCRIPTS} - gone for ids in per_run), "also those that were labelled before"
    assert len(per_run) == 10
    assert len(asked) == 10 * 3 + 2 * 4, "the others of a refused request are asked about once more"
    assert select(found.labels, k=8, n=10)[0].selected

    def refusing(request):
        raise Refused("I will not")

    with pytest.raises(LabelError, match="every one of 12 trajectories is refused: I will not"):
        label(ScriptedAsker(refusing), TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=10), 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "OneWord"}, "snake_case"),
        ({"name": f"check_{'very' * 60}_often"}, "252 characters; at most 80"),
        ({"definition": "Looks before it leaps. " * 100}, "2300 characters; at most 2000"),
        ({"failed_examples": ["T999"]}, "no failed trajectories"),
        ({"passed_examples": ["T1"], "failed_examples": []}, "no passed trajectories"),
    ],
)
def test_candidates_that_break_the_rules_are_sent_back(change, said):
    def rule(request):
        found = answer_to(request)
        found["capabilities"][0] |= change
        return found

    with pytest.raises(ValueError, match=said):
        discover(ScriptedAsker(rule), TRANSCRIPTS, CONTEXT, MiningSettings())


def test_a_contrast_needs_both_outcomes():
    with pytest.raises(LabelError, match="0 failed"):
        discover(ScriptedAsker(), [t for t in TRANSCRIPTS if t.passed], CONTEXT, MiningSettings())
    with pytest.raises(LabelError, match="given twice"):
        label(ScriptedAsker(), [*TRANSCRIPTS, TRANSCRIPTS[0]], CANDIDATES, CONTEXT, MiningSettings())


def test_raters_are_told_when_a_pair_is_lacking_without_a_call():
    asker = ScriptedAsker()
    label(asker, TRANSCRIPTS[:2], CANDIDATES, CONTEXT, MiningSettings(runs=1))
    task = asker.questions[0].messages[0]["content"]
    assert "made no call, met no error, gave up or never came to it, that is LACKING, not NA" in task


def test_bookkeeping_of_a_hundred_thousand_labels_is_quick_and_small():
    transcripts = [transcript(n, n % 3 == 0) for n in range(1000)]
    names = [f"capability_number_{chr(97 + n)}" for n in range(10)]
    candidates = [MinedCapability(name, "A definition.", (), (), "h") for name in names]
    spent = [0.0]

    class Instant(ScriptedAsker):
        def ask_many(self, questions):
            answers = []
            for question in questions:
                before = time.perf_counter()
                aliases = re.findall(r"### (T\d+)", question.messages[1]["content"])
                rows = [
                    {"trajectory": alias, "capability": name, "label": "LACKING" if "0" in alias else "PRESENT"}
                    for alias in aliases
                    for name in names
                ]
                value = question.schema.model_construct(labels=question.schema.model_validate({"labels": rows}).labels)
                spent[0] += time.perf_counter() - before
                question.check(value)
                answers.append(Answer(value, f"r{question.sample}", False))
            return answers

    tracemalloc.start()
    started = time.perf_counter()
    found = label(Instant(), transcripts, candidates, CONTEXT, MiningSettings(batch=10))
    kappa, _ = agreement(found.labels)
    took = time.perf_counter() - started - spent[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.labels) == 100_000
    assert kappa is not None
    assert took < 60
    assert peak < 1 << 30


@pytest.mark.integration
def test_the_stage_ends_well_over_http_and_resumes_for_nothing(tmp_path):
    """The scripted server stands in for the model: every seventh reply is trouble of some kind."""
    trouble = [failed(429), failed(500), truncated(), good("not json"), {"body": b"<html>"}, failed(503)]

    def script(number, request):
        return trouble[number // 7 % len(trouble)] if number % 7 == 3 else good(answer_to(request))

    def mined(analyst):
        candidates = discover(analyst, TRANSCRIPTS, CONTEXT, MiningSettings())
        labelling = label(analyst, TRANSCRIPTS, candidates, CONTEXT, MiningSettings())
        selections = select(labelling.labels, k=8, n=10)
        for row in selections:
            if row.selected:
                found = next(candidate for candidate in candidates if candidate.name == row.name)
                evidence = [trajectory for trajectory, _ in row.evidence]
                judge_fit(analyst, found, evidence, TRANSCRIPTS, CONTEXT, MiningSettings())
        return labelling, selections

    store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    round_id = store.start_round("shop", "hash", 0, "test", {}).id
    with ScriptedAnalyst(script) as server:
        settings = AnalystSettings("hosted_vllm/scripted", server.api_base, backoff_seconds=0.01, concurrency=4)
        analyst = Analyst(settings, ModelClient(log=StoredSpend(store, round_id)), StoredReplies(store))
        labelling, selections = mined(analyst)
        assert [row.name for row in selections if row.selected] == ["check_before_cancel"]
        assert labelling.refused == ()
        asked = len(server.requests)
        assert store.spent(round_id)["calls"] == asked
        again, _ = mined(analyst)
        assert len(server.requests) == asked
        assert again.labels.equals(labelling.labels)
        analyst.client.close()
    with ScriptedAnalyst(lambda number, request: refused()) as server:
        settings = AnalystSettings("hosted_vllm/refusing", server.api_base, backoff_seconds=0.01)
        analyst = Analyst(settings, ModelClient(log=StoredSpend(store, round_id)), StoredReplies(store))
        with pytest.raises(ProviderError, match="refused"):
            discover(analyst, TRANSCRIPTS, CONTEXT, MiningSettings())
        analyst.client.close()
    store.close()
