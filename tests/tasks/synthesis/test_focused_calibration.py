"""With `train.focus` an environment is judged as training draws it: families that are mastered are drawn rarely."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.contract import Action, Environment, Message
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.shop.target import target
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import calibration_figures, focus_weights, measure


class Halfway:
    """Has mastered everything but coupons, with which it does right in a `share` of the episodes, by turns."""

    def __init__(self, share: float) -> None:
        self.share, self.coupons = share, 0

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("halfway", str(self.share), "", "", "")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        right = environment.oracle() or Action(content="Hello.")
        if not any(call.name == "coupon" for call in right.tool_calls):
            return right
        self.coupons += 1
        return Action(content="Hello.") if self.coupons % 2 >= 2 * self.share else right


@pytest.fixture
def context(settings_folder: Path) -> Any:
    settings = load_settings(profile="laptop", home=settings_folder / "home")
    opened = open_context(settings)
    yield opened
    forget(opened.round.id)


def composed() -> ComposedEnvironment:
    families = ("cancel_pending", "order_status", "use_coupon")
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "serve", families))


@pytest.mark.parametrize("focus", [True, False])
def test_what_is_lacking_in_one_family_is_trained_though_the_others_are_mastered(context: Any, focus: bool) -> None:
    train = context.settings.train.model_copy(update={"focus": focus})
    settings = context.settings.model_copy(update={"train": train})
    found = measure(context.engine_of(Halfway(0.5)), settings, composed())
    assert 0.5 < found.figures["all_success"] < 1
    assert found.figures["informative"] < settings.calibration.informative, "the figures are those of all families"
    assert found.accepted is focus
    assert found.hinted is None
    assert "% of groups are all-success, at most 20 %" in found.reason
    assert found.reason.startswith("accepted as training draws its families: ") is focus


@pytest.mark.parametrize(("share", "why"), [(1.0, "mastered"), (0.0, "only 0 % of groups are informative")])
def test_no_weight_makes_an_environment_informative_that_is_not(context: Any, share: float, why: str) -> None:
    train = context.settings.train.model_copy(update={"hints": 0.0})
    settings = context.settings.model_copy(update={"train": train})
    found = measure(context.engine_of(Halfway(share)), settings, composed())
    assert not found.accepted
    assert why in found.reason


def test_groups_count_by_their_weights() -> None:
    wins = [np.array([True, True]), np.array([True, False]), np.array([False, False, False, True])]
    rewards = [w.astype(float) for w in wins]
    plain, alike = calibration_figures(rewards, wins), calibration_figures(rewards, wins, [2.0, 2.0, 2.0])
    assert alike == pytest.approx(plain)
    assert plain["success_rate"] == 0.5
    one = calibration_figures(rewards, wins, [0.0, 1.0, 0.0])
    assert (one["success_rate"], one["mean_reward"], one["std_reward"]) == (0.5, 0.5, 0.5)
    assert (one["informative"], one["all_success"], one["all_zero"]) == (1.0, 0.0, 0.0)
    two = calibration_figures(rewards, wins, [3.0, 1.0, 0.0])
    assert (two["informative"], two["all_success"], two["success_rate"]) == (0.25, 0.75, 0.875)


def test_what_is_half_learnt_weighs_most_and_nothing_weighs_nothing() -> None:
    mastered, never, half, unknown = focus_weights(("a", "b", "c", "d"), {"a": 1.0, "b": 0.0, "c": 0.5})
    assert 0 < mastered == never < half == unknown
    assert focus_weights(("b",), {"b": 0.0}, hinted=True)[0] > never
