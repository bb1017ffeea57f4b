"""What the gate's rules decide at their edges: whose tasks, whose losses, and what is too small to be seen."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tasks.measuring.decisions import GateVerdict
from tasks.measuring.falls import FallKind
from tasks.measuring.gate_plan import GateRules, Look
from tasks.measuring.gate_rules import even_shares, judge_capabilities, judge_release
from tests.tasks.measuring.test_gate_rules import GAIN, OWN, family, fell

RULES, LOOK = GateRules(), Look(0.05)


@pytest.mark.parametrize(
    ("own", "drawn", "used"),
    [
        ({"a"}, {"a"}, True),
        ({"a"}, set(), True),  # a part of the split, whatever was drawn
        ({"a", "b", "c"}, {"a", "b", "c"}, True),
        ({"a", "b", "c"}, {"a"}, False),
        ({"a", "b", "c", "elsewhere"}, {"a"}, False),
    ],
)
def test_further_tasks_count_where_they_shift_no_weight(own: set[str], drawn: set[str], used: bool) -> None:
    assert even_shares(own, {"a", "b", "c"}, drawn) is used


def test_what_was_lost_in_a_settled_family_is_that_of_the_episodes_that_settled_it() -> None:
    since = fell(20, 0).assign(task=lambda f: "more-" + f["task"])
    lost = since.assign(other=since["other"].where(since.index > 9))  # five of its twenty tasks

    def kinds(*more: pd.DataFrame, settled: pd.DataFrame) -> dict[str, FallKind]:
        decision = judge_release(pd.concat([GAIN, fell(10, 2), *more]), RULES, LOOK, 2, OWN, settled=settled)
        return {name: fall.kind for name, fall in decision.falls.items() if name != "address"}

    assert kinds(settled=since) == {"refund": FallKind.HELD}
    assert kinds(settled=lost) == {"refund": FallKind.LOST}
    gone = family("price", [1.0] * 20, [np.nan] * 5 + [1.0] * 15)
    assert kinds(gone, settled=since) == {"refund": FallKind.HELD, "price": FallKind.LOST}


def test_one_trial_has_no_steadiness() -> None:
    once = judge_release(pd.concat([GAIN, fell(10, 0)]), RULES, LOOK, 1, OWN)
    assert set(once.wholes) == {"overall", "all other families together"}
    twice = judge_release(pd.concat([GAIN, fell(10, 0)]), RULES, LOOK, 2, OWN)
    assert set(twice.wholes) - set(once.wholes) == {"pass^2"}


def test_a_gain_of_less_than_a_point_is_a_gain() -> None:
    hardly = family("address", [0.0] * 200, [1.0] + [0.0] * 199)
    alone = judge_capabilities({"set_address": hardly}, OWN, RULES, LOOK)["set_address"]
    assert alone.verdict is not GateVerdict.BETTER
    assert "did not gain" not in " ".join(alone.reasons)
    few_of_many = family("address", [0.0] * 900, [1.0] * 7 + [0.0] * 893)
    assert judge_release(few_of_many, RULES, LOOK, 2, OWN).promoted


def test_what_is_shown_has_one_level_and_what_is_judged_its_own() -> None:
    """A person approves by these figures; a fall is judged at 90 %, which its reason says."""
    decision = judge_release(pd.concat([GAIN, fell(40, 3)]), RULES, LOOK, 2, OWN)
    assert decision.elsewhere is not None
    assert decision.families == {"address": decision.capabilities["set_address"], "refund": decision.elsewhere}
    assert "90 % interval" in decision.falls["refund"].reason
    assert f"interval {decision.elsewhere.low:+.1f}" not in decision.falls["refund"].reason
