"""What a wrong route to an adapter would cost: from the diagnosis, in the verdict and on the version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import AdapterRow, Store, VerdictRow
from models.adapters.registry import Registry
from tasks.measuring.statistics import PairedDifference
from tasks.tracking import wrong_routes
from tasks.tracking.wrong_routes import WrongRoute, answers_unlike, tell_wrong_routes, wrong_route
from tests.tasks.episodes.practised_rounds import ADAPTER, CAPABILITY, Practised


def pairs(family: str, base: list[float | None], other: list[float | None]) -> pd.DataFrame:
    tasks = [f"{family}-{i}" for i in range(len(base))]
    return pd.DataFrame({"task": tasks, "family": family, "trial": 0, "base": base, "other": other})


def test_all_families_that_are_not_its_own_count_together_and_each() -> None:
    own = pairs("refund", [0.0, 0.0], [1.0, 1.0])
    others = pairs("move", [1.0] * 4, [0.0] * 4), pairs("swap", [0.0] * 4, [1.0] * 4)
    cost = wrong_route(pd.concat([own, *others]), {"refund"})
    assert cost is not None
    assert (cost.together.points, cost.alone) == (0.0, 0.6)
    assert {name: d.points for name, d in cost.families.items()} == {"move": -100.0, "swap": 100.0}
    assert cost.sentence == (
        "What a wrong route costs: alone on all other families of the diagnosis, +0.0 points over 8 tasks; most in "
        "move, -100.0."
    )
    assert "most in" not in wrong_route(pairs("swap", [0.0], [1.0]), {"refund"}).sentence  # type: ignore[union-attr]


def test_nothing_is_said_where_all_families_are_its_own_or_none_was_finished() -> None:
    pair = pairs("move", [1.0], [0.0])
    assert wrong_route(pair, ()) is None
    assert wrong_route(pair, {"move"}) is None
    assert wrong_route(pairs("move", [1.0], [None]), {"refund"}) is None


def test_what_was_made_for_no_family_in_particular_is_judged_on_all() -> None:
    cost = wrong_route(
        pd.concat([pairs("refund", [0.0, 0.0], [1.0, 1.0]), pairs("move", [1.0, 0.0], [1.0, 0.0])]), None
    )
    assert cost is not None
    assert (cost.together.points, cost.together.tasks, set(cost.families)) == (50.0, 4, {"refund", "move"})
    assert (
        cost.sentence == "What a wrong route costs: alone on all families of the diagnosis, +50.0 points over 4 tasks."
    )


def cost(alone: float, points: float, p: float) -> WrongRoute:
    return WrongRoute(PairedDifference(points, points - 9, points + 9, p, 90, 40, 0, 0.0001), {}, "", alone)


@pytest.mark.parametrize(
    ("costs", "answers"),
    [
        ({}, "move"),
        ({"refund": cost(0.6, 20.0, 0.01)}, "refund"),
        ({"refund": cost(0.6, 20.0, 0.01), "swap": cost(0.7, 15.0, 0.001)}, "swap"),
        ({"refund": cost(0.6, 20.0, 0.01), "swap": cost(0.7, 15.0, 0.04)}, "refund"),
        ({"refund": cost(0.6, 20.0, 0.06)}, "move"),
        ({"refund": cost(0.6, -20.0, 0.0001)}, "move"),
    ],
    ids=["none tried", "better", "the best of them", "not proven among two", "not proven", "worse"],
)
def test_what_is_unlike_all_is_for_who_does_best_on_what_it_was_not_made_for(
    costs: dict[str, WrongRoute], answers: str
) -> None:
    assert answers_unlike(costs, "move") == answers


def test_it_is_told_once_in_the_verdict_and_on_the_version(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Practised(store, run=registry.start_run("training"))
    adapter = made.judged(registry, tmp_path)
    row = store.row(AdapterRow, id=ADAPTER)
    assert row is not None
    store.put([replace(row, registered_version=adapter.version)], replace=True)
    store.put([VerdictRow(round_id=made.round.id, subject=CAPABILITY, verdict="better", reasons=["Its own tasks."])])
    monkeypatch.setattr(wrong_routes, "families_about", lambda *_: ("refund",))
    ids = [made.episode("tried", task, 0, 0, 0.0) for task in ("refund-0", "status-0")]
    context: Any = SimpleNamespace(store=store, stored=made.stored, round=made.round, registry=registry)
    context.result = made.stored.result
    for _ in range(2):
        assert tell_wrong_routes(context, {CAPABILITY: ids})[CAPABILITY].together.points < 0
    verdict = store.row(VerdictRow, round_id=made.round.id, subject=CAPABILITY)
    assert verdict is not None
    assert len(verdict.reasons) == 2
    assert verdict.reasons[1].startswith("What a wrong route costs: alone on all other families of the diagnosis, -")
    tags = registry.client.get_model_version(adapter.name, adapter.version).tags
    assert float(tags["wrong-route"]) < 0
