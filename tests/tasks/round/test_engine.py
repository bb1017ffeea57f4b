"""The engine plays what is owed, keeps what was played whatever ends it, and stops or tries again as it is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from db import Store, open_store
from environments.contract import Action, Environment, Message, Observation, Score, TargetTask, ToolCall
from errors import BudgetExceeded, ConfigurationError, EnvironmentFault, PolicyError, ProviderError, SandboxError
from models.episodes import Episode, Trajectory
from models.policy import PolicyIdentity
from models.scripted import OraclePolicy
from tasks.round import engine as engines
from tasks.round.engine import Engine, Origin, Playground, PlayOptions, PlayRun
from tasks.round.rollouts import RoundEngine
from tasks.unattended.progress import Stopwatch
from tests.tasks.counting_target import TASKS, Counting

EPISODES = [Episode("", task, 3, 0) for task in TASKS]
GROUND = Playground(Counting, "counting", "diagnosis", 0.7, 16)
AGAIN = PlayOptions(tries=2, passing=("provider",), fatal=("configuration",))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


class Failing(OraclePolicy):
    """The oracle, which raises `problems` one after another, each before an episode's first turn; None is none."""

    def __init__(self, *problems: BaseException | None) -> None:
        self.problems = list(problems)
        self.turns = 0

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        self.turns += 1
        if len(messages) == 1 and self.problems and (problem := self.problems.pop(0)):
            raise problem
        return super().act(environment, messages, seed)


def engine(store: Store, policy: Any = None, options: PlayOptions = engines.ONCE) -> Engine:
    return Engine(store, Origin("counting", "counting-1"), policy or OraclePolicy(), options=options)


def lost(problem: str = "away") -> ProviderError:
    return ProviderError(problem)


def test_ids_are_those_that_earlier_versions_stored(store: Store) -> None:
    playing = engine(store)
    assert playing.ids(GROUND, EPISODES[:2]) == ["d8aee13524c144118ca6891e", "51ce2056d7e3c83d6377a3ec"]
    scoped = Playground(Counting, "counting", "evaluation", 0.0, 0, scope="evaluation:cff87254925b4506")
    first = [Episode("", task) for task in TASKS[:2]]
    assert set(playing.ids(scoped, first)) == {"5d1a8b2655d7107cf0f55287", "cae078b59ab03a96ff599671"}


def test_what_is_stored_is_not_played_again(store: Store) -> None:
    first = engine(store).play(GROUND, EPISODES[:3])
    policy = Failing()
    run = engine(store, policy).play(GROUND, [*EPISODES, *EPISODES[:3]])
    assert (first.played, run.resumed, run.played) == (3, 3, 5)
    assert run.ids[:3] == run.ids[8:] == first.ids
    assert run.steps == policy.turns == 10
    assert run.environment_seconds > 0
    assert store.stored_ids(run.ids) == set(run.ids)
    row = store.trajectory(run.ids[0])
    assert (row.target, row.data_hash, row.round_id, row.purpose) == ("counting", "counting-1", None, "diagnosis")


