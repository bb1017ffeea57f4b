"""Which of the weights that were compared a training begins from, and what is said of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import GENERALIST, AdapterRow, EnvironmentRow
from environments.contract import TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from errors import EnvironmentFault
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id
from tasks.round.results import StartFigures, SynthesizeResult, TrainResult, starts_text
from tasks.synthesis.calibration import LEAST
from tasks.synthesis.starting import (
    Start,
    choose,
    families_to_keep,
    figures_of,
    focused,
    keeping,
    start_metrics,
)

OWN = {f"own-{i}" for i in range(8)}


def outcomes(own: int, others: int, reward: float = 0.0) -> pd.DataFrame:
    """One episode on each of 8 own and 8 retention scenarios, of which the first so many succeed."""
    tasks = [*sorted(OWN), *(f"other-{i}" for i in range(8))]
    success = [i < own for i in range(8)] + [i < others for i in range(8)]
    return pd.DataFrame({"task": tasks, "success": success, "reward": [1.0 if s else reward for s in success]})


def chosen(*frames: pd.DataFrame) -> int:
    starts = [None, *(Start(f"c{i}", f"a{i}", Path()) for i in range(1, len(frames)))]
    found = choose([figures_of(s, frame, frames[0], OWN) for s, frame in zip(starts, frames, strict=True)])
    assert sum(f.chosen for f in found) == 1
    return next(i for i, f in enumerate(found) if f.chosen)


def test_of_the_adapters_the_one_with_the_most_success_on_own_and_retention_together_wins() -> None:
    assert chosen(outcomes(2, 8), outcomes(5, 7), outcomes(5, 8)) == 2
    # Of equals the better rewarded, then the champion.
    assert chosen(outcomes(2, 8), outcomes(4, 6, 0.2), outcomes(3, 7, 0.3)) == 2
    assert chosen(outcomes(0, 4), outcomes(4, 4), outcomes(4, 4)) == 1


def test_the_base_is_begun_from_only_where_it_is_surely_better() -> None:
    assert chosen(outcomes(4, 8), outcomes(6, 6)) == 1
    assert chosen(outcomes(6, 6), outcomes(5, 6)) == chosen(outcomes(6, 6), outcomes(6, 5)) == 1
    # Of twelve scenarios, three quarters by the base and a third by the adapter, in which each solves some alone.
    base, other = outcomes(8, 8).iloc[:12].copy(), outcomes(8, 8).iloc[:12].copy()
    base["success"], other["success"] = [i < 9 for i in range(12)], [i == 11 or i < 3 for i in range(12)]
    assert (base["success"].sum(), other["success"].sum(), chosen(base, other)) == (9, 4, 0)
    assert chosen(outcomes(8, 8), outcomes(2, 7)) == 0
    assert chosen(outcomes(8, 8), outcomes(2, 7), outcomes(7, 7)) == 2


def test_with_advice_what_was_seen_to_follow_it_is_begun_from() -> None:
    """Others, which may know better what is retained, count where they succeed on the capability's own."""
    base = StartFigures(success=0.2, own=0.0, reward=0.1)
    generalist = StartFigures(capability="generalist", adapter="g", success=0.2, own=0.0, reward=0.1)
    other = StartFigures(capability="other", adapter="o", success=0.4, own=0.0, reward=0.2)
    better = other.model_copy(update={"adapter": "b", "success": 0.3, "own": 0.1})

    def begun(advised: str | None, *figures: StartFigures) -> str:
        return next(f.adapter for f in choose([base, *figures], advised) if f.chosen)

    assert begun(None, generalist, other) == "o"
    assert begun("g", generalist, other) == "g"
    assert begun("g", generalist, other, better) == "b"
    assert begun("", generalist, other) == "", "the base followed it"
    assert begun("g", generalist.model_copy(update={"forgets": True}), other) == ""


def test_what_forgets_is_not_begun_from_whatever_it_wins() -> None:
    assert chosen(outcomes(0, 8), outcomes(8, 3), outcomes(1, 8)) == 2
    assert chosen(outcomes(0, 8), outcomes(8, 3)) == 0


def test_what_was_lost_counts_for_nothing_and_all_lost_is_an_error() -> None:
    base = outcomes(2, 8)
    found = figures_of(Start("c", "a", Path()), base.iloc[:4], base, OWN)
    assert (found.success, found.own, found.retention) == (0.5, 0.5, None)
    with pytest.raises(EnvironmentFault, match="what c is worth as a start"):
        figures_of(Start("c", "a", Path()), base.iloc[:0], base, OWN)


def test_what_is_said_of_it() -> None:
    figures = [
        StartFigures(success=0.25, own=0.0, retention=0.5, reward=0.3),
        StartFigures(capability="refund", adapter="a", success=0.75, own=1.0, reward=0.8, chosen=True),
        StartFigures(capability="cancel", adapter="b", success=0.8, own=1.0, reward=0.8, forgets=True),
    ]
    assert starts_text(figures) == "begins from refund 75 %; compared with base 25 %, cancel 80 % (forgets)"
    metrics = start_metrics(figures)
    assert (metrics["start/base_retention"], metrics["start/refund_own"]) == (0.5, 1.0)
    assert "start/refund_retention" not in metrics
    result = TrainResult(adapter="x", sha256="", steps=3, run="", ending="steps", chosen=1, starts=figures)
    assert result.began_from("refund") == "zero"
    begun = result.model_copy(update={"start": "digest"})
    assert (begun.began_from("refund"), begun.began_from("other")) == ("its champion", "the adapter for refund")
    assert begun.model_copy(update={"starts": []}).began_from("other") == "its champion"


