"""What is told of capabilities and families: who played a calibration, what learnt without GRPO, what was lost."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from stored_rounds import Shop

from db import (
    GENERALIST,
    AdapterRow,
    AdapterState,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    Round,
    SelectionRow,
    TrainingStepRow,
    open_store,
    row_id,
)
from tasks.episodes.lineage import lineages_of
from tasks.reporting.capabilities import capabilities_of
from tasks.reporting.collect import _families
from tasks.reporting.figures import FamilyFigures, RoundFigures
from tasks.reporting.nothing_trained import how_it_ended
from tasks.reporting.page import render
from tasks.reporting.summary import print_summary
from tasks.round.adapters import registered
from tasks.round.results import (
    CalibrateResult,
    RegisterResult,
    RolloutResult,
    SelectResult,
    SynthesizeResult,
    TrainResult,
)
from tasks.round.stored import StoredRound
from tasks.synthesis.calibration import FIGURES
from tasks.tracking import parts
from tasks.tracking.versions import description

OWN, COUNTS = "refund_payment", {"successes": 143, "demonstrations": 96}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        yield Shop(store)


def learnt(shop: Shop, high: float, config: dict[str, Any]) -> tuple[Round, RoundFigures]:
    """A round with a generalist of 13 steps, of parts that were calibrated with so high an interval, and with an
    adapter of two GRPO steps."""
    row = shop.round()
    for name, steps, ending in ((GENERALIST, 13, "learnt"), (OWN, 2, "solved")):
        identity = row_id(row.id, name)
        shop.store.put(
            [
                CapabilityRow(id=identity, round_id=row.id, name=name, analyst="checks"),
                EnvironmentRow(id=f"e-{name}", round_id=row.id, capability_id=identity, version=1, kind="generators",
                               state=EnvironmentState.ACCEPTED),
                SelectionRow(round_id=row.id, capability_id=identity, selected=True,
                             mean_cov=None if steps > 2 else 0.5),
                AdapterRow(id=f"a-{name}", round_id=row.id, capability_id=identity, base="tiny",
                           state=AdapterState.TRAINED, config=config if steps > 2 else {}),
            ]
        )  # fmt: skip
        shop.stage(row, SynthesizeResult(accepted=True, environment=f"e-{name}"), name)
        measured: dict[str, float] = dict.fromkeys(FIGURES, 0.0) | {"high": high if steps > 2 else 0.04}
        shop.stage(row, CalibrateResult(accepted=True, reason="accepted: no part", **measured), name)
        made = TrainResult(adapter=f"a-{name}", sha256="", steps=steps, run=f"r-{name}", ending=ending, chosen=steps)
        shop.stage(row, made, name)
    found = capabilities_of(StoredRound(shop.store, row), ())
    return row, RoundFigures(round=row.id, target="shop", data_hash="d", seed=7, capabilities=found)


def test_a_module_that_lost_what_was_to_measure_its_adapter_ends_its_capability_with_the_reason(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _ = learnt(shop, 0.5, COUNTS)
    why = "training-failed: the written module ended all 4 episodes that were to show what adapter does with an error"
    shop.stage(row, RegisterResult(skipped=why), OWN)
    shop.stage(row, SelectResult(selected=[OWN]))
    shop.stage(row, RolloutResult(trajectories=["a", "b"], lost=0, success=0.5))
    stored = StoredRound(shop.store, row)
    assert registered(stored) == []
    assert stored.unreadable() == ""
    (found,) = [c for c in capabilities_of(stored, ()) if c.name == OWN]
    assert (found.verdict, found.reasons, found.adapter, found.version) == ("training-failed", [why], None, None)
    figures = RoundFigures(round=row.id, target="shop", data_hash="d", seed=7, capabilities=[found])
    assert why in render(figures)
    runs: list[tuple[str, bool]] = []
    registry: Any = SimpleNamespace(end_run=lambda run, failed, ended: runs.append((run, failed)))
    monkeypatch.setattr(parts, "RunLog", lambda *_: SimpleNamespace(metrics=lambda *_: None))
    for name in (OWN, GENERALIST):
        parts._training(registry, stored, name)
    assert runs == [(f"r-{OWN}", True), (f"r-{GENERALIST}", False)]
    ended = how_it_ended(stored, SimpleNamespace(), False, 0.1)  # type: ignore[arg-type]
    assert f"refund_payment: {why}." in ended.reason


def cards(stored: StoredRound, figures: RoundFigures) -> dict[str, str]:
    ways = lineages_of(stored, figures, {})
    return {way.capability: " | ".join(line for card in way.cards for line in card.lines) for way in ways}


def test_a_calibration_is_told_of_what_training_goes_on_from(shop: Shop) -> None:
    row, figures = learnt(shop, 0.5, COUNTS)
    page = render(figures)
    assert "Base model there" not in page
    assert page.count("What training goes on from, there: mean reward 0.00, success 0.0 %") == 2
    told = cards(StoredRound(shop.store, row), figures)
    assert all("what training goes on from, there: success 0.0 %" in line for line in told.values())


def test_a_generalist_without_parts_has_no_figures_of_a_calibration(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, figures = learnt(shop, 0.0, COUNTS)
    by_name = {c.name: c.calibration for c in figures.capabilities}
    none, own = by_name[GENERALIST], by_name[OWN]
    assert none is not None
    assert own is not None
    assert (none.accepted, none.mean_reward, none.success, none.informative) == (True, None, None, None)
    assert own.success == 0.0, "it was played, and never succeeded"
    assert render(figures).count("What training goes on from, there") == 1
    told = cards(StoredRound(shop.store, row), figures)
    assert "there: success" not in told[GENERALIST]
    assert "there: success 0.0 %" in told[OWN]
    logged: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(parts, "RunLog", lambda _, run: SimpleNamespace(metrics=logged.setdefault(run, {}).update))
    registry: Any = SimpleNamespace(end_run=lambda *given, **more: None)
    for name in (GENERALIST, OWN):
        parts._training(registry, StoredRound(shop.store, row), name)
    assert logged[f"r-{GENERALIST}"] == {}, "not zeros"
    assert logged[f"r-{OWN}"]["calibrate/success_rate"] == 0.0


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        (COUNTS, "143 successes and 96 reference solutions"),
        ({"successes": 143, "demonstrations": 0}, "143 successes"),
        ({}, "successes and reference solutions"),
    ],
)
def test_what_learnt_without_grpo_is_told_so(shop: Shop, config: dict[str, Any], sources: str) -> None:
    row, figures = learnt(shop, 0.0, config)
    stored, page = StoredRound(shop.store, row), render(figures)
    assert f"Learnt in 13 steps from {sources}, without GRPO: unfinished." in page
    assert f"13 steps from {sources}, weights of step 13" in cards(stored, figures)[GENERALIST]
    assert "2 GRPO steps, weights of step 2" in cards(stored, figures)[OWN]
    told = {c.name: description(stored, c, figures) for c in figures.capabilities}
    assert f"**Trained** 13 steps from {sources} (learnt), weights of step 13" in told[GENERALIST]
    assert "GRPO" not in told[GENERALIST]
    assert "**Trained** 2 GRPO steps (solved)" in told[OWN]


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_generalist_practised_is_told_beside_what_it_has_learnt(shop: Shop, kept: bool) -> None:
    """Steps of which nothing is kept are not told as if the adapter had them."""
    row = shop.round()
    identity = row_id(row.id, GENERALIST)
    step = TrainingStepRow(adapter_id="own", step=2, reward=0.5, success=0.5, loss=0.0, clip_fraction=0.0, kl=0.0,
                           logprob_gap=0.0, seconds=1.0, metrics={})  # fmt: skip
    shop.store.put(
        [
            CapabilityRow(id=identity, round_id=row.id, name=GENERALIST, analyst="checks"),
            SelectionRow(round_id=row.id, capability_id=identity, selected=True),
            AdapterRow(id="before", round_id=row.id, base="tiny", state=AdapterState.TRAINED, config=COUNTS),
            AdapterRow(id="own", round_id=row.id, capability_id=identity, base="tiny", state=AdapterState.TRAINED),
            step,
        ]
    )
    made = {"adapter": "own", "sha256": "", "run": "r", "before": "before"}
    practised = TrainResult(**made, steps=8, ending="steps", chosen=2, start="digest")
    unkept = "the weights after step 2 are not finite"
    left = TrainResult(**made, steps=36, ending="learnt", chosen=36, unkept=unkept)
    shop.stage(row, practised if kept else left, GENERALIST)
    stored = StoredRound(shop.store, row)
    found = capabilities_of(stored, ())
    figures = RoundFigures(round=row.id, target="shop", data_hash="d", seed=7, capabilities=found)
    page, (way,) = render(figures), lineages_of(stored, figures, {})
    line = " | ".join(line for card in way.cards for line in card.lines)
    told, sources = description(stored, found[0], figures), "143 successes and 96 reference solutions"
    if kept:
        assert f"It learnt from {sources} before, without GRPO, and practised then." in page
        assert "The weights after step 2 were taken" in page
        assert f"8 GRPO steps, weights of step 2 | begun from what it has learnt from {sources}" in line
        assert f"8 GRPO steps (steps), weights of step 2, on from what it has learnt from {sources}" in told
        assert "nothing of that is kept" not in page + line + told
    else:
        sources += f" (it practised then, and nothing of that is kept: {unkept})"
        assert f"Learnt in 36 steps from {sources}, without GRPO" in page
        assert f"36 steps from {sources} (learnt)" in told
        assert "The weights after step" not in page
        assert f"36 steps from {sources}, weights of step 36" in line
        assert "begun from" not in line
        assert "GRPO" not in told


def test_a_family_moved_as_far_as_the_tasks_that_both_sides_finished() -> None:
    """What one side lost is no fall of the other: here it was the one task that nobody solves."""

    def side(*tasks: int) -> pd.DataFrame:
        return pd.DataFrame([{"task": f"t{i}", "family": "refund", "trial": 0, "success": i > 0} for i in tasks])

    found = _families({"base": side(1, 2, 3), "live": side(1, 2, 3), "routed": side(0, 1, 2, 3)}, True)
    refund = found["refund"]
    assert (refund.base, refund.live, refund.routed, refund.points, refund.gained) == (1.0, 1.0, 0.75, 0.0, 0.0)
    told = RoundFigures(round="r", target="shop", data_hash="d", seed=7, before=1, after=2, families=found)
    (row,) = (line for line in render(told).splitlines() if 'row">refund<' in line)
    assert "<td>+0.0</td>" in row
    print_summary(told, Console(file=(text := io.StringIO()), width=110))
    assert "+0.0 points" in text.getvalue()
    of_before = refund.model_dump() | {"live": None}
    del of_before["points"], of_before["gained"]
    assert (FamilyFigures(**of_before).points, FamilyFigures(**of_before).gained) == (-25.0, None)


def test_a_family_that_one_side_lost_is_not_known_there() -> None:
    def side(*families: str) -> pd.DataFrame:
        return pd.DataFrame([{"task": f"{f}-{i}", "family": f, "success": True} for f in families for i in range(2)])

    found = _families({"base": side("refund"), "routed": side("address"), "noop": side("neither")}, False)
    refund, address = found["refund"], found["address"]
    assert list(found) == ["address", "refund"]
    assert (refund.base, refund.routed, refund.routed_interval, refund.points, refund.n) == (1.0, None, None, None, 2)
    assert (address.base, address.base_interval, address.routed, address.points) == (None, None, 1.0, None)
    told = RoundFigures(round="r", target="shop", data_hash="d", seed=7, families=found)
    (row,) = (line for line in render(told).splitlines() if 'row">refund<' in line)
    cells = re.findall(r"<td>(.*?)</td>", row)
    assert cells == ["100.0 % (34–100)", "–", "–", "–", "2"]
    console = Console(file=(text := io.StringIO()), width=110)
    print_summary(told, console)
    (row,) = (line for line in text.getvalue().splitlines() if "address" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["address", "–", "100.0 %", "–", "2"]
