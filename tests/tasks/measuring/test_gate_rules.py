"""The promotion rule, with outcomes made so that the right verdict is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tasks.measuring.gate_rules import GateRules, GateVerdict, gate


def family(name: str, base: list[float], other: list[float], trials: int = 2) -> pd.DataFrame:
    """One row per trial; every trial of a task has the task's outcome."""
    tasks = np.repeat([f"{name}-{i}" for i in range(len(base))], trials)
    return pd.DataFrame(
        {"task": tasks, "family": name, "base": np.repeat(base, trials), "other": np.repeat(other, trials)}
    )


def changed(count: int, fell: int, name: str = "refund") -> pd.DataFrame:
    return family(name, [1.0] * count, [0.0] * fell + [1.0] * (count - fell))


BETTER = family("address", [0.0] * 20, [1.0] * 15 + [0.0] * 5)
OWN = {"set_address": ("address",)}


def decide(*frames: pd.DataFrame, rules: GateRules | None = None):
    return gate({"set_address": pd.concat(frames)}, OWN, rules)["set_address"]


def test_a_real_gain_without_falls_is_promoted_with_its_figures():
    decision = decide(BETTER, changed(10, 0))
    assert decision.verdict is GateVerdict.PROMOTED
    assert decision.promoted
    assert decision.difference.points == pytest.approx(75.0)
    assert "+75.0 points over 20 tasks" in decision.reasons[0]
    assert str(decision.verdict) == "promoted"


@pytest.mark.parametrize(
    ("count", "fell", "verdict"),
    [
        (10, 1, GateVerdict.PROMOTED),  # one task is what the family can resolve: passes, and is said
        (10, 2, GateVerdict.UNDERPOWERED),  # more than one task, not distinguishable: blocks all the same
        (10, 7, GateVerdict.REGRESSION),
        (100, 2, GateVerdict.PROMOTED),  # exactly the margin
        (100, 3, GateVerdict.UNDERPOWERED),
        (100, 12, GateVerdict.REGRESSION),
    ],
)
def test_falls_of_another_family(count, fell, verdict):
    decision = decide(BETTER, changed(count, fell))
    assert decision.verdict is verdict
    if fell / count > 0.02:
        assert any("refund: fell by" in reason for reason in decision.reasons)


def test_many_small_falls_are_caught_together():
    falls = [changed(10, 1, f"family_{i}") for i in range(8)]
    decision = decide(BETTER, *falls)
    assert decision.verdict is GateVerdict.REGRESSION
    assert any("all other families together" in reason for reason in decision.reasons)


def test_no_gain_is_not_better_and_a_gain_too_small_to_see_is_underpowered():
    assert decide(family("address", [1, 0] * 10, [0, 1] * 10)).verdict is GateVerdict.NOT_BETTER
    small = decide(family("address", [0.0] * 20, [1.0] * 3 + [0.0] * 17))
    assert small.verdict is GateVerdict.UNDERPOWERED
    assert any("80 % power" in reason for reason in small.reasons)
    few = decide(family("address", [0.0] * 4, [1.0] * 4))
    assert few.verdict is GateVerdict.UNDERPOWERED
    assert any("4 tasks cannot give" in reason for reason in few.reasons)
    assert decide(family("address", [0.0] * 20, [1.0] * 3 + [0.0] * 17), rules=GateRules(worthwhile=40)).verdict is (
        GateVerdict.NOT_BETTER
    )


def test_holm_is_over_all_capabilities_tried():
    gain = family("address", [0.0] * 30, [1.0] * 6 + [0.0] * 24)  # p = 2 / 2^6
    assert gate({"set_address": gain}, OWN)["set_address"].verdict is GateVerdict.PROMOTED
    noise = family("address", [1, 0] * 15, [0, 1] * 15)
    tried = gate({"set_address": gain, "other_one": noise}, OWN | {"other_one": ("address",)})
    assert tried["set_address"].adjusted_p == pytest.approx(4 / 2**6)
    assert tried["set_address"].verdict is GateVerdict.UNDERPOWERED


def test_unknown_own_families_mean_all_tasks_and_every_family_is_watched():
    decision = gate({"set_address": pd.concat([BETTER, changed(10, 7)])}, {})["set_address"]
    assert decision.verdict is GateVerdict.REGRESSION
    assert set(decision.families) == {"address", "refund"}


def test_a_family_nobody_finished_blocks():
    lost = changed(5, 0).assign(other=np.nan)
    decision = decide(BETTER, lost)
    assert decision.verdict is GateVerdict.UNDERPOWERED
    assert any("cannot be excluded" in reason for reason in decision.reasons)
    with pytest.raises(ValueError, match="no episode of its families"):
        gate({"set_address": changed(5, 0)}, OWN)
