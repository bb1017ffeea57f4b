"""The gate's rates on a few hundred simulated nights of real episodes, and that each of its rules is what keeps them.

`real_episodes.json` was written by `python -m benchmarks.gate --home HOME --save FILE`: success of the embedded base
and of three adapters that a laptop round trained, on each of the shop's validation tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gate
from benchmarks.gate import SCENARIOS, Played, Scenario, report, simulate
from tasks.measuring import gate_rules
from tasks.measuring.falls import Fall, FallKind
from tasks.measuring.gate_rules import judge_capabilities

UNEVEN = Scenario("no effect on average", uneven=True, most=5)
LOOKS = replace(UNEVEN, looks=30)
MANY_TRIED = replace(UNEVEN, tried=10)
GAIN = Scenario("+14 points", points=14, least=80)
WORSE = Scenario("5 points worse", points=-5, champion=True, tried=1, most=5)
FALL = Scenario("all that was learnt, 5 lost elsewhere", points=100, elsewhere=5, tried=1, most=10)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played.read(Path(__file__).with_name("real_episodes.json"))


def share(played: Played, scenario: Scenario, nights: int) -> float:
    """Percent of the nights that promoted."""
    return 100 * float(simulate(played, scenario, nights, seed=7).mean())


@pytest.mark.parametrize(
    ("scenario", "nights"),
    [(UNEVEN, 400), (LOOKS, 60), (MANY_TRIED, 200), (GAIN, 50), (WORSE, 400), (FALL, 100)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_rates_are_those_required(played: Played, scenario: Scenario, nights: int) -> None:
    promoted = simulate(played, scenario, nights, seed=7)
    line, held = report(scenario, promoted)
    assert held, line


def whole_alpha(look: int, alpha: float, drawn: bool = False) -> float:
    return alpha


def not_adjusted(p: Any) -> Any:
    return np.asarray(p, dtype=float)


def always_held(where: str, change: Any, rules: Any) -> Fall:
    return Fall(FallKind.HELD)


@pytest.mark.parametrize(
    ("module", "rule", "off", "scenario", "nights"),
    [
        (gate, "alpha_at", whole_alpha, LOOKS, 60),
        (gate_rules, "holm", not_adjusted, MANY_TRIED, 200),
        (gate_rules, "judge_fall", always_held, FALL, 100),
    ],
    ids=["spending", "holm", "falls"],
)
def test_without_the_rule_the_rate_is_missed(
    played: Played,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    rule: str,
    off: Callable[..., Any],
    scenario: Scenario,
    nights: int,
) -> None:
    monkeypatch.setattr(module, rule, off)
    assert scenario.most is not None
    assert share(played, scenario, nights) > 2 * scenario.most


def test_nights_that_are_not_judged_could_not_have_passed(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation judges only where a p-value allows it; judging every night gives the same."""
    passed: list[bool] = []

    def judged(*given: Any) -> Any:
        decisions = judge_capabilities(*given)
        passed.append(any(d.passed for d in decisions.values()))
        return decisions

    monkeypatch.setattr(gate, "judge_capabilities", judged)
    simulate(played, UNEVEN, 60, seed=3)
    quick = passed.copy()
    passed.clear()
    monkeypatch.setattr(gate, "_may_pass", lambda differences, alpha: np.ones(len(differences), dtype=bool))
    simulate(played, UNEVEN, 60, seed=3)
    assert len(quick) < len(passed) == 60
    assert sum(quick) == sum(passed) > 0


def test_every_requirement_has_its_scenario() -> None:
    assert {(s.most, s.least) for s in SCENARIOS if s.most or s.least} == {(5, None), (None, 80), (10, None)}
    assert any(s.looks == 30 and s.most == 5 for s in SCENARIOS)
    assert any(s.points == 14 and (s.own_tasks, s.trials, s.least) == (60, 8, 80) for s in SCENARIOS)
