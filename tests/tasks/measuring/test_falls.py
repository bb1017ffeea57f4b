"""How a difference reads as a fall, at the edges of the margin, of one task, and of what was never seen."""

from __future__ import annotations

import pytest

from tasks.measuring.falls import Fall, FallKind, judge_fall, judge_lost, judge_settled
from tasks.measuring.gate_plan import GateRules
from tasks.measuring.statistics import PairedDifference

RULES = GateRules()  # a margin of two points, intervals of 90 %


def change(points: float, tasks: int = 10, low: float = -30.0, high: float = 5.0) -> PairedDifference:
    return PairedDifference(points, low, high, 0.5, tasks, tasks, 0, 0.001)


@pytest.mark.parametrize(
    ("points", "tasks", "high", "kind"),
    [
        (3.0, 10, 5.0, FallKind.HELD),
        (-2.0, 1000, -1.0, FallKind.HELD),  # the margin itself, however sure
        (-2.0 - 1e-10, 1000, -1.0, FallKind.HELD),  # what rounding makes of it
        (-2.01, 1000, -1.0, FallKind.REGRESSION),
        (-2.01, 1000, 0.0, FallKind.UNCLEAR),  # an interval that ends at zero excludes nothing
        (-10.0, 10, 5.0, FallKind.WITHIN),
        (-10.0 - 1e-10, 10, 5.0, FallKind.WITHIN),
        (-10.01, 10, 5.0, FallKind.UNCLEAR),
        (-9.99, 10, -0.1, FallKind.REGRESSION),  # less than one task, and known to fall
    ],
)
def test_a_fall_is_read_by_margin_interval_and_one_task(points: float, tasks: int, high: float, kind: FallKind) -> None:
    fall = judge_fall("refund", change(points, tasks, high=high), RULES)
    assert fall.kind is kind
    assert (fall.reason == "") is (kind is FallKind.HELD)
    assert fall.blocks is (kind in (FallKind.REGRESSION, FallKind.UNCLEAR))


def test_a_fall_is_said_with_the_interval_that_decided() -> None:
    fall = judge_fall("refund", change(-12.34, low=-30.0, high=-0.25), GateRules(fall_confidence=0.8))
    assert fall.reason == ("refund: fell by 12.3 points over 10 tasks (80 % interval -30.0 to -0.2, below zero).")
    assert judge_fall("refund", None, RULES).kind is FallKind.UNSEEN


@pytest.mark.parametrize(
    ("live", "candidate", "tasks", "kind"),
    [
        (0.0, 1.0, 20, FallKind.HELD),
        (0.5, 1.5 + 1e-10, 20, FallKind.HELD),
        (0.0, 1.01, 20, FallKind.LOST),
        (0.0, 2.0, 100, FallKind.HELD),
        (0.0, 2.01, 100, FallKind.LOST),
        (3.0, 0.0, 20, FallKind.HELD),  # the live release lost them
    ],
)
def test_what_one_side_lost_is_read_by_one_task_and_the_margin(
    live: float, candidate: float, tasks: int, kind: FallKind
) -> None:
    lost = judge_lost("refund", (live, candidate), tasks, RULES)
    assert lost.kind is kind
    assert lost.blocks is (kind is FallKind.LOST)


def test_what_settles_a_fall_is_told_beside_it_where_both_were_seen() -> None:
    told = "refund: -20.0 points over 10 tasks, which may be noise, so both sides played more: +1.0 over 40."
    assert judge_settled("refund", change(-20.0), change(1.0, 40), RULES) == Fall(FallKind.HELD, told)
    fallen = judge_settled("refund", change(-20.0), change(-20.0, 40, high=-5.0), RULES)
    assert fallen.kind is FallKind.REGRESSION
    assert fallen.reason.endswith(
        "-20.0 over 40. Fell by 20.0 points over 40 tasks (90 % interval -30.0 to -5.0, below zero)."
    )
    for first, further in ((None, change(-20.0, 40, high=-5.0)), (change(-20.0), None)):
        assert judge_settled("refund", first, further, RULES) == judge_fall("refund", further, RULES)
