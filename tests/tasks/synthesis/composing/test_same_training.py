"""Of two selected capabilities that lack the same families behind the same generalist one is trained: the second
training would be the first once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from db import GENERALIST, CapabilityRow, SelectionRow, row_id
from environments.targets.shop import target
from settings import load_settings
from tasks import synthesize as module
from tasks.reporting.capabilities import capabilities_of
from tasks.round.context import Context
from tasks.round.results import RolloutResult, SelectResult
from tasks.round.stage import forget, open_context, stage
from tasks.synthesize import synthesize
from tests.tasks.methods.seeds_made import ACCEPTED

SELECTED = ["refund_payment", "look_up_order", "report_fact"]
# What is live, or the generalist, masters everything but these: both of the first two need the one, neither the other.
LACKING = {"refund_all": 0.2, "item_options": 0.3}
FIRST = (GENERALIST, "made first")


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    @stage("select")
    def select(context: Context) -> SelectResult:
        return SelectResult(selected=[*SELECTED, GENERALIST])

    @stage("rollout")
    def rollout(context: Context) -> RolloutResult:
        return RolloutResult(trajectories=[], lost=0, success=0.9)

    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    at = opened.round.id
    opened.store.put([CapabilityRow(id=row_id(at, c), round_id=at, name=c, analyst="checks") for c in SELECTED])
    opened.store.put([SelectionRow(round_id=at, capability_id=row_id(at, c), selected=True) for c in SELECTED])
    rollout.do(opened)
    select.do(opened)
    rates = dict.fromkeys(target().families(), 1.0) | LACKING
    monkeypatch.setattr(module, "success_by_family", lambda store, ids: rates)
    monkeypatch.setattr("tasks.synthesis.environments.validate_environment", lambda *given, **more: ACCEPTED)
    yield opened
    forget(opened.round.id)


@pytest.mark.parametrize(
    ("beginnings", "accepted"),
    [
        (dict.fromkeys(SELECTED, FIRST), [True, False, True]),
        (dict.fromkeys(SELECTED, FIRST) | {"look_up_order": ("look_up_order", "champion")}, [True, True, True]),
        (dict.fromkeys(SELECTED, FIRST) | {"refund_payment": ("refund_payment", "champion")}, [True, True, True]),
        (dict.fromkeys(SELECTED, None), [True, True, True]),
    ],
)
def test_the_same_families_from_the_same_generalist_are_trained_once(
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    beginnings: Mapping[str, tuple[str, str] | None],
    accepted: list[bool],
) -> None:
    monkeypatch.setattr(module, "beginning_of", lambda context, capability: beginnings[capability])
    made = {capability: synthesize.do(context, capability) for capability in SELECTED}
    assert [result.goes_on for result in made.values()] == accepted
    for capability, result in made.items():
        told = "" if result.goes_on else "refund_payment"
        assert result.same_as == told, capability
        assert result.reasons == (
            ["its families (refund_all) are those of 'refund_payment', whose training goes on from the same generalist"]
            if told
            else []
        )
    reported = {c.name: (c.verdict, c.reasons) for c in capabilities_of(context.stored, ())}
    assert [c for c in SELECTED if reported[c] == ("postponed", made[c].reasons)] == [
        c for c in SELECTED if not made[c].goes_on
    ]