def round_of(share: float, config: dict[str, Any], environment: str | None = "e") -> Any:
    """A round in which an adapter was trained for cancelling, and another in `config`'s families before that."""
    rows: Any = {
        AdapterRow: SimpleNamespace(environment_id=environment, config=config),
        EnvironmentRow: SimpleNamespace(spec={"families": ["cancel", "cancel_two"]}),
    }
    of = {"a": rows[AdapterRow], adapter_id("r", GENERALIST): rows[AdapterRow], "before": SimpleNamespace(
        environment_id=None, config={})}  # fmt: skip
    store = SimpleNamespace(row=lambda kind, id: of[id] if kind is AdapterRow else rows[kind])
    settings = SimpleNamespace(calibration=SimpleNamespace(retention_share=share))
    return SimpleNamespace(store=store, settings=settings, round=SimpleNamespace(id="r"))


def made(retention: tuple[str, ...], share: float) -> ComposedEnvironment:
    needs = dict.fromkeys(("cancel", "cancel_two", "refund", "price", "swap"), ())
    target: Any = SimpleNamespace(
        families=lambda: needs, generate=lambda family, seed: TargetTask(f"{family}-{seed}", "generated", family, seed)
    )
    return ComposedEnvironment(target, CompositionSpec("t", "h", "refunds", ("refund",), retention, share))


START = Start("cancels", "a", Path())


def test_what_the_start_learnt_is_practised_on() -> None:
    context, plain = round_of(1 / 3, {"keeps": ["swap", "refund", "unknown"]}), made(("price", "cancel"), 0.25)
    families = families_to_keep(context, plain, START)
    assert families == ("cancel_two", "swap")  # neither its own, nor what it has, nor what cannot be drawn
    kept: Any = keeping(context, plain, families)
    assert kept.spec == replace(plain.spec, retention_families=("cancel", "cancel_two", "price", "swap"))
    assert kept.spec.id != plain.spec.id
    assert {kept.scenario(seed).family for seed in range(80)} == {"refund", "cancel", "cancel_two", "price", "swap"}
    assert all(kept.own_scenario(seed).family == "refund" for seed in range(20))
    # An environment that had nothing to keep keeps the share of the settings.
    bare: Any = keeping(context, made((), 0.0), families)
    assert bare.spec.retention_share == 1 / 3


def test_what_the_generalist_practised_from_has_to_keep_the_same_as_the_generalist() -> None:
    context, plain = round_of(1 / 3, {}), made(("price",), 0.25)
    before, after = Start(BEFORE_PRACTICE, "before", Path()), Start(GENERALIST, adapter_id("r", GENERALIST), Path())
    for start in (before, after):
        assert families_to_keep(context, plain, start) == ("cancel", "cancel_two")


def test_nothing_is_added_where_there_is_nothing_to_keep() -> None:
    plain = made(("price",), 0.25)
    assert families_to_keep(round_of(1 / 3, {}), plain, None) == ()
    assert families_to_keep(round_of(0.0, {}), plain, START) == ()  # retention is switched off
    assert families_to_keep(round_of(1 / 3, {}, None), plain, START) == ()  # a blend has no environment
    assert keeping(round_of(1 / 3, {}), plain, ()) is plain


def calibrated_at(families: dict[str, float], hinted: float | None = None, focus: bool = True) -> Any:
    """A round in which the capability's environment was calibrated with that success by family."""
    detail = {"families": families} | ({} if hinted is None else {"hinted": hinted})
    return SimpleNamespace(
        settings=SimpleNamespace(train=SimpleNamespace(focus=focus)),
        store=SimpleNamespace(row=lambda kind, id: SimpleNamespace(detail=detail)),
        result=lambda kind, capability: SynthesizeResult(accepted=True, environment="e"),
    )


def test_families_are_drawn_by_what_is_left_to_learn_in_them() -> None:
    """Half solved most often, never and always solved hardly ever; one that was not calibrated as if half solved. With
    advice a family that never succeeds has something to learn, too."""
    plain = made(("price",), 0.25)
    plain = ComposedEnvironment(plain.target, replace(plain.spec, families=("cancel", "cancel_two", "refund", "swap")))
    rates = {"cancel": 1.0, "cancel_two": 0.5, "refund": 0.0}
    weighed: Any = focused(calibrated_at(rates), "refunds", plain)
    assert weighed.spec == replace(plain.spec, weights=(LEAST, 0.25 + LEAST, LEAST, 0.25 + LEAST))
    assert weighed.spec.id != plain.spec.id
    drawn = Counter(weighed.scenario(seed).family for seed in range(400))
    assert set(drawn) == {*plain.spec.families, "price"}
    assert drawn["cancel_two"] + drawn["swap"] > 4 * (drawn["cancel"] + drawn["refund"])
    own = Counter(weighed.own_scenario(seed).family for seed in range(400))
    assert min(own.values()) > 60, "an adapter is measured on all of its families alike"
    advised: Any = focused(calibrated_at(rates, hinted=0.6), "refunds", plain)
    assert advised.spec.weights == (LEAST, 0.25 + LEAST, 0.25, 0.25 + LEAST)
    assert focused(calibrated_at(rates, focus=False), "refunds", plain) is plain
