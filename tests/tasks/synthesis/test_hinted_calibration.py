"""A capability that is never shown is calibrated once more with advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Action, Environment, Message
from environments.sandbox.workers import WorkerNotStarted
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.shop.target import target
from errors import EnvironmentFault
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import HINT, measure


class Follower:
    """Does right where it is advised by one more example than the shop has, in a share of the episodes, and otherwise
    says something. Without advice it does right in `alone` of 100 scenarios."""

    def __init__(self, one_in: int, alone: int = 0) -> None:
        self.one_in, self.alone = one_in, alone

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("follower", str(self.one_in), "", "", "")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        told = sum(call.name == "coupon" for m in environment.examples for call in m.tool_calls) > 1
        order = next((w.strip(".") for w in messages[0].content.split() if w.strip(".").isdigit()), "0")
        right = (
            environment.oracle() if (told and int(order) % self.one_in == 0) or int(order) % 100 < self.alone else None
        )
        return right or Action(content="Hello.")


@pytest.fixture
def context(settings_folder: Path) -> Any:
    settings = load_settings(profile="smoke", home=settings_folder / "home", calibration={"seeds": 30, "samples": 2})
    opened = open_context(settings)
    yield opened
    forget(opened.round.id)


def coupons() -> ComposedEnvironment:
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "apply_coupon", ("use_coupon",)))


def test_what_only_advice_brings_out_is_accepted_with_hints(context: Any) -> None:
    found = measure(context.engine_of(Follower(1)), context.settings, coupons())
    assert found.accepted
    assert found.hinted == 1.0
    assert found.figures["success_rate"] == 0.0
    assert found.reason.startswith("accepted with hints: with advice 100 % of the episodes succeed, without 0 % (")
    assert found.row("e").detail["hinted"] == 1.0
    frame = context.store.trajectory_frame(None, purpose="calibration")
    assert sorted(frame["group_id"].fillna("").value_counts().items()) == [("", 60), (HINT, 60)]


def test_advice_that_hardly_helps_is_not_enough(context: Any) -> None:
    found = measure(context.engine_of(Follower(1000)), context.settings, coupons())
    assert not found.accepted
    assert found.hinted is not None
    assert found.hinted < 0.05
    assert "at least 5 % are needed to train with hints" in found.reason


def test_what_is_rarely_shown_is_trained_with_hints_where_they_help(context: Any) -> None:
    found = measure(context.engine_of(Follower(1, alone=1)), context.settings, coupons())
    assert 0 < found.figures["success_rate"] < 0.1
    assert (found.accepted, found.hinted) == (True, 1.0)
    unmoved = measure(context.engine_of(Follower(10**6, alone=1)), context.settings, coupons())
    assert not unmoved.accepted
    assert "with advice" in unmoved.reason


def test_without_hints_nothing_is_played_twice(context: Any) -> None:
    settings = context.settings.model_copy(update={"train": context.settings.train.model_copy(update={"hints": 0.0})})
    found = measure(context.engine_of(Follower(1)), settings, coupons())
    assert (found.accepted, found.hinted) == (False, None)
    assert "hinted" not in found.row("e").detail


@pytest.mark.parametrize("problem", [WorkerNotStarted("Too many open files"), EnvironmentFault("KeyError: 'slot'")])
def test_a_machine_that_starts_no_worker_says_nothing_of_a_module(
    context: Any, monkeypatch: pytest.MonkeyPatch, problem: EnvironmentFault
) -> None:
    """It was refused as a module that broke down, and its author asked, and paid, for another."""

    def make(self: ComposedEnvironment) -> Any:
        raise problem

    monkeypatch.setattr(ComposedEnvironment, "environment", make)
    said = "all 60 calibration episodes were lost to errors; the first: KeyError: 'slot'"
    with pytest.raises(EnvironmentFault) as raised:
        measure(context.engine_of(Follower(1)), context.settings, coupons())
    assert (type(raised.value), str(raised.value)) == (type(problem), str(problem) if problem.transient else said)
