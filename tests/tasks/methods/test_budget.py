"""The counter: every episode once, across accounts that inherit; nothing past the budget; the test split beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from db import Store, TrajectoryRow, Written, open_store
from environments.contract import TargetTask
from errors import ConfigurationError, EpisodesSpent
from models.episodes import Episode, Player, Trajectory
from models.policy import Sampling
from models.scripted import OraclePolicy
from tasks.methods.seed.budget import Account, Lender
from tasks.round.engine import Engine, Origin, Playground, row_of
from tasks.round.rollouts import RoundEngine, purpose_of
from tasks.unattended.progress import Stopwatch
from tests.tasks.counting_target import TASKS, Counting

GROUND = Playground(Counting, "counting", "evaluation", 0.7, 16)
DIAGNOSIS = [Episode("", task, 3) for task in TASKS]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


def test_an_episode_is_charged_once_to_a_method_and_to_all_that_inherit(store: Store) -> None:
    shared = Account.open(store, "diagnosis", 10)
    shared.admit(["a", "b", "a"], "diagnosis")
    trace = Account.open(store, "trace", 10, ["diagnosis"])
    single = Account.open(store, "single", 10, ["trace"])
    trace.admit(["b", "c"], "calibration")
    assert trace.counts() == single.counts() == {"diagnosis": 2, "calibration": 1}
    assert (shared.spent, trace.spent, single.left) == (2, 3, 7)
    single.admit(["a", "b", "c", "d"], "evaluation")
    assert (single.spent, trace.spent) == (4, 3), "what inherits pays alone"
    assert Account.open(store, "trace", 10, ["diagnosis"]).spent == 3, "opened again it goes on"
    with pytest.raises(ConfigurationError, match="'trace' has a budget of 10 episodes, 12 are asked for"):
        Account.open(store, "trace", 12)


def test_what_would_pass_the_budget_is_refused_whole_and_test_is_paid_by_nobody(store: Store) -> None:
    account = Account.open(store, "gepa", 3)
    account.admit(["a", "b"], "evaluation")
    with pytest.raises(EpisodesSpent, match=r"2 more episodes \(training\) would pass the budget of 3 .*; 1 are left"):
        account.admit(["c", "d"], "training")
    assert account.counts() == {"evaluation": 2}
    account.admit([f"t{i}" for i in range(9)], "test")
    account.admit(["a", "c"], "evaluation")
    assert (account.left, account.counts()) == (0, {"evaluation": 3, "test": 9})
    account.admit(["a", "b"], "evaluation")  # there already


def test_a_training_may_play_the_same_whenever_it_is_asked(store: Store) -> None:
    account = Account.open(store, "mixed", 100)
    account.admit([f"d{i}" for i in range(20)], "diagnosis")
    account.share = lambda left: left - 30
    assert account.for_training("adapter") == 50
    played = [row_of(t, Playground(Counting, "c", "training", 1.0, 8, "adapter"), Origin("c", "1"), f"x{i}")
              for i, t in enumerate(_trajectories())]  # fmt: skip
    store.add_trajectories(played)
    account.admit([row.id for row in played], "training")
    assert account.for_training("adapter") == 50, "its own episodes are not taken off"
    assert account.for_training("another") == 50 - len(played)
    account.share = lambda left: (left - 30) // 3
    assert account.for_training("adapter") == 50 // 3
    account.share = lambda left: left - 1000
    assert account.for_training("adapter") == 0


def test_what_a_process_was_charged_for_and_did_not_play_is_known(store: Store) -> None:
    account = Account.open(store, "trace", 100, ["diagnosis"])
    assert account.unplayed("calibration") == 0
    rows = [row_of(t, replace(GROUND, purpose="calibration"), Origin("c", "1"), f"x{i}")
            for i, t in enumerate(_trajectories())]  # fmt: skip
    account.admit([*(row.id for row in rows), "died", "died, too"], "calibration")
    account.admit(["another's"], "evaluation")
    store.add_trajectories(rows)
    assert (account.unplayed("calibration"), account.unplayed("evaluation")) == (2, 1)


def test_what_is_left_over_is_the_routers(store: Store) -> None:
    """Beside what proves the candidate; what these adapters have played for it is theirs, another's is spent."""
    account = Account.open(store, "trace", 100)
    account.admit([f"d{i}" for i in range(20)], "diagnosis")
    assert account.for_routing(["new"], "routing") == 0, "nobody has said yet what a proof takes"
    account.proof = lambda: 30
    assert account.for_routing(["new"], "routing") == 50
    tried = {name: [row_of(t, Playground(Counting, name, "routing", 1.0, 8, name), Origin("c", "1"), f"{name}{i}")
                    for i, t in enumerate(_trajectories())] for name in ("new", "old")}  # fmt: skip
    for rows in tried.values():
        store.add_trajectories(rows)
        account.admit([row.id for row in rows], "routing")
    count = len(tried["new"])
    assert account.for_routing(["new"], "routing") == 50 - count
    assert account.for_routing(["new", "old"], "routing") == 50
    account.admit(["being played when the process died"], "routing")
    assert account.for_routing(["new"], "routing") == 50 - count
    account.proof = lambda: 99
    assert account.for_routing(["new"], "routing") == 0


