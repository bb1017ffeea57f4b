"""Episodes of the watch that were lost to errors: they may be the ones that the live release fails."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from environments.contract import Action, Environment, Message
from errors import BudgetExceeded, ConfigurationError, EpisodesLost, PolicyError
from models.policy import PolicyIdentity
from models.providers.client import ModelClient
from models.scripted import OraclePolicy
from tasks.operations import watch as watch_file
from tasks.operations.watch import watch_text
from tests.tasks.operations.watched_homes import LIVE_SINCE, NOW, Target, both, conversation


class Losing(OraclePolicy):
    """What stands for an adapter that breaks down on some tasks: a policy that fails on so many of them."""

    def __init__(self, most: int) -> None:
        self.left = most

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("losing", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        if self.left:
            self.left -= 1
            raise PolicyError("the adapter overflows")
        return super().act(environment, messages, seed)


class Asking(OraclePolicy):
    """What stands for a simulated user: each turn costs a call under the watch's cap, or is refused for its key."""

    def __init__(self, client: ModelClient | None) -> None:
        self.client = client

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        if self.client is None:
            raise ConfigurationError("the key is wrong (401)")
        with self.client.cap.call("openai/m", 10, 10, (1.0, 1.0)):
            return super().act(environment, messages, seed)


@pytest.mark.parametrize(
    ("cap", "value", "setting"),
    [("MAX_CALLS", "3", "max_calls"), ("MAX_TOTAL_TOKENS", "10", "max_total_tokens"), ("", "", "")],
)
def test_what_the_cap_left_unplayed_is_no_fall(
    world: Any, monkeypatch: pytest.MonkeyPatch, cap: str, value: str, setting: str
) -> None:
    """It counted as lost, by the release or by the base, and the advice was an option that the watch does not have."""
    if cap:
        monkeypatch.setenv(f"TRACE_ANALYST__{cap}", value)

    def target_of(settings: Any, store: Any, client: ModelClient) -> Target:
        world.plays["release@2"] = Asking(client if cap else None)
        return Target()

    both(world)
    monkeypatch.setattr(watch_file, "target_of", target_of)
    problem, said = (BudgetExceeded, f"raise analyst.{setting} and watch") if cap else (ConfigurationError, "the key")
    with pytest.raises(problem, match=said):
        world.watch(roll_back=True)
    assert (world.said, world.back) == ([], [])


def test_what_the_release_lost_to_errors_may_be_a_fall_and_is_told(world: Any) -> None:
    """The tasks that are left say nothing of those: the day would look well."""
    both(world)
    world.plays["release@2"] = Losing(15)
    found = world.watch(roll_back=True)
    assert (found.falls, world.back) == ([], [])
    said = "+0.0 points against release 1 on 25 fresh tasks, without 15 lost to errors (release 1: 0)"
    assert said in watch_text(found)
    assert "a fall cannot be excluded" in watch_text(found)
    (notice,) = world.said
    assert notice.kind == "fell"
    assert notice.text.startswith("release 2 of shop may have fallen: ")
    assert said in notice.text
    world.said.clear()
    assert "no significant fall" in watch_text(world.watch()), "what was lost is played again, and won"
    assert world.said == []


def test_a_release_that_lost_every_task_is_told(world: Any) -> None:
    both(world)
    world.plays["release@2"] = Losing(40)
    found = world.watch()
    said = "nothing to compare with release 1 on 0 fresh tasks, without 40 lost to errors (release 1: 0)"
    assert f"unclear: {said}" in watch_text(found)
    (notice,) = world.said
    assert notice.kind == "fell"
    assert notice.text.startswith("release 2 of shop may have fallen: ")
    assert said in notice.text


def test_a_release_that_lost_every_task_is_rolled_back_for_what_users_say(world: Any) -> None:
    both(world)
    before = [conversation(n, n < 27, LIVE_SINCE - timedelta(hours=1)) for n in range(30)]
    after = [conversation(100 + n, n < 4, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    world.store.put([*before, *after])
    world.plays["release@2"] = Losing(40)
    found = world.watch(roll_back=True)
    assert [(f.against, f.what) for f in found.falls] == [("release 1", "traffic")]
    assert (world.back, [n.kind for n in world.said]) == (["shop"], ["rolled-back"])


def test_one_lost_episode_is_no_news(world: Any) -> None:
    both(world)
    world.plays["release@2"] = Losing(1)
    assert "39 fresh tasks, without 1 lost to errors" in watch_text(found := world.watch())
    assert (found.losses, world.said) == ([], [])


def test_a_day_that_nobody_could_play_is_no_good_one(world: Any) -> None:
    both(world)
    for most in (25, 40):
        world.plays.update({name: Losing(most) for name in ("release@2", "release@1", "local:smollm2-135m")})
        with pytest.raises(EpisodesLost, match=f"{most} of 40 fresh tasks were lost to errors with the live release"):
            world.watch(NOW + timedelta(days=most))