def test_whatever_ends_it_keeps_what_was_played(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine(store, Failing(None, None, KeyboardInterrupt())).play(GROUND, EPISODES)
    run = engine(store).play(GROUND, EPISODES)
    assert (run.resumed, run.played) == (2, 6)


@pytest.mark.parametrize(("flush", "seconds", "batches"), [(3, 60.0, [3, 3, 2]), (16, 0.0, [1] * 8), (16, 60.0, [8])])
def test_batches_by_count_and_by_seconds(
    store: Store, monkeypatch: pytest.MonkeyPatch, flush: int, seconds: float, batches: list[int]
) -> None:
    monkeypatch.setattr(engines, "FLUSH", flush)
    monkeypatch.setattr(engines, "FLUSH_SECONDS", seconds)
    seen = [0]
    options = PlayOptions(flushed=lambda: seen.append(len(store.trajectory_frame(None))))
    engine(store, options=options).play(GROUND, EPISODES)
    written = [b - a for a, b in pairwise(seen)]
    assert [n for n in written if n] == batches


def test_lost_episodes_are_owed_and_played_again_where_asked(store: Store) -> None:
    once = engine(store, Failing(lost(), EnvironmentFault("broken"))).play(GROUND, EPISODES[:3])
    assert (once.played, len(store.stored_ids(once.ids))) == (3, 1)
    again = engine(store, Failing(lost(), EnvironmentFault("broken")), AGAIN).play(GROUND, EPISODES)
    assert (again.resumed, again.played) == (1, 8)  # seven owed, and the one that the provider lost once more
    assert len(store.stored_ids(again.ids)) == 7
    assert again.stopped == ""


def test_a_fatal_boundary_stops_and_so_do_many_lost_in_a_row(store: Store) -> None:
    refused = engine(store, Failing(None, ConfigurationError("no key")), AGAIN).play(GROUND, EPISODES)
    assert (refused.played, refused.stopped) == (2, "no key")
    down = PlayOptions(tries=2, passing=("provider",), lost_in_a_row=3)
    run = engine(store, Failing(lost(), None, *(lost() for _ in range(9))), down).play(GROUND, EPISODES[2:])
    assert run.played == 5
    assert run.stopped == "the last 3 episodes were all lost; the last one to the provider: away"
    assert engine(store, Failing(), PlayOptions(workers=0)).play(GROUND, EPISODES).played == 0


def test_what_was_lost_before_is_played_last_where_a_row_of_them_stops(store: Store) -> None:
    """An evaluation that is run again would stop at the same few tasks that nobody can play, and never see the rest."""
    unplayable = {task.id for task in TASKS[:3]}

    class Broken(Counting):
        def reset(self, task: TargetTask) -> Observation:
            if task.id in unplayable:
                raise EnvironmentFault("broken")
            return super().reset(task)

    ground = Playground(Broken, "counting", "diagnosis", 0.7, 16)
    down = PlayOptions(passing=("environment",), lost_in_a_row=3)
    first = engine(store, options=down).play(ground, EPISODES)
    assert (first.played, len(store.stored_ids(first.ids))) == (3, 0)
    again = engine(store, options=down).play(ground, EPISODES)
    assert (again.played, len(store.stored_ids(again.ids))) == (8, 5)
    assert again.ids == first.ids
    assert again.stopped.startswith("the last 3 episodes were all lost")


def test_threads_play_at_once_and_store_the_same(store: Store) -> None:
    meeting = threading.Barrier(4, timeout=20)

    class Meeting(Counting):
        def reset(self, task: TargetTask) -> Observation:
            meeting.wait()  # goes on only when four episodes are open
            return super().reset(task)

    ground = Playground(Meeting, "counting", "diagnosis", 0.7, 16)
    run = engine(store, options=PlayOptions(workers=4)).play(ground, EPISODES)
    assert (run.played, run.steps) == (8, 16)
    assert run.ids == engine(store).ids(GROUND, EPISODES)
    assert store.stored_ids(run.ids) == set(run.ids)
    assert {t.policy_id for t in store.trajectories(None)} == {PolicyIdentity("oracle", "1").id}


def test_what_ends_well_after_the_cap_stopped_the_others_is_stored(store: Store) -> None:
    stopped, asked = threading.Event(), threading.Barrier(2, timeout=20)

    class Capped(PlayOptions):
        def reason_to_stop(self, trajectory: Trajectory, lost: int) -> str:
            reason = super().reason_to_stop(trajectory, lost)
            if reason:
                stopped.set()
            return reason

    class Spending(OraclePolicy):
        def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
            if len(messages) == 1 and asked.wait() == 0:
                raise BudgetExceeded("the cap is reached")
            assert stopped.wait(20)  # its answer comes, and is paid, when nothing more is asked
            return super().act(environment, messages, seed)

    playing = engine(store, Spending(), Capped(workers=2, fatal=(BudgetExceeded.boundary,)))
    run = playing.play(GROUND, EPISODES)
    assert (run.played, run.stopped, run.steps) == (2, "the cap is reached", 2)
    assert len(store.stored_ids(run.ids)) == 1


def test_one_faulty_score_costs_no_other_episode(store: Store) -> None:
    class Faulty(Counting):
        def score(self) -> Score:
            return Score(0.0, False, (), {"ratio": float("nan") if self.n == 3 else 1.0})

    ground = Playground(Faulty, "counting", "diagnosis", 0.7, 16)
    run = engine(store).play(ground, EPISODES)
    assert len(store.stored_ids(run.ids)) == 7
    lost = store.trajectory(run.ids[3])
    assert lost.error_boundary == "environment"
    assert "metric 'ratio' as nan" in str(lost.error)
    assert engine(store).play(ground, EPISODES).played == 1, "and it alone is owed"


def test_a_call_nested_too_deeply_is_stored_as_a_malformed_turn(store: Store) -> None:
    class Deep(OraclePolicy):
        def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
            value: Any = 1
            for _ in range(500):
                value = [value]
            return Action(tool_calls=(ToolCall("count", {"n": value}),))

    run = engine(store, Deep()).play(GROUND, EPISODES[:2])
    assert store.stored_ids(run.ids) == set(run.ids)
    assert "nested deeper" in store.trajectory(run.ids[0]).steps[0].action["content"]


def test_a_rounds_engine_counts_the_seconds_also_of_what_a_cap_broke_off() -> None:
    class Played:
        stopped = ""

        def play(self, ground: Playground, episodes: list[Episode], what: str) -> PlayRun:
            return PlayRun(["a"], 0, stopped=self.stopped, model_seconds=2.0, environment_seconds=3.0)

    played = Played()
    engine = RoundEngine(played, Stopwatch(), Stopwatch(1.0))  # type: ignore[arg-type]
    assert engine.play(GROUND, [], "it") == ["a"]
    assert (engine.model.seconds, engine.environment.seconds) == (2.0, 4.0)
    played.stopped = "the round's calls to 6, over the cap of 5"
    with pytest.raises(BudgetExceeded, match="over the cap of 5"):
        engine.play(GROUND, [], "it")
    assert (engine.model.seconds, engine.environment.seconds) == (4.0, 7.0)


@pytest.mark.parametrize(
    ("problems", "target", "left"),
    [
        ([lost()] * 4, "counting", 0),
        ([lost()] * 4, "other", 0),
        ([lost(), EnvironmentFault("slow"), SandboxError("died")], "counting", 0),
        ([lost(), EnvironmentFault("slow"), SandboxError("died")], "other", 2),  # an environment is judged by its own
        ([PolicyError("too long"), lost()], "counting", 1),  # the same prompt would be too long again
        ([lost(), *[None] * 7, lost()], "counting", 1),  # once more, and no more
    ],
)
def test_the_few_that_errors_took_are_played_once_more(
    store: Store, problems: list[Exception | None], target: str, left: int
) -> None:
    played = Engine(store, Origin(target, "counting-1"), Failing(*problems))
    ids = RoundEngine(played, Stopwatch(), Stopwatch()).play(GROUND, EPISODES, "it")
    assert len(ids) - len(store.stored_ids(ids)) == left


@pytest.mark.parametrize(("away", "raises"), [(5, True), (4, False)])
def test_what_a_server_has_mostly_lost_is_no_result(store: Store, away: int, raises: bool) -> None:
    """More than half of eight; the same call plays the rest once it answers."""
    down = RoundEngine(engine(store, Failing(*[lost()] * away)), Stopwatch(), Stopwatch())
    if raises:
        with pytest.raises(ProviderError, match=r"5 of 8 episodes \(it\) were lost .* the first: away") as raised:
            down.play(GROUND, EPISODES, "it")
        assert raised.value.transient, "by this the stage is tried again"
    else:
        down.play(GROUND, EPISODES, "it")
    up = RoundEngine(engine(store), Stopwatch(), Stopwatch())
    assert store.stored_ids(up.play(GROUND, EPISODES, "it")) == set(up.engine.ids(GROUND, EPISODES))