def _trajectories() -> list[Trajectory]:
    player = Player(Counting, OraclePolicy(), None, Sampling(0.0, 8))
    return list(player.play([replace(e, adapter="adapter") for e in DIAGNOSIS]))


def test_the_engine_charges_before_it_plays_and_plays_nothing_that_is_not_paid(store: Store) -> None:
    account = Account.open(store, "examples", 5)
    engine = RoundEngine(
        Engine(store, Origin("counting", "counting-1"), OraclePolicy()), Stopwatch(), Stopwatch(), account
    )
    # TASKS are of the split test: what a method plays for itself is of another.
    own = [Episode("", _of_split(task, "validation"), 3) for task in TASKS]
    assert (purpose_of(GROUND, own), purpose_of(GROUND, DIAGNOSIS)) == ("evaluation", "test")
    ids = engine.play(GROUND, own[:4])
    assert account.charged() == dict.fromkeys(ids, "evaluation")
    with pytest.raises(EpisodesSpent):
        engine.play(GROUND, own)
    assert set(store.query("SELECT id FROM trajectories")["id"]) == set(ids)
    assert engine.play(GROUND, own[:4]) == ids
    assert len(engine.play(GROUND, DIAGNOSIS)) == 8
    assert account.counts() == {"evaluation": 4, "test": 8}


def _of_split(task: TargetTask, split: str) -> TargetTask:
    return replace(task, id=f"{split}-{task.id}", split=split)


def test_what_another_home_has_played_is_lent_as_it_is_charged(store: Store, tmp_path: Path) -> None:
    lending = Engine(store, Origin("counting", "counting-1"), OraclePolicy())
    ids = lending.play(GROUND, DIAGNOSIS).ids
    with open_store(f"sqlite:///{tmp_path / 'other.db'}") as other:
        round_ = other.start_round("counting", "counting-1", 0, "smoke", {})
        account = Account.open(other, "placebo-rewards", 50)
        account.lender = Lender(store, round_.id)
        account.admit([*ids[:3], "not there"], "diagnosis")
        assert set(other.query("SELECT id FROM trajectories")["id"]) == set(ids[:3])
        assert other.trajectory(ids[0]).round_id == round_.id
        assert other.trajectory(ids[0]).messages == store.trajectory(ids[0]).messages
        run = Engine(other, Origin("counting", "counting-1", round_.id), OraclePolicy()).play(GROUND, DIAGNOSIS)
        assert (run.resumed, run.played) == (3, 5)


def test_what_was_not_lent_when_the_process_died_is_lent_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Charged and never copied, it would be played anew, or be missing among the tokens that the method paid for."""
    ids = Engine(store, Origin("counting", "counting-1"), OraclePolicy()).play(GROUND, DIAGNOSIS).ids
    with open_store(f"sqlite:///{tmp_path / 'other.db'}") as other:
        account = Account.open(other, "trace+gepa", 50)
        account.lender = Lender(store, None)
        add, copied = Store.add_trajectories, list[str]()

        def dies(self: Store, rows: Sequence[TrajectoryRow]) -> Written:
            copied.extend(row.id for row in rows)
            if len(copied) == 3:
                raise KeyboardInterrupt
            return add(self, rows)

        with monkeypatch.context() as patched:
            patched.setattr(Store, "add_trajectories", dies)
            with pytest.raises(KeyboardInterrupt):
                account.admit(ids, "diagnosis")
        account.admit(ids, "diagnosis")
        assert other.stored_ids(ids) == set(ids)
        assert account.counts() == {"diagnosis": len(ids)}


def test_seconds_and_dollars_are_those_of_the_work(store: Store) -> None:
    spent = [1.0]
    account = Account.open(store, "gepa", 5, dollars=lambda: spent[0])
    with account.working():
        spent[0] = 1.5
        account.admit(["a"], "evaluation")
        kept = account.row
        spent[0] = 1.75
    spent[0] = 9.0
    account.admit(["b"], "evaluation")
    assert kept.dollars == 0.5, "stored as it happens"
    assert account.row.dollars == 0.75
    assert 0 <= kept.seconds <= account.row.seconds < 5
