"""GEPA over our rollouts: within its budget, the same when it is begun again, and with a model's reflection."""

from __future__ import annotations

import json
import logging
import re
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from db.values.types import utc_now
from environments.contract import Message, TargetTask
from errors import BudgetExceeded, ConfigurationError, StoreError
from models.providers.analyst import Analyst, AnalystSettings, Refused
from models.providers.client import ModelClient
from models.providers.litellm_client import CallFailed, Completion, ModelCall
from tasks.comparison.results import reflection_of
from tasks.methods import gepa as room
from tasks.methods.gepa import BATCH, IDLE, Evolved, Rollouts, _Spent, trace_gepa
from tasks.methods.proposals import EXAMPLES, INSTRUCTIONS, SCRIPTED, NewInstructions, Proposer, by_analyst
from tasks.methods.run import run_method
from tasks.methods.seed import budget
from tasks.methods.seed.answers import Answer
from tasks.methods.seed.budget import TEST, Account
from tasks.methods.seed.prompts import Prompting
from tasks.methods.seed.seed_run import DIAGNOSIS, SeedRun, close_round, diagnose, pay
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.unattended import progress
from tasks.unattended.progress import Meter
from tests.tasks.methods.letters_target import SIZE
from tests.tasks.methods.seeds_made import seed_run, without_prefect

POOL = {f"t{i}": (Message("user", f"ask {i}"), Message("assistant", f"say {i}")) for i in range(12)}
FAMILIES = {i: ("low", "high")[n % 2] for n, i in enumerate(POOL)}


def proposer(rewrite: Any = None, room: int = 99) -> Proposer:
    return Proposer("Say.", POOL, FAMILIES, lambda p: len(p.examples) <= room, Random(0), rewrite)


def record(family: str, solved: bool, *kinds: str) -> dict[str, Any]:
    return {"Family": family, "Solved": solved, "Failed checks": list(kinds)}


