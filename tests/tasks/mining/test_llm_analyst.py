"""The language-model analyst needs a store, a round and a client, and no open round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import CapabilityRow, LabelRow, Store, TrajectoryRow, open_store, row_id
from errors import LabelError, ProviderError
from models.providers.analyst import Refused
from models.providers.litellm_client import CallFailed
from settings import load_settings
from tasks.mining import llm_analyst
from tasks.mining.discovery import discover_readable
from tasks.mining.labelling import MiningSettings, Transcript, label, shown_of
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.mining.selection import CapabilitySelection
from tasks.round.context import Context
from tasks.round.stored import StoredRound
from tasks.unattended.stalls import watched
from tests.models.providers.scripted_analyst import ScriptedAnalyst, good
from tests.tasks.mining.test_labelling import CANDIDATES, CONTEXT, TRANSCRIPTS, ScriptedAsker, answer_to


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(llm_analyst, "_show", lambda *given: None)
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


def contrasted(store: Store, rule: Callable[[Any], Any], transcripts: list[Transcript]) -> tuple[Any, ScriptedAsker]:
    """What a stage comes to on these conversations; or raises."""
    at = store.start_round("shop", "hash", 0, "test", {})
    store.add_trajectories(
        [
            TrajectoryRow(
                id=f"{at.id}/{t.id}", round_id=at.id, purpose="diagnosis", target="shop", data_hash="hash",
                environment="shop", task_id=t.id, family="f", split="diagnosis", seed=0, trial=0, policy_id="p",
                base="b", termination="done", reward=float(t.passed), success=t.passed, messages=list(t.messages),
            )
            for t in transcripts
        ]
    )  # fmt: skip
    frame = pd.DataFrame({"trajectory_id": [f"{at.id}/{t.id}" for t in transcripts]})
    frame["passed"] = [t.passed for t in transcripts]
    client = ScriptedAsker(rule)
    client.settings = SimpleNamespace(model="m")
    return LlmAnalyst(client, StoredRound(store, at), MiningSettings(), CONTEXT).contrast(frame, 8), client  # type: ignore[arg-type]


def test_a_model_that_stops_answering_fails_the_stage_and_nothing_is_stored(store: Store) -> None:
    asked: list[int] = []

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(1)
        if len(asked) > 10:
            raise CallFailed("m failed (402): Insufficient credits", "Insufficient credits", 402, transient=False)
        return answer_to(request)

    with pytest.raises(ProviderError, match=r"3 of 10 labelling runs are complete, 8 needed.*402") as raised:
        contrasted(store, rule, TRANSCRIPTS)
    assert not raised.value.transient
    assert store.rows(LabelRow) == store.rows(CapabilityRow) == []


@pytest.mark.parametrize("passed", [True, False])
def test_one_outcome_alone_is_contrasted_without_a_question(store: Store, passed: bool) -> None:
    result, client = contrasted(store, answer_to, [t for t in TRANSCRIPTS if t.passed is passed])
    assert (result.candidates, result.labels, client.questions) == ([], 0, [])
    assert store.rows(LabelRow) == store.rows(CapabilityRow) == []


def test_what_is_refused_is_counted_and_where_it_leaves_one_outcome_nothing_is_found(store: Store) -> None:
    def rule(request: dict[str, Any]) -> dict[str, Any]:
        if request["messages"][0]["content"].startswith("Label") and "W1." in request["messages"][1]["content"]:
            raise Refused("the provider's filter stopped it")
        return answer_to(request)

    result, _ = contrasted(store, rule, TRANSCRIPTS)
    assert [i.split("/")[1] for i in result.filtered] == [TRANSCRIPTS[1].id]
    assert (result.runs, result.refused, result.labels) == (10, {}, 10 * 11 * 2)
    alone = contrasted(store, rule, [t for t in TRANSCRIPTS if t.passed or t is TRANSCRIPTS[1]])[0]
    assert (alone.candidates, len(alone.filtered)) == ([], 1)


def naming(*words: str, alone: bool = True) -> Callable[[Any], Any]:
    """A filter that stops whoever is to name candidates by one of these words; and each alone, to say what is in it."""

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        task, content = (m["content"] for m in request["messages"])
        single = task.startswith("Say in one sentence")
        if ((single and alone) or task.startswith("Name")) and any(word in content for word in words):
            raise Refused("the provider's filter stopped it")
        return {"gist": "It looked."} if single else answer_to(request)

    return rule


def test_candidates_are_named_without_what_is_refused_alone(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    result, client = contrasted(store, naming("W1.", "W2."), TRANSCRIPTS)
    assert sorted(i.split("/")[1] for i in result.unread) == sorted([TRANSCRIPTS[1].id, TRANSCRIPTS[2].id])
    assert "goes on without 2 conversations that were refused even alone: the provider's filter" in caplog.text
    assert (result.filtered, result.labels) == ([], 10 * 12 * 2), "labelling may be answered on them"
    first, *singly = client.questions[: 1 + len(TRANSCRIPTS)]
    assert all(q.messages[1]["content"].count("### T") == 1 for q in singly)
    again = client.questions[1 + len(TRANSCRIPTS)].messages[1]["content"]
    assert (first.messages[1]["content"].count("### T"), again.count("### T")) == (12, 10)
    examples = {e for row in store.rows(CapabilityRow) for kind in ("failed", "passed") for e in row.examples[kind]}
    assert examples
    assert not examples & set(result.unread)


def test_refusals_that_leave_no_contrast_find_nothing_and_those_of_all_fail(store: Store) -> None:
    failed, passed = ([t for t in TRANSCRIPTS if t.passed is outcome] for outcome in (False, True))
    found, _ = contrasted(
        store, naming("W1."), [TRANSCRIPTS[1], *(t for t in TRANSCRIPTS if t.passed != TRANSCRIPTS[1].passed)]
    )
    assert (found.candidates, len(found.unread), store.rows(CapabilityRow)) == ([], 1, [])
    with pytest.raises(LabelError, match="every one of 12 trajectories is refused: the provider's filter stopped it"):
        contrasted(store, naming("### T1"), TRANSCRIPTS)
    said = "filter stopped it; none of the 12 conversations was refused alone: .* lower analyst.trajectory_tokens"
    with pytest.raises(Refused, match=said):
        contrasted(store, naming("### T1", alone=False), [*failed, *passed])


def test_others_take_the_place_of_all_that_was_shown_of_an_outcome() -> None:
    client = ScriptedAsker(naming("W1."))
    mine = TRANSCRIPTS[1]
    pool = [mine, *(t for t in TRANSCRIPTS if t is not mine)]
    for seed in range(40):  # until it is the one that is shown of its outcome
        settings = MiningSettings(shown=1, seed=seed)
        if mine in shown_of(pool, settings):
            break
    found = discover_readable(client, pool, CONTEXT, settings)
    assert list(found.refused) == [mine.id]
    assert found.candidates


def selection(name: str, selected: bool) -> CapabilitySelection:
    return CapabilitySelection(name, selected, 1, 1, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0, (), "")


def test_the_judges_are_asked_of_what_was_selected_and_what_they_say_is_stored(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    at = store.start_round("shop", "hash", 0, "test", {})
    names = ("check_before_cancel", "read_the_clock", "be_polite")
    for n in names:
        store.put([CapabilityRow(id=row_id(at.id, n), round_id=at.id, name=n, definition=f"ABOUT-{n}", analyst="llm")])

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        cause = "broken_tool" if "ABOUT-read_the_clock" in request["messages"][1]["content"] else "agent"
        return {"cause": cause, "reason": f"because of {cause}"}

    client = ScriptedAsker(rule)
    analyst = LlmAnalyst(client, StoredRound(store, at), MiningSettings(judges=3), CONTEXT)  # type: ignore[arg-type]
    unfit = analyst.judge_fits([selection(names[0], True), selection(names[1], True), selection(names[2], False)], {})
    assert unfit == {"read_the_clock": "No environment could train it (broken tool: because of broken_tool)"}
    assert len(client.questions) == 6
    assert all(q.messages[1]["content"].startswith(CONTEXT) for q in client.questions)
    rows = {r.name: (r.trainable, r.note) for r in store.rows(CapabilityRow, round_id=at.id)}
    assert rows["read_the_clock"] == (False, "broken tool: because of broken_tool")
    assert rows["check_before_cancel"][0]
    assert rows["be_polite"] == (True, "")
    store.close()


def test_a_labelling_is_seen_to_move_by_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take hours, and a process in which nothing moves for one is ended as hanging."""
    looked: list[int] = []
    monkeypatch.setattr("tasks.unattended.stalls._arm", lambda: looked.append(1))
    monkeypatch.setattr("tasks.unattended.stalls.MOST_OFTEN", 0.0)
    with (
        ScriptedAnalyst(lambda number, request: good(answer_to(request))) as server,
        open_store(f"sqlite:///{tmp_path / 'trace.db'}") as store,
    ):
        how = {"kind": "llm", "model": "hosted_vllm/any", "api_base": server.api_base}
        at = store.start_round("shop", "hash", 0, "test", {})
        with closing(Context(load_settings(home=tmp_path, analyst=how), store, at)) as context:
            with watched(1, tmp_path):
                label(context.analyst, TRANSCRIPTS, CANDIDATES, CONTEXT, MiningSettings(runs=4))
            assert len(looked) == 1 + len(server.requests) == 13
