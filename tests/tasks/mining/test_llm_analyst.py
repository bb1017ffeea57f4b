"""The language-model analyst needs a store, a round and a client, and no open round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import CapabilityRow, LabelRow, Store, TrajectoryRow, open_store, row_id
from errors import ProviderError
from models.providers.analyst import Refused
from models.providers.litellm_client import CallFailed
from tasks.mining import llm_analyst
from tasks.mining.labelling import MiningSettings, Transcript
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.mining.selection import CapabilitySelection
from tasks.round.stored import StoredRound
from tests.tasks.mining.test_labelling import CONTEXT, TRANSCRIPTS, ScriptedAsker, answer_to


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
