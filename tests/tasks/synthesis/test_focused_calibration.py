"""With `train.focus` an environment is calibrated as training draws it: families that are mastered are drawn rarely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import GENERALIST
from environments.contract import Action, Environment, Message
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.shop.target import target
from models.policy import PolicyIdentity
from settings import load_settings
from tasks import calibrate as stage_file
from tasks.round.context import Context
from tasks.round.stage import forget, open_context
from tasks.round.stored import StoredRound
from tasks.synthesis.calibration import FIGURES, Calibration, calibration_tasks, focus_weights, measure


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


class OneTask(Halfway):
    """Does right where it is asked this, and nowhere else."""

    def __init__(self, asked: str) -> None:
        super().__init__(0.0)
        self.asked = asked

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        right = environment.oracle() if messages[0].content == self.asked else None
        return right or Action(content="Hello.")


@pytest.fixture
def context(settings_folder: Path) -> Any:
    half = {"informative": 0.5}
    settings = load_settings(profile="laptop", home=settings_folder / "home", calibration=half)
    opened = open_context(settings)
    yield opened
    forget(opened.round.id)


def composed() -> ComposedEnvironment:
    families = ("cancel_pending", "order_status", "use_coupon")
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "serve", families))


KNOWN = {"cancel_pending": 1.0, "order_status": 1.0, "use_coupon": 0.5}


def test_scenarios_are_drawn_by_what_there_is_to_learn_in_their_families() -> None:
    environment = composed()
    alike = calibration_tasks(environment, 16, 2)
    assert alike == [environment.own_scenario(-100_001 - i) for i in range(16)]
    drawn = calibration_tasks(environment, 16, 2, KNOWN)
    assert Counter(t.family for t in drawn) == {"cancel_pending": 2, "order_status": 1, "use_coupon": 13}
    assert len({t.id for t in drawn}) == 16
    assert calibration_tasks(environment, 16, 3, KNOWN) != drawn, "each round has scenarios of its own"
    unknown = Counter(t.family for t in calibration_tasks(environment, 15, 2, {}))
    assert set(unknown.values()) == {5}, "of which nothing is known, each has as many"


@pytest.mark.parametrize("known", [None, {}])
def test_a_scenario_that_is_drawn_several_times_counts_once(context: Context, known: dict[str, float] | None) -> None:
    """A target may draw from a pool of its own. Each time it would bring the episodes of all times along."""
    shop = target()
    pool: Any = SimpleNamespace(
        name="shop", environment=shop.environment, families=shop.families, tasks=shop.tasks,
        generate=lambda family, seed: shop.generate(family, seed % 5),
    )  # fmt: skip
    environment = ComposedEnvironment(pool, CompositionSpec("shop", shop.data_hash, "serve", ("use_coupon",)))
    drawn = Counter(environment.own_scenario(-1 - i).id for i in range(8))
    often, times = drawn.most_common(1)[0]
    assert 1 < len(drawn) < 8
    assert times > 1
    asked = shop.environment().reset(pool.generate("use_coupon", int(often.rpartition("-")[2]))).messages[0].content
    found = measure(context.engine_of(OneTask(asked)), context.settings, environment, known=known)
    assert found.seeds == len(drawn)
    assert found.figures["success_rate"] == pytest.approx(1 / len(drawn))


@pytest.mark.parametrize("known", [KNOWN, None])
def test_what_is_lacking_in_one_family_is_trained_though_the_others_are_mastered(
    context: Context, known: dict[str, float] | None
) -> None:
    found = measure(context.engine_of(Halfway(0.5)), context.settings, composed(), known=known)
    assert found.accepted is (known is not None)
    assert found.row("e").detail.get("known") == known
    assert ("only 25 % of groups are informative" in found.reason) is (known is None)


@pytest.mark.parametrize(("share", "why"), [(1.0, "mastered"), (0.0, "only 0 % of groups are informative")])
def test_no_draw_makes_an_environment_informative_that_is_not(context: Context, share: float, why: str) -> None:
    train = context.settings.train.model_copy(update={"hints": 0.0})
    settings = context.settings.model_copy(update={"train": train})
    found = measure(context.engine_of(Halfway(share)), settings, composed(), known=KNOWN)
    assert not found.accepted
    assert why in found.reason


def test_what_is_half_learnt_weighs_most_and_nothing_weighs_nothing() -> None:
    mastered, never, half, unknown = focus_weights(("a", "b", "c", "d"), {"a": 1.0, "b": 0.0, "c": 0.5})
    assert 0 < mastered == never < half == unknown
    assert focus_weights(("b",), {"b": 0.0}, hinted=True)[0] > never


@pytest.mark.parametrize(
    ("accepted", "played", "kept"),
    [
        ({"mine"}, ["mine"], "mine"),
        ({"generalist-id"}, ["mine", "generalist-id"], "generalist-id"),
        (set(), ["mine", "generalist-id"], "mine"),
    ],
)
def test_where_the_champion_may_not_train_the_generalist_is_calibrated(
    context: Context, monkeypatch: pytest.MonkeyPatch, accepted: set[str], played: list[str], kept: str
) -> None:
    """What has learnt one thing may not even follow advice on another."""
    members = {"serve": {"adapter_id": "mine"}, GENERALIST: {"adapter_id": "generalist-id"}}
    context.__dict__["parent"] = SimpleNamespace(members=members)
    monkeypatch.setattr(stage_file, "load_member", lambda context, capability, identity: identity)
    monkeypatch.setattr(StoredRound, "diagnosis", lambda stored: SimpleNamespace(trajectories=[]))
    tried: list[str] = []

    def measured(engine: Any, settings: Any, environment: Any, name: str, number: int, known: Any) -> Calibration:
        tried.append(name)
        assert known == {}, "with train.focus the diagnosis is asked"
        return Calibration(dict.fromkeys(FIGURES, 0.5), name in accepted, "as told", 8, 8, name, {})

    monkeypatch.setattr(stage_file, "measure", measured)
    row = stage_file._measured(context, composed(), "e", "serve")
    assert tried == played
    assert row.detail["start"] == kept
    assert row.accepted is (kept in accepted)
