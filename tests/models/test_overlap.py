"""Environments and turns overlap, and what comes when changes no draw."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, Score, TargetTask, Termination
from models.episodes import Episode, Player, Trajectory, play_all
from models.policy import PolicyIdentity, Sampling
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from tests.models.vllm_backend.vllm_stub import vllm_stub

SAMPLING = Sampling(1.0, 4)
WAIT = 20.0


class Meeting:
    """An environment of two turns that notes its thread and asks `before` whether it may answer."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = 4

    def __init__(self, before: Callable[[str, int], object] = lambda name, turn: None) -> None:
        self.before, self.turns, self.threads = before, 0, {threading.get_ident()}

    def reset(self, task: TargetTask) -> Observation:
        self.name = task.id
        self.threads.add(threading.get_ident())
        return Observation((Message("user", task.id),))

    def step(self, action: Action) -> Observation:
        self.threads.add(threading.get_ident())
        self.before(self.name, self.turns)
        self.turns += 1
        return Observation((Message("user", "and?"),), done=self.turns == 2)

    def score(self) -> Score:
        return Score(0.5, False, metrics={"threads": len(self.threads | {threading.get_ident()})})

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None: ...


@pytest.fixture
def policy(tiny_model: Any) -> Iterator[VllmPolicy]:
    with vllm_stub() as stub:
        stub.context = 4096
        opened = VllmPolicy([VllmServer(stub.url, "base")], PolicyIdentity("b", "1"), frozenset({1}), 8)
        yield opened
        opened.close()


def episodes(count: int) -> list[Episode]:
    return [Episode(f"{i}", TargetTask(f"{i}", "test", "plain", 0), seed=3) for i in range(count)]


def drawn(trajectories: Sequence[Trajectory]) -> list[tuple[str, list[int]]]:
    return [(t.episode.key, list(t.conversation.ids)) for t in trajectories]


def test_environments_are_called_at_the_same_time(policy: VllmPolicy, tiny_model: Any) -> None:
    together = threading.Barrier(6)  # none passes before all have come
    player = Player(lambda: Meeting(lambda name, turn: together.wait(WAIT)), policy, tiny_model[1], SAMPLING, 6)
    played = play_all(player, episodes(6))
    assert [t.termination for t in played] == [Termination.DONE] * 6


def test_a_slow_environment_leaves_the_sampler_at_work(policy: VllmPolicy, tiny_model: Any) -> None:
    """The first one answers when all the others are over; each of them has two turns sampled meanwhile."""
    over = threading.Event()

    def before(name: str, turn: int) -> None:
        assert name != "0" or over.wait(WAIT)

    order = []
    for trajectory in Player(lambda: Meeting(before), policy, tiny_model[1], SAMPLING, 3).play(episodes(7)):
        order.append(trajectory.episode.key)
        if len(order) == 6:
            over.set()
    assert sorted(order[:6]) == ["1", "2", "3", "4", "5", "6"]
    assert order[6] == "0"


@pytest.mark.parametrize("backend", ["local", "vllm"])
def test_the_order_of_arrival_changes_no_draw(backend: str, policy: VllmPolicy, tiny_model: Any) -> None:
    sampler, renderer = (policy if backend == "vllm" else tiny_model[0]), tiny_model[1]
    alone = play_all(Player(Meeting, sampler, renderer, SAMPLING, 1), episodes(5))
    turn_of = {name: threading.Event() for name in "01234"}
    turn_of["4"].set()

    def last_comes_first(name: str, turn: int) -> None:
        if turn == 0:
            assert turn_of[name].wait(WAIT)
            if name != "0":
                turn_of[f"{int(name) - 1}"].set()

    backwards = play_all(Player(lambda: Meeting(last_comes_first), sampler, renderer, SAMPLING, 5), episodes(5))
    assert drawn(backwards) == drawn(alone)
    assert len({tuple(ids) for _, ids in drawn(alone)}) == 5


class Noting:
    """A policy in this process that notes what was submitted between two polls."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.batches = policy, [[]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def submit(self, request: Any) -> None:
        self.batches[-1].append(request.session)
        self.policy.submit(request)

    def poll(self) -> Any:
        self.batches.append([])
        return self.policy.poll()


def test_a_call_that_is_late_for_once_changes_no_batch(tiny_model: Any) -> None:
    """As on a busy machine: the last bits of the figures follow from what is computed together."""

    def batches(before: Callable[[str, int], object]) -> list[list[str]]:
        noting: Any = Noting(tiny_model[0])
        play_all(Player(lambda: Meeting(before), noting, tiny_model[1], SAMPLING, 4), episodes(6))
        return [batch for batch in noting.batches if batch]

    late = batches(lambda name, turn: time.sleep(0.1) if (name, turn) in (("2", 0), ("4", 1)) else None)
    assert late == batches(lambda name, turn: None)
    assert max(map(len, late)) > 1


def test_an_environment_stays_in_its_thread(policy: VllmPolicy, tiny_model: Any) -> None:
    for trajectory in Player(Meeting, policy, tiny_model[1], SAMPLING, 4).play(episodes(9)):
        assert trajectory.score is not None
        assert trajectory.score.metrics == {"threads": 1}


def test_a_call_that_never_returns_costs_its_own_episode(policy: VllmPolicy, tiny_model: Any) -> None:
    never = threading.Lock()
    never.acquire()

    def before(name: str, turn: int) -> None:
        if name == "1":
            never.acquire()

    player = Player(lambda: Meeting(before), policy, tiny_model[1], SAMPLING, 3, step_seconds=0.2)
    first, stuck, last = play_all(player, episodes(3))
    never.release()
    assert (stuck.boundary, stuck.score) == ("environment", None)
    assert "did not return within 0.2 s" in stuck.error
    assert first.score is not None
    assert last.score is not None


def test_giving_up_early_ends_what_is_in_flight(policy: VllmPolicy, tiny_model: Any) -> None:
    before = set(threading.enumerate())  # some are free since another test
    playing = Player(Meeting, policy, tiny_model[1], SAMPLING, 3).play(episodes(9))
    next(playing)
    playing.close()
    begun = {t.name for t in set(threading.enumerate()) - before}
    left = {name for name in begun if name.startswith("environments") and "calls" not in name}
    again = play_all(Player(Meeting, policy, tiny_model[1], SAMPLING, 3), episodes(4))
    assert [t.termination for t in again] == [Termination.DONE] * 4
    assert len(left) <= 3


def test_what_is_given_up_is_closed_in_its_thread_and_once(policy: VllmPolicy, tiny_model: Any) -> None:
    made, closed = list[Meeting](), SimpleQueue[tuple[Meeting, int]]()

    class Holding(Meeting):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def close(self) -> None:
            closed.put((self, threading.get_ident()))

    playing = Player(Holding, policy, tiny_model[1], SAMPLING, 3).play(episodes(9))
    next(playing)
    playing.close()
    found = [closed.get(timeout=WAIT) for _ in range(3)]
    assert {id(environment) for environment, _ in found} == {id(environment) for environment in made}
    assert len(made) == 3
    assert all(thread in environment.threads for environment, thread in found)
    assert closed.empty()
