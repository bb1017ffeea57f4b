"""Levels of difficulty: one dial, not several environments. What a module must show of them before anything is played:
the goal of a seed has the same shape at every level, and a level differs from the one below it.

The verifier is the same by construction: `goals.judge_goal` judges every level, and the module's functions are not told
which one they play. That no level weakens the task is for the other checks, which are made at every level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from environments.contract import TargetTask, canonical_json

LEAST, MOST = 2, 5
LEVELS_HELP = (
    f"LEVELS must say how many levels of difficulty there are ({LEAST} to {MOST}), and scenario(seed, level) make one "
    "of them, 0 being the easiest, with the same kind of goal at each"
)
# Seeds whose scenarios are compared across the levels, and the share that must differ from one level to the next.
SEEDS, DIFFERING = 20, 0.5


def goal_shape(goal: Mapping[str, Any]) -> dict[str, Any]:
    """What kind of goal it is, whatever its values: tools in order with the names of their arguments, how many values
    of the state (by the last part of their paths) and words it asks for, and which tools are allowed besides."""
    return {
        "calls": [[call["name"], sorted(call["arguments"])] for call in goal.get("calls", [])],
        "state": sorted(path.rpartition(".")[2] for path in goal.get("state", {})),
        "says": len(goal.get("says", [])),
        "silent": len(goal.get("silent", [])),
        "allowed": sorted(goal.get("allowed", [])),
    }


def level_faults(scenario: Callable[[int, int], TargetTask], levels: int) -> list[str]:
    """What is wrong with the levels of the module that gives `scenario(seed, level)`; empty when they are one dial."""
    faults = []
    below = [_scenario(scenario(seed, 0)) for seed in range(SEEDS)]
    shapes = [canonical_json(goal_shape(made["goal"])) for made in below]
    for level in range(1, levels):
        here = [_scenario(scenario(seed, level)) for seed in range(SEEDS)]
        other = [s for s in range(SEEDS) if canonical_json(goal_shape(here[s]["goal"])) != shapes[s]]
        if other:
            faults.append(
                f"the goal of seed {other[0]} has another shape at level {level} than at level 0: the same tools, "
                "arguments and numbers of values must be asked for at every level, so draw what the goal asks for "
                "before looking at the level"
            )
        differing = sum(canonical_json(a) != canonical_json(b) for a, b in zip(here, below, strict=True))
        if differing < DIFFERING * SEEDS:
            faults.append(f"level {level} is like level {level - 1} in {SEEDS - differing} of {SEEDS} scenarios")
        below = here
    return faults


def _scenario(task: TargetTask) -> dict[str, Any]:
    return dict(task.payload["scenario"])
