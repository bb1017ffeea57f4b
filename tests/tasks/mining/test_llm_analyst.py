"""The language-model analyst needs a store, a round and a client, and no open round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from db import CapabilityRow, open_store, row_id
from tasks.mining.labelling import MiningSettings
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.mining.selection import CapabilitySelection
from tasks.round.stored import StoredRound
from tests.tasks.mining.test_labelling import CONTEXT, ScriptedAsker


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
