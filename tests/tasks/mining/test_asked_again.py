"""Labelling beside trouble that passes, and beside a conversation that no reply is usable about: neither takes a run
from the rule's N without need."""

from __future__ import annotations

from typing import Any

import pytest

from errors import ProviderError
from models.providers.litellm_client import CallFailed
from tasks.mining.labelling import MiningSettings, label
from tests.tasks.mining.test_labelling import CANDIDATES, CONTEXT, TRANSCRIPTS, ScriptedAsker, answer_to

TEN = MiningSettings(runs=10)


class Keeping(ScriptedAsker):
    """It keeps what it has answered, as the analyst does: only what it has not is asked of the rule."""

    def __init__(self, rule: Any = answer_to) -> None:
        super().__init__(rule)
        self.kept: dict[tuple[str, int], Any] = {}

    def ask(self, question: Any) -> Any:
        key = (question.messages[1]["content"], question.sample)
        if key not in self.kept:
            self.kept[key] = super().ask(question)
        return self.kept[key]


def slow_down() -> CallFailed:
    return CallFailed("m asks to slow down", "Rate limit reached", 429, transient=True)


@pytest.mark.parametrize("lost", [range(12, 13), range(24, 27)])  # a request of run 4; of run 8 all three
def test_runs_that_passing_trouble_took_are_asked_again_for_what_is_missing(lost: range) -> None:
    asker, trouble = Keeping(), list(lost)

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        if len(asker.questions) - 1 in trouble:
            raise slow_down()
        return answer_to(request)

    asker.rule = rule
    found = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, TEN, 8)
    assert sorted(found.labels["run"].unique()) == list(range(10))
    assert (found.refused, found.waiting) == ((), ())
    missed = sum(n < len(asker.questions) for n in trouble)
    assert len(asker.questions) <= 10 * 3 + missed, "what was answered is not asked again"


def test_trouble_that_stays_is_met_twice_and_named_once() -> None:
    asker = Keeping()

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        if "W7." in request["messages"][1]["content"] and asker.questions[-1].sample in (2, 5):
            raise slow_down()
        return answer_to(request)

    asker.rule = rule
    found = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, TEN, 8)
    assert found.labels["run"].nunique() == 8
    assert [run for run, _ in found.refused] == list(found.waiting) == [2, 5]
    assert len(asker.questions) == 10 * 3 + 2


def test_a_bill_that_is_not_paid_is_not_sent_again() -> None:
    asker = Keeping()

    def rule(request: dict[str, Any]) -> dict[str, Any]:
        if asker.questions[-1].sample > 7:
            raise CallFailed("m failed (402)", "Insufficient credits", 402, transient=False)
        return answer_to(request)

    asker.rule = rule
    found = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, TEN, 8)
    assert (found.labels["run"].nunique(), found.waiting) == (8, (8, 9))
    assert len(asker.questions) == 8 * 3 + 3


def test_a_conversation_that_no_reply_is_usable_about_is_left_out_and_costs_no_run() -> None:
    def rule(request: dict[str, Any]) -> dict[str, Any]:
        if "order W3." in request["messages"][1]["content"]:
            raise ProviderError("m gave no usable answer, also when told why: labels: Field required")
        return answer_to(request)

    asker = ScriptedAsker(rule)
    found = label(asker, TRANSCRIPTS, CANDIDATES, CONTEXT, TEN, 8)
    assert found.filtered == (TRANSCRIPTS[3].id,)
    assert (found.refused, found.labels["run"].nunique()) == ((), 10)
    assert set(found.labels["trajectory_id"]) == {t.id for t in TRANSCRIPTS} - {TRANSCRIPTS[3].id}
    assert len(asker.questions) == 10 * 3 + 4, "the others of its request are asked about once more, in one run"