def test_the_script_adds_examples_of_what_failed_and_reminders_of_failed_checks() -> None:
    made = proposer()
    seed = {INSTRUCTIONS: "Say.", EXAMPLES: ""}
    failed = [record("high", False, "say_high", "look_first"), record("high", False, "say_high"), record("low", True)]
    given = dict.fromkeys((INSTRUCTIONS, EXAMPLES), failed)
    first = made.propose(seed, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert first == "Say.\nRemember: say high."
    second = made.propose({**seed, INSTRUCTIONS: first}, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert second == f"{first}\nRemember: look first."
    third = made.propose({**seed, INSTRUCTIONS: second}, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert third in (first, "Say.\nRemember: look first."), "all is there: one reminder less"
    text = ""
    for _ in range(30):
        text = made.propose({**seed, EXAMPLES: text}, given, [EXAMPLES])[EXAMPLES]
        shown = text.split()
        assert len(shown) == len(set(shown)) <= 8
    prompting = made.prompting({**seed, EXAMPLES: "t1 gone t3"})
    assert prompting == Prompting(("Say.", "Say."), (POOL["t1"], POOL["t3"]))


def test_a_prompt_that_leaves_no_room_is_not_proposed() -> None:
    made = proposer(room=1)
    records = {EXAMPLES: [record("low", False)]}
    assert made.propose({INSTRUCTIONS: "Say.", EXAMPLES: "t0"}, records, [EXAMPLES])[EXAMPLES].split() in (
        ["t0"], *([i] for i in POOL),
    )  # fmt: skip


def test_a_model_writes_instructions_where_one_is_configured() -> None:
    seen: list[str] = []
    made = proposer(lambda text, records: (seen.append(text), "Say it well.")[1])
    new = made.propose({INSTRUCTIONS: "Say.", EXAMPLES: ""}, {INSTRUCTIONS: []}, [INSTRUCTIONS])
    assert (new, seen) == ({INSTRUCTIONS: "Say it well."}, ["Say."])


@pytest.mark.parametrize(
    "text",
    [
        "```\nSay it well.\n```",
        "\n```markdown\r\nSay it well.\n```\n",
        "```Say it well.```",
        " Say it well. ",
    ],
)
def test_instructions_of_a_model_are_without_its_fence_and_none_are_asked_for_again(text: str) -> None:
    """GEPA's prompt asks for a block; the agent read the fence, or nothing, as its instructions."""
    pytest.importorskip("gepa")
    answers, asked = ["```\n```", text], list[str]()

    class Client:
        def complete(self, call: Any) -> Completion:
            asked.append(call.messages[-1]["content"])
            return Completion(json.dumps({"instructions": answers[len(asked) - 1]}), finish="stop")

    client, replies = Client(), SimpleNamespace(get=lambda request_hash: None, put=lambda row: None)
    rewrite = by_analyst(Analyst(AnalystSettings("openai/m"), client, replies), 0.8, "gepa", set())  # type: ignore[arg-type]
    assert rewrite("Say.", [{"Inputs": "x"}]) == "Say it well."
    assert "instructions is empty" in asked[1]


def test_a_block_amid_instructions_is_theirs() -> None:
    for text in ("Say:\n```\na\n```", "```\na\n```\nSay so."):
        assert NewInstructions(instructions=text).plain == text


@pytest.mark.parametrize(
    "problem",
    [
        CallFailed("m failed (402)", "no credit", 402, transient=False),
        CallFailed("m is away", "", transient=True),
        BudgetExceeded("over the cap of 1 call"),
        StoreError("the database does not answer"),
    ],
    ids=str,
)
def test_no_model_is_asked_again_after_what_lasts(problem: Exception) -> None:
    asked: list[str] = []

    def rewrite(text: str, records: Any) -> NoReturn:
        asked.append(text)
        raise problem

    made = proposer(rewrite)
    for _ in range(2):  # GEPA asks once more
        with pytest.raises(type(problem), match=re.escape(str(problem))):
            made.propose({INSTRUCTIONS: "Say.", EXAMPLES: ""}, {INSTRUCTIONS: []}, [INSTRUCTIONS])
    assert (asked, made.unusable) == (["Say."], 0)
    assert _Spent(set(), 99, made)(None), "and the search ends"


def test_gepa_stays_within_its_budget_and_begun_again_plays_nothing(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gepa")
    without_prefect(monkeypatch)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    run = seed_run(settings_folder, tiny_model, budget=120)
    with caplog.at_level(logging.INFO, logger="trace"):
        first = run_method(run, "gepa")
    assert re.search(r"gepa: \d+ of 120 episodes, .* % of the last \d+", caplog.text), "its many small batches are told"
    assert SCRIPTED in first.notes[0]
    assert first.reflection == {"model": ""}
    # What it leaves does not pay for one more candidate: both small batches and validation.
    assert 120 - (2 * BATCH + SIZE) < first.episodes <= 120
    assert {"diagnosis", "evaluation", TEST} == set(first.purposes)
    stored = len(run.context.store.query("SELECT id FROM trajectories"))
    again = run_method(run, "gepa")
    assert again.model_dump() | {"seconds": 0} == first.model_dump() | {"seconds": 0}
    assert len(run.context.store.query("SELECT id FROM trajectories")) == stored
    close_round(run.context)


@pytest.mark.parametrize("problem", [ConfigurationError("wrong key (401)"), Refused("m refused to answer")])
def test_a_model_that_cannot_be_asked_ends_the_search_and_an_answer_of_no_use_does_not(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """GEPA takes every error for a candidate less: it asked once more, went on with examples alone until its budget was
    spent, and the file said that the model reflects."""
    pytest.importorskip("gepa")
    without_prefect(monkeypatch)
    asked: list[str] = []

    def rewrite(text: str, records: Any) -> NoReturn:
        asked.append(text)
        raise problem

    monkeypatch.setattr(room, "by_analyst", lambda *given: rewrite)
    run = seed_run(settings_folder, tiny_model, budget=60, analyst={"model": "openai/m"})
    if isinstance(problem, Refused):
        made = run_method(run, "gepa")
        said = f"{len(asked)} of {len(asked)} reflections gave no usable text"
        assert made.notes[:2] == ("reflection by openai/m", said)
        assert made.reflection == reflection_of(run.context.settings)
        assert made.reflection["model"] == "openai/m"
    else:
        with pytest.raises(type(problem), match=re.escape(str(problem))):
            run_method(run, "gepa")
        assert len(asked) == 1
    close_round(run.context)


def test_a_run_ends_where_its_episodes_do_or_nothing_new_is_proposed() -> None:
    """Whatever calls were made: those on stored episodes cost nothing."""
    asked: set[str] = set()
    spent = _Spent(asked, 20, proposer())
    for number in range(21):
        assert not spent(None)
        asked.add(str(number))
    assert spent(None)
    idle = _Spent(asked, 99, proposer())
    assert [idle(None) for _ in range(IDLE + 1)] == [False] * IDLE + [True]


def test_an_episode_that_was_lost_is_no_failure_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what leaves no room for a task is one."""
    pytest.importorskip("gepa")
    ended = {"a": True, "b": False, "lost": None, "c": True}
    now, errors = utc_now(), {"lost": "provider", "long": "policy"}
    rows = [
        SimpleNamespace(task_id=name, id=name, success=success, created_at=now, error_boundary=errors.get(name))
        for name, success in {**ended, "long": None}.items()
    ]
    context = SimpleNamespace(
        store=SimpleNamespace(trajectories=lambda round_id, id: [row for row in rows if row.id in id])
    )
    monkeypatch.setattr(room, "play_answer", lambda answer, tasks, trials, what: [task.id for task in tasks])
    monkeypatch.setattr(room, "_record", lambda row: row.id)
    meter = Meter("gepa", 4, "episodes")
    rollouts = Rollouts(context, proposer(), meter, began=now)  # type: ignore[arg-type]
    seed = {INSTRUCTIONS: "Say.", EXAMPLES: ""}

    def evaluated(*names: str) -> Any:
        return rollouts.evaluate([TargetTask(name, "validation", "low", 0) for name in names], seed, True)

    with meter:
        assert evaluated(*ended).scores == [1.0, 0.0, pytest.approx(2 / 3), 1.0]
        assert evaluated("lost").scores == [0.0]
        told = rollouts.make_reflective_dataset(seed, evaluated(*ended), [EXAMPLES])
        assert evaluated(*ended, "long").scores == [1.0, 0.0, pytest.approx(2 / 4), 1.0, 0.0]
    assert told == {EXAMPLES: ["a", "b", "c"]}, "nor is it reflected on"
    assert (meter.done, meter.before) == (5, 0), "those asked for again are not counted again"


def test_what_an_earlier_process_played_flatters_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run that goes on says for an hour that it is nearly done."""
    began = utc_now()
    ages = {"a": began - timedelta(hours=1), "b": began + timedelta(seconds=1)}
    rows = [
        SimpleNamespace(task_id=name, id=name, success=True, created_at=made, error_boundary=None)
        for name, made in ages.items()
    ]
    context = SimpleNamespace(store=SimpleNamespace(trajectories=lambda round_id, id: rows))
    monkeypatch.setattr(room, "play_answer", lambda answer, tasks, trials, what: [task.id for task in tasks])
    with Meter("gepa", 9, "episodes", done=3) as meter:
        rollouts = Rollouts(context, proposer(), meter, began=began)  # type: ignore[arg-type]
        rollouts.evaluate([TargetTask(name, "validation", "low", 0) for name in ages], {INSTRUCTIONS: "", EXAMPLES: ""})
    assert (meter.done, meter.before) == (5, 4)


def test_what_reflection_costs_does_not_depend_on_who_has_paid_it(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both methods work in one home, where the second one is given the first one's replies; one that is stopped and
    begun again is given its own."""
    gepa = pytest.importorskip("gepa")
    without_prefect(monkeypatch)
    asked: list[ModelCall] = []

    def evaluate(rollouts: Rollouts, tasks: Any, candidate: dict[str, str], capture_traces: bool = False) -> Any:
        rollouts.asked.update(f"{task.id} {candidate}" for task in tasks)
        return gepa.EvaluationBatch(outputs=tasks, scores=[0.5] * len(tasks), trajectories=tasks)

    def dataset(rollouts: Rollouts, candidate: Any, evaluated: Any, components: list[str]) -> dict[str, Any]:
        return {name: [record(task.id, False) for task in evaluated.trajectories] for name in components}

    def answer(client: ModelClient, call: ModelCall) -> Completion:
        asked.append(call)
        if len(asked) == stops_at:
            raise KeyboardInterrupt
        text = f"Say {sha256(call.messages[-1]['content'].encode()).hexdigest()[:6]}."
        return Completion(json.dumps({"instructions": text}), prompt_tokens=10, sampled_tokens=10, dollars=1.0)

    monkeypatch.setattr(Rollouts, "evaluate", evaluate)
    monkeypatch.setattr(Rollouts, "make_reflective_dataset", dataset)
    monkeypatch.setattr(ModelClient, "_wait_for", answer)
    monkeypatch.setattr(room, "play_round", lambda run, context, account: Answer(context))
    monkeypatch.setattr("tasks.methods.run.play_answer", lambda *given: [])
    analyst = {"model": "openai/m", "prompt_price": 1.0, "sampled_price": 1.0}
    dollars = []
    for stops_at, *order in ((0, "gepa", room.TRACE_GEPA), (2, room.TRACE_GEPA, "gepa")):
        asked.clear()
        run = seed_run(settings_folder / str(stops_at), tiny_model, budget=140, analyst=analyst)
        if stops_at:
            with pytest.raises(KeyboardInterrupt):
                run_method(run, order[0])
        dollars.append({name: run_method(run, name).dollars for name in order})
        close_round(run.context)
    assert dollars[0] == dollars[1]
    assert 2 <= dollars[0][room.TRACE_GEPA] < dollars[0]["gepa"]


@pytest.mark.parametrize("changed", [True, False])
def test_behind_another_prompt_the_diagnosis_is_played_anew(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """The unprompted base's episodes stand for no other's: what mines and learns finds none of them in the round."""
    without_prefect(monkeypatch)
    prompting = Prompting(("Say", "Tell")) if changed else Prompting()
    monkeypatch.setattr(room, "evolve", lambda *given: Evolved(prompting))
    monkeypatch.setattr(room, "play_round", lambda run, context, account: Answer(context))
    run = seed_run(settings_folder, tiny_model)
    account = pay(run.context, room.TRACE_GEPA, run.episodes, [DIAGNOSIS])
    before = set(diagnose(run))
    run.context.budget = account
    answer = trace_gepa(run, run.context, account)
    own = answer.context
    after = set(own.result(RolloutResult).trajectories)
    assert after.isdisjoint(before) is changed
    assert {row.id for row in own.store.trajectories(own.round.id)} == after
    assert answer.account is not None
    assert answer.account.counts() == {"diagnosis": 2 * SIZE if changed else SIZE}
    assert set(own.store.trajectory_frame(None, columns=["id"])["id"]) == before | after, "for what they cost"
    for context in (own, run.context):
        close_round(context)


def test_the_time_of_a_round_that_a_process_died_in_is_not_lost(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round behind GEPA's prompt has an account in a home of its own, and is most of what the method takes."""
    without_prefect(monkeypatch)
    clock, killed = [0.0], list[bool]()

    def evolve(context: Context, method: str, episodes: int) -> Evolved:
        clock[0] += 10
        return Evolved()

    def play_round(run: SeedRun, context: Context, account: Account) -> Answer:
        clock[0] += 100
        account.admit([f"episode {len(killed)}"], "training")
        if not killed:
            killed.append(True)
            died.setattr(Account, "_tick", lambda self: None)
            raise KeyboardInterrupt
        return Answer(context)

    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(room, "evolve", evolve)
    monkeypatch.setattr(room, "play_round", play_round)
    run = seed_run(settings_folder, tiny_model)
    with monkeypatch.context() as died, pytest.raises(KeyboardInterrupt):
        run_method(run, room.TRACE_GEPA)
    assert run_method(run, room.TRACE_GEPA).seconds == 2 * (10 + 100)
    close_round(run.context)
