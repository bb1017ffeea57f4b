"""A family of a target may be called as what the gate watches beside families."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tasks.measuring.decisions import GateVerdict, ReleaseDecision
from tasks.measuring.falls import FallKind
from tasks.measuring.gate_plan import GateRules, Look
from tasks.measuring.gate_rules import judge_release

LOST = float("nan")


def family(name: str, base: list[float], other: list[float]) -> pd.DataFrame:
    """Tasks of a family with their outcomes on both sides, the same in both trials."""
    tasks = np.repeat([f"{name}-{i}" for i in range(len(base))], 2)
    return pd.DataFrame({"task": tasks, "family": name, "base": np.repeat(base, 2), "other": np.repeat(other, 2)})


def judged(*frames: pd.DataFrame) -> ReleaseDecision:
    gain = family("address", [0.0] * 20, [1.0] * 15 + [0.0] * 5)
    return judge_release(pd.concat([gain, *frames]), GateRules(), Look(0.05), 2, {"set_address": ("address",)})


@pytest.mark.parametrize("name", ["overall", "all other families together", "pass^2"])
def test_what_becomes_of_a_family_is_one_thing_and_what_becomes_of_all_another(name: str) -> None:
    fallen = [family(f"family_{i}", [1.0] * 10, [0.0] + [1.0] * 9) for i in range(8)]
    assert judged(*fallen, family(name, [1.0] * 10, [1.0] * 10)).verdict is GateVerdict.REGRESSION

    held, outcomes = family("refund", [1.0] * 200, [1.0] * 200), ([1.0] * 20, [LOST] * 4 + [1.0] * 16)
    found, usual = (judged(family(called, *outcomes), held) for called in (name, "coupon"))
    assert (found.falls[name].kind, found.wholes[name].kind) == (FallKind.LOST, FallKind.HELD)
    assert found.verdict is usual.verdict is GateVerdict.UNDERPOWERED
    assert found.falls.keys() == {"address", "refund", name}
