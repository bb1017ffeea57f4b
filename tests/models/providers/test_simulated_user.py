"""A user played by a model: what it is asked with, how often, how many at once, and what a slow provider costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, TargetTask
from environments.targets.third_party.simulated_user import UserModel
from errors import BudgetExceeded, ProviderError
from models.episodes import Episode, Player, Trajectory
from models.policy import Sampling
from models.providers import simulated_user
from models.providers.client import ModelClient
from models.providers.simulated_user import user_model
from models.scripted import NoopPolicy
from tasks.round.rollouts import WITHIN_BUDGET
from tests.models.providers.chat_server import failed, says
from tests.models.providers.scripted_analyst import ScriptedAnalyst, in_turn, slow
from tests.tasks.talking_target import USER, Talk

SAID = [{"role": "user", "content": "Hi! How can I help you today?"}]
# A step of the episodes here: several turns of a user that takes its time are longer.
STEP_SECONDS = 0.6
Script = Callable[[int, dict[str, Any]], dict[str, Any]]
Speaking = Callable[..., tuple[UserModel, ScriptedAnalyst]]


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Speaking]:
    """speaking(script, **options) -> (user, server); everything is closed afterwards."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(simulated_user, "WAITS", (0.01, 0.01, 0.01))
    client, servers = ModelClient(), list[ScriptedAnalyst]()

    def start(script: Script, **options: Any) -> tuple[UserModel, ScriptedAnalyst]:
        server = ScriptedAnalyst(script)
        servers.append(server)
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        user = user_model(USER, client, **options)
        assert user is not None
        user(SAID, ())  # LiteLLM is imported, and the connection is there
        return user, server

    yield start
    client.close()
    for server in servers:
        server.__exit__()


def test_a_call_that_failed_for_a_while_is_tried_again(speaking: Speaking) -> None:
    user, server = speaking(in_turn(says("Hi."), failed(429), failed(503), says("I want help.")))
    assert user(SAID, ()) == ("I want help.", ())
    assert len(server.requests) == 4


def test_a_provider_that_wants_to_be_paid_stops_what_is_played_until_somebody_pays(speaking: Speaking) -> None:
    user, server = speaking(lambda n, r: failed(402, "Insufficient credits") if n else says("Hi."))
    with pytest.raises(BudgetExceeded, match=r"Insufficient credits; pay its provider \(HTTP 402\)"):
        user(SAID, ())
    assert len(server.requests) == 2, "asking an unpaid provider again changes nothing"
    assert played(user, thread=False).boundary in WITHIN_BUDGET.fatal


def test_so_many_turns_are_asked_for_at_once(speaking: Speaking) -> None:
    user, server = speaking(lambda n, r: slow("Yes.", 0.05), concurrency=2)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: user(SAID, ())[0], range(6)))
    assert answers == ["Yes."] * 6
    assert server.most_running == 2


def test_a_model_that_takes_no_temperature_is_sent_none(speaking: Speaking) -> None:
    assert "temperature" not in speaking(lambda n, r: says("Yes."), send_temperature=False)[1].requests[0]
    assert speaking(lambda n, r: says("Yes."))[1].requests[0]["temperature"] == 0.0


def test_nothing_is_asked_any_more_once_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(simulated_user, "WAITS", (60.0,))
    client = ModelClient()
    with ScriptedAnalyst(lambda n, r: failed(503)) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        user = user_model(USER, client)
        assert user is not None
        asked = pool.submit(user, SAID, ())
        while not server.requests:
            threading.Event().wait(0.01)
        client.close()
        with pytest.raises(ProviderError, match="stopped before the call"):
            asked.result(10)
    assert len(server.requests) == 1


class Wordy(Talk):
    """The user takes four turns in a step, as tau2's does with its phone."""

    def step(self, action: Action) -> Observation:
        said = [self._user([{"role": "user", "content": action.content}], ())[0] for _ in range(4)]
        return Observation((Message("user", said[-1]),), True)


def played(user: UserModel, thread: bool) -> Trajectory:
    """An episode, in the main thread or, as most are, in another one: limits work differently there."""

    def play() -> Trajectory:
        player = Player(lambda: Wordy(user), NoopPolicy(), None, Sampling(), step_seconds=STEP_SECONDS)
        (trajectory,) = player.play([Episode("e", TargetTask("t", "test", "talk", 0))])
        return trajectory

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(play).result(30) if thread else play()


@pytest.mark.parametrize("thread", [False, True])
def test_a_slow_provider_that_answers_loses_no_episode(speaking: Speaking, thread: bool) -> None:
    user, server = speaking(lambda n, r: slow("Yes.", 0.3 if n else 0.0))
    trajectory = played(user, thread)
    assert (trajectory.error, len(server.requests)) == ("", 6)
    assert trajectory.steps[0].milliseconds > 1000 * STEP_SECONDS


@pytest.mark.parametrize("thread", [False, True])
def test_a_provider_that_hangs_is_the_providers_failure(
    speaking: Speaking, thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, server = speaking(lambda n, r: slow("Too late.", 2.0) if n > 1 else says("Hi."))
    monkeypatch.setattr(simulated_user, "CALL_SECONDS", 0.2 + STEP_SECONDS)
    monkeypatch.setattr(simulated_user, "TRY_SECONDS", 0.2)
    trajectory = played(user, thread)
    assert (trajectory.boundary, trajectory.score) == ("provider", None)
    assert "did not answer within 0.8 s; try again later" in trajectory.error
    assert len(server.requests) == 3, "when the time for tries is over there is no other"
