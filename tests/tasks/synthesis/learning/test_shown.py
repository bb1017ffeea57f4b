"""What a generalist is shown with advice: which families, how many scenarios, by whom, and what the budget pays for."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import GENERALIST, open_store
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import is_advised
from environments.targets.shop.target import target
from settings import load_settings
from tasks.methods.seed.budget import Account
from tasks.synthesis.calibration import HINT
from tasks.synthesis.environments import composed_of
from tasks.synthesis.learning import shown
from tasks.synthesis.learning.shown import FEW, SAMPLES, SCENARIOS, TURNS, show_lacking, show_missing

FAMILIES = ("item_price", "order_status", "refund_part", "use_coupon")


@pytest.fixture
def environment() -> ComposedEnvironment:
    at: Any = SimpleNamespace(id="round", target="shop", data_hash=target().data_hash, seed=0)
    made = composed_of(target(), at, GENERALIST, FAMILIES, {}, 0.0, 1)
    assert set(made.spec.families) == set(FAMILIES)
    return made


class Shown:
    """A round whose episodes are kept and not played."""

    def __init__(self, train: dict[str, Any], paid: int | None = None, stored: int = 0) -> None:
        self.settings = load_settings(profile="night", train=train)
        self.round = SimpleNamespace(id="round", target="shop", data_hash=target().data_hash, seed=0, number=1)
        self.budget: Any = None
        if paid is not None:
            self.budget = SimpleNamespace(for_training=lambda adapter: paid, unplayed=lambda purpose: 0)
        self.store: Any = SimpleNamespace(trajectory_frame=lambda *given, **more: {"id": range(stored)})
        self.engine = SimpleNamespace(play=self._play)
        self.played: list[tuple[Any, list[Any]]] = []

    def _play(self, ground: Any, episodes: Any, what: str) -> list[str]:
        self.played.append((ground, list(episodes)))
        return []

    def tasks(self) -> list[Any]:
        return [episode.task for _, episodes in self.played for episode in episodes]


def of(**given: Any) -> Any:
    return Shown({"generalist": 3, "demonstrations": 0, **given.pop("train", {})}, **given)


def test_what_hardly_succeeded_is_shown_as_far_as_the_budget_pays_for_it(
    settings_folder: Any, environment: ComposedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family of its environment with too few successes, those with the fewest first, each scenario with advice,
    by the bare base, for the same episodes whenever it is asked."""
    had = dict.fromkeys(FAMILIES, FEW) | {"item_price": 0, "refund_part": 3}
    rows = [SimpleNamespace(family=f) for f, n in had.items() for _ in range(n)]
    monkeypatch.setattr(shown, "successes", lambda context, without: rows)

    def missing(**given: Any) -> Any:
        context = of(**given)
        show_missing(context, environment)
        return context

    context = missing()
    tasks = context.tasks()
    assert list(dict.fromkeys(t.family for t in tasks)) == ["item_price", "refund_part"]
    assert all(is_advised(t) for t in tasks)
    assert all(count == SAMPLES for count in Counter(t.id for t in tasks).values())
    assert len(tasks) == 2 * SCENARIOS * SAMPLES
    ground, episodes = context.played[-1]
    assert {e.adapter for e in episodes} == {None}
    assert (ground.purpose, ground.group) == ("calibration", HINT)
    assert [t.id for t in missing().tasks()] == [t.id for t in tasks]
    assert {t.family for t in missing(paid=SCENARIOS * SAMPLES + 5).tasks()} == {"item_price"}
    # What an earlier attempt has played is paid for.
    assert {t.family for t in missing(paid=5, stored=SCENARIOS * SAMPLES).tasks()} == {"item_price"}
    assert missing(train={"hints": 0.0}).tasks() == []


def test_each_turn_shows_as_many_other_scenarios_of_every_family(
    settings_folder: Any, environment: ComposedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "load_member", lambda context, capability, adapter: f"loaded {adapter}")
    monkeypatch.setattr(shown, "held", lambda context, name: nullcontext())

    def turn(number: int, latest: str = "", **given: Any) -> Any:
        context = of(train={"shown": 5}, **given)
        show_lacking(context, environment, number, SimpleNamespace(id=latest) if latest else None)  # type: ignore[arg-type]
        return context

    first, second = turn(1), turn(2, "of the first")
    for context, adapter, name in ((first, None, None), (second, "of the first", "loaded of the first")):
        (ground, episodes), *others = context.played
        assert not others
        assert (ground.adapter_id, ground.group, ground.purpose) == (adapter, HINT, "calibration")
        assert {e.adapter for e in episodes} == {name}
        assert all(is_advised(e.task) for e in episodes)
        assert Counter(e.task.family for e in episodes) == dict.fromkeys(FAMILIES, 5)
    contents = [{target().content(task) for task in context.tasks()} for context in (first, second)]
    assert len(contents[0] & contents[1]) <= 2, "a family of few contents may draw one again"
    assert [t.id for t in turn(1).tasks()] == [t.id for t in first.tasks()]
    # Both turns are paid for, or a family is in neither.
    one = TURNS * 5
    assert {t.family for t in turn(1, paid=one + 3).tasks()} == {environment.spec.families[0]}
    assert {t.family for t in turn(2, "x", paid=3, stored=one).tasks()} == {environment.spec.families[0]}


def test_what_was_paid_for_when_a_process_died_is_shown_by_the_next(
    settings_folder: Path, tmp_path: Path, environment: ComposedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes are charged before they are played. Taken off what is left, they left fewer families to be shown."""
    monkeypatch.setattr(shown, "successes", lambda context, without: [])
    context = of()
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as store:
        context.store, context.budget = store, Account.open(store, "trace", 2 * SCENARIOS * SAMPLES + 9)

        def dies(ground: Any, episodes: Any, what: str) -> None:
            context._play(ground, episodes, what)
            context.budget.admit([f"{e.task.id}/{e.trial}" for e in episodes], ground.purpose)
            raise KeyboardInterrupt

        monkeypatch.setattr(context.engine, "play", dies)
        with pytest.raises(KeyboardInterrupt):
            show_missing(context, environment)
        before = [task.id for task in context.tasks()]
        context.played.clear()
        monkeypatch.setattr(context.engine, "play", context._play)
        show_missing(context, environment)
    assert len(before) == 2 * SCENARIOS * SAMPLES
    assert [task.id for task in context.tasks()] == before
