"""What is practised must carry over: the figures of the early check, its verdict, and what an author is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import CapabilityRow, EnvironmentRow, EnvironmentState, LabelRow, SelectionRow, open_store, row_id
from environments.contract import TargetTask
from tasks.round.results import RolloutResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound
from tasks.synthesis.author_request import Brief, Version, author_messages
from tasks.synthesis.transfer import failed_tasks, first_third, target_episodes, transfer_of
from tasks.synthesize import withdraw
from tests.db.store_examples import trajectory
from tests.tasks.reporting.stored_rounds import Shop

CAPABILITY = "copy_exact_address"


def frame(wins: int, episodes: int, tasks: int = 8) -> pd.DataFrame:
    rows = [(f"e{i}", f"t{i % tasks}", i < wins) for i in range(episodes)]
    return pd.DataFrame(rows, columns=["id", "task", "success"])


@pytest.mark.parametrize(
    ("before", "after", "wins", "episodes", "tasks", "stops"),
    [
        (2, 4, 0, 24, 8, True),  # of ten: just twenty points
        (2, 3, 0, 24, 8, False),
        (2, 9, 1, 24, 8, False),
        (0, 10, 0, 8, 8, True),
        (0, 10, 0, 24, 7, False),  # too few to say, however often each is played
        (9, 3, 0, 24, 8, False),
    ],
)
def test_only_success_that_rises_in_the_environment_alone_is_a_verdict(
    before: int, after: int, wins: int, episodes: int, tasks: int, stops: bool
) -> None:
    found = transfer_of(2, frame(before, 10), frame(after, 10), frame(wins, episodes, tasks))
    assert bool(found.verdict) is stops
    assert (found.before, found.after) == (before / 10, after / 10)
    assert (found.successes, found.episodes, found.tasks) == (wins, episodes, tasks)
    if stops:
        rise = f"success in the environment rose from {before / 10:.0%} to {after / 10:.0%}"
        assert found.verdict.startswith(f"does-not-transfer: after step 2 {rise}")
        assert f"none of {episodes} episodes on {tasks} tasks" in found.verdict


@pytest.mark.parametrize(("steps", "third"), [(1, None), (2, None), (3, 1), (4, 2), (9, 3), (40, 14)])
def test_the_first_third(steps: int, third: int | None) -> None:
    assert first_third(steps) == third


@pytest.mark.parametrize(
    ("tasks", "episodes", "trials"), [(1, 24, 24), (5, 20, 4), (24, 24, 1), (40, 24, 1), (0, 0, 0)]
)
def test_at_most_so_many_episodes_evenly_over_the_tasks(tasks: int, episodes: int, trials: int) -> None:
    made = target_episodes([TargetTask(f"t{i}", "diagnosis", "f", i) for i in range(tasks)], 24, 3, "adapter")
    assert len(made) == episodes == len({(e.task.id, e.trial) for e in made})
    assert {e.trial for e in made} == set(range(trials))
    assert {(e.seed, e.adapter) for e in made} <= {(3, "adapter")}


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredRound]:
    store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    at = store.start_round("shop", "hash", 0, "test", {})
    identity = row_id(at.id, CAPABILITY)
    store.put([CapabilityRow(id=identity, round_id=at.id, name=CAPABILITY, analyst="llm")])
    yield StoredRound(store, at)
    store.close()


def lacking(stored: StoredRound) -> None:
    """Three failed episodes on two tasks, most votes first, and one on a task that is gone."""
    at, store = stored.round, stored.store
    tasks = {"a": "task-2", "b": "task-1", "c": "task-2", "d": "gone"}
    store.add_trajectories([trajectory(at.id, name, task_id=task) for name, task in tasks.items()])
    evidence = [{"id": name, "votes": 9} for name in tasks]
    store.put([SelectionRow(round_id=at.id, capability_id=row_id(at.id, CAPABILITY), selected=True, evidence=evidence)])


def test_the_tasks_are_those_whose_failures_lacked_the_capability(stored: StoredRound) -> None:
    tasks = [TargetTask(f"task-{i}", "diagnosis", "f", i) for i in range(4)]
    assert failed_tasks(stored, CAPABILITY, tasks) == []  # nothing selected yet
    lacking(stored)
    assert failed_tasks(stored, CAPABILITY, tasks) == []  # nothing rolled out
    shop = Shop(stored.store)
    shop.stage(stored.round, RolloutResult(trajectories=["a"], lost=0, success=0.0))
    assert [task.id for task in failed_tasks(stored, CAPABILITY, tasks)] == ["task-2", "task-1"]


def test_trials_of_few_tasks_do_not_crowd_the_others_out(stored: StoredRound) -> None:
    """Ten trajectories are evidence: where they are of three tasks there is no verdict, and all is paid in vain."""
    at, store = stored.round, stored.store
    identity = row_id(at.id, CAPABILITY)
    names = [f"{task:02}-{trial}" for task in range(12) for trial in range(4)]
    solved = {"11-0", "11-1", "11-2", "11-3"}  # lacking, and solved all the same
    rows = [trajectory(at.id, n, task_id=f"task-{n[:2]}", success=n in solved, trial=int(n[-1])) for n in names]
    store.add_trajectories(rows)
    votes = [(run, name) for run in range(10) for name in names] + [(10, "05-1")]
    store.put(
        [LabelRow(round_id=at.id, run=r, trajectory_id=n, capability_id=identity, label="LACKING") for r, n in votes]
    )
    evidence = [{"id": "05-1", "votes": 11}, *({"id": name, "votes": 10} for name in names[:9])]
    store.put([SelectionRow(round_id=at.id, capability_id=identity, selected=True, evidence=evidence)])
    Shop(store).stage(at, RolloutResult(trajectories=names, lost=0, success=0.0))
    found = failed_tasks(stored, CAPABILITY, [TargetTask(f"task-{i:02}", "diagnosis", "f", i) for i in range(12)])
    assert [task.id[-2:] for task in found] == ["05", "00", "01", "02", "03", "04", "06", "07", "08", "09"]


def accepted(stored: StoredRound, kind: str) -> str:
    """An accepted environment of the capability, and a training in it whose check found that nothing carries over."""
    at, store = stored.round, stored.store
    rows = [
        trajectory(
            at.id,
            f"{side}{i}",
            task_id=f"task-{i}",
            reward=reward,
            success=reward == 1.0,
            messages=[{"role": "user", "content": text}],
        )
        for side, reward, text in (("in", 1.0, "PRACTISED-HERE"), ("out", 0.0, "TRIED-THERE"))
        for i in range(8)
    ]
    store.add_trajectories(rows)
    start = outcomes(store, [row.id for row in rows if row.id.startswith("out")])
    now = outcomes(store, [row.id for row in rows if row.id.startswith("in")])
    found = transfer_of(1, start, now, start)
    made = EnvironmentRow(
        id="made", round_id=at.id, capability_id=row_id(at.id, CAPABILITY), version=1, kind=kind,
        state=EnvironmentState.DRAFT, verdicts={"validation": {"accepted": True}},
    )  # fmt: skip
    store.put([made])
    for state in (EnvironmentState.CHECKED, EnvironmentState.ACCEPTED):
        store.set_state(EnvironmentRow, "made", state)
    result = TrainResult(
        adapter="x", sha256="", steps=1, run="", ending="does-not-transfer", chosen=1, verdict=found.verdict,
        transfer=found,
    )  # fmt: skip
    assert result.goes_back
    assert not result.goes_on
    Shop(store).stage(stored.round, result, CAPABILITY)
    return found.verdict


def context_of(stored: StoredRound) -> Any:
    settings = SimpleNamespace(synthesizer=SimpleNamespace(versions=5))
    return SimpleNamespace(store=stored.store, round=stored.round, settings=settings, found=stored.found)


def test_the_author_is_told_with_episodes_from_both_sides_and_writes_again(stored: StoredRound) -> None:
    verdict = accepted(stored, "llm")
    assert withdraw(context_of(stored), CAPABILITY, verdict)
    row = stored.store.row(EnvironmentRow, id="made")
    assert row is not None
    assert (row.state, row.verdicts["withdrawn"]) == (EnvironmentState.WITHDRAWN, verdict)
    told = Version(1, "SOURCE", "", False, (verdict,), {"transfer": row.verdicts["transfer"]}, "", "")
    said = author_messages(Brief(CAPABILITY, "", [], [], ""), [told])[-1]["content"]
    assert "- does-not-transfer: after step 1" in said
    assert "### the trained agent in your environment, best episode: reward 1.00, success" in said
    assert "### the trained agent on the target, worst episode: reward 0.00, no success" in said
    assert said.count("PRACTISED-HERE") == 1
    assert "TRIED-THERE" in said
    assert "target_success 0.000" in said
    assert stored.found(TrainResult, CAPABILITY) is None  # its stages are owed again


def in_order_of_postgresql(value: Any) -> Any:
    """JSON as JSONB gives it back: shorter keys first, then by their letters."""
    if isinstance(value, list):
        return [in_order_of_postgresql(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: in_order_of_postgresql(value[k]) for k in sorted(value, key=lambda k: (len(k), k))}


def test_the_author_is_asked_the_same_of_a_version_that_was_just_judged_and_of_one_that_was_stored() -> None:
    """Else a round that goes on would pay for its next version a second time."""
    row = {"interval": [0.5, 1.0], "success_rate": 0.9, "mean_reward": 0.9, "mean_steps": 2.0, "episodes": 30}
    call = {"name": "set_address", "arguments": {"order_id": "W1", "city": "Rome"}}
    shown = {"name": "random", "reward": 1.0, "success": True, "checks": [], "messages": [
        {"role": "user", "content": "Move it."}, {"role": "assistant", "content": "", "tool_calls": [call]},
    ]}  # fmt: skip
    figures = {"policies": {"random": row, "oracle": row}, "success_rate": 0.9, "low": 0.7, "exhibits": [shown]}
    judged = {"validation": {"accepted": False, "reasons": ["too easy"], "figures": figures}}
    new, kept = (
        Version(1, "SOURCE", "", False, ("too easy",), verdicts, "", "")
        for verdicts in (judged, in_order_of_postgresql(judged))
    )
    brief = Brief(CAPABILITY, "", [], [], "")
    assert author_messages(brief, [new]) == author_messages(brief, [kept])


def test_a_composed_environment_is_taken_back_and_not_made_again(stored: StoredRound) -> None:
    assert not withdraw(context_of(stored), CAPABILITY, accepted(stored, "generators"))
    row = stored.store.row(EnvironmentRow, id="made")
    assert row is not None
    assert row.state == EnvironmentState.WITHDRAWN
    assert stored.found(TrainResult, CAPABILITY) is not None
