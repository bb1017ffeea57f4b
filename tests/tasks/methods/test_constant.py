"""The sceptic's method: one whole solution for every task, whichever solves most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Action, TargetTask, ToolCall
from models.scripted import NoopPolicy, ReplayPolicy
from tasks.methods import constant as room
from tasks.methods.constant import constant, most_frequent, shown
from tasks.methods.run import run_method
from tasks.methods.seed.answers import Answer, successes
from tasks.methods.seed.seed_run import DIAGNOSIS, SeedRun, close_round, diagnose, pay
from tests.tasks.methods.letters_target import Letters, target
from tests.tasks.methods.seeds_made import seed_run, without_prefect

LOW, HIGH = "c", "d"  # 99 and 100: what the two families of letters ask for


class Solved(Letters):
    """Letters whose reference is known: one letter for each family, but for a few tasks that nobody can solve."""

    def oracle(self) -> Action | None:
        if self.said or self.task.payload["n"] % 10 == 9:
            return None
        return Action(content=LOW if self.task.family == "low" else HIGH)


@pytest.fixture
def run(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeedRun]:
    without_prefect(monkeypatch)
    monkeypatch.setattr(type(target), "environment", lambda self: Solved())
    opened = seed_run(settings_folder, tiny_model)
    diagnose(opened)
    yield opened
    close_round(opened.context)


def test_the_solution_that_solves_most_answers_everything(run: SeedRun) -> None:
    account = pay(run.context, "constant", run.episodes, [DIAGNOSIS])
    answer = constant(run, run.context, account)
    # Five of the ten tasks are low, and four references of the high ones are known: both letters are tried.
    assert answer.scripted == ReplayPolicy((Action(content=LOW),))
    assert answer.notes[0].startswith(f"{LOW}: 50.0 % on validation, best of ")
    charged = account.charged()
    assert len(charged) >= 2 * 10, "each of them on all of validation, paid for"


def test_the_same_solution_counts_once_whatever_its_calls_are_named(
    run: SeedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(n: int, name: str) -> tuple[Action, ...]:
        return (Action(tool_calls=(ToolCall("count", {"n": n}, name),)),)

    monkeypatch.setattr(room, "references", lambda context: [called(2, "a"), called(1, "b")])
    monkeypatch.setattr(room, "successes", lambda context: [called(1, "c"), *(called(n, "d") for n in range(3, 9))])
    found = most_frequent(run.context)
    assert [shown(s) for s in found[:3]] == ['count({"n":1})', 'count({"n":2})', 'count({"n":3})']
    assert len(found) == room.TRIED
    assert shown((Action(content="x" * 200),)) == "x" * room.SHOWN + "..."


def test_without_a_solution_nothing_is_done_and_it_says_so(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[int]()

    def counted(answer: Answer, ids: Sequence[str]) -> dict[str, list[float | None]]:
        played.append(len(ids))
        return successes(answer, ids)

    monkeypatch.setattr("tasks.methods.run.successes", counted)
    monkeypatch.setattr(room, "most_frequent", lambda context: [])
    figures = run_method(run, "constant")
    assert "no solution is known: nothing is done" in figures.notes
    assert {tuple(ended) for ended in figures.outcomes.values()} == {(0.0, 0.0), (1.0, 1.0)}, "pass^2 is known of it"
    assert played == [len(figures.outcomes), len(figures.shift)], "it does not draw: it is played once"
    answer = constant(run, run.context, pay(run.context, "constant", run.episodes, [DIAGNOSIS]))
    assert isinstance(answer.scripted, NoopPolicy)


def test_it_stops_with_what_it_has_when_the_budget_ends(run: SeedRun) -> None:
    account = pay(run.context, "constant", 10 + 10, [DIAGNOSIS])  # the diagnosis, and one solution on validation
    answer = constant(run, run.context, account)
    assert answer.notes[1] == "the budget ended after 1 solutions were tried"
    assert isinstance(answer.scripted, ReplayPolicy)


def test_another_solution_is_another_policy_and_turns_follow_each_other() -> None:
    two = ReplayPolicy((Action(content="a"), Action(tool_calls=(ToolCall("count", {"n": 1}, "x"),))))
    environment = Letters()
    first = environment.reset(TargetTask("t", "test", "low", 1, {"n": 1})).messages
    said = [two.act(environment, first, seed=3)]
    said.append(two.act(environment, [*first, said[0].as_message()], seed=4))
    said.append(two.act(environment, [*first, *(s.as_message() for s in said)], seed=5))
    assert [a.content for a in said] == ["a", "", "Is there anything else?"]
    assert two.identity() != ReplayPolicy(two.actions[:1]).identity()
    renamed = ReplayPolicy((two.actions[0], Action(tool_calls=(ToolCall("count", {"n": 1}, "y"),))))
    assert two.identity() == renamed.identity()
