"""Files of a comparison's seeds for tests, from success rates by method."""

from __future__ import annotations

from typing import Any

from tasks.comparison.results import MethodFigures, Point, SeedResult

TASKS = 24
FAMILIES = {f"t{i:02}": ("cancel", "refund", "move")[i % 3] for i in range(TASKS)}


def outcomes(solved: int, lost: int = 0) -> dict[str, list[float | None]]:
    """Two trials of each task; the first `solved` tasks succeed twice, the last `lost` have no outcome."""
    found: dict[str, list[float | None]] = {t: [1.0, 1.0] if i < solved else [0.0, 0.0] for i, t in enumerate(FAMILIES)}
    return found | {t: [None, None] for t in list(FAMILIES)[TASKS - lost :]}


def figures(solved: int, lost: int = 0, **changes: Any) -> MethodFigures:
    given: dict[str, Any] = {
        "outcomes": outcomes(solved, lost),
        "episodes": 100,
        "purposes": {"diagnosis": 40, "training": 60, "test": 48},
        "prompt_tokens": 900,
        "sampled_tokens": 100,
        "seconds": 12.5,
        "dollars": 0.25,
    }
    return MethodFigures(**{**given, **changes})


def nested(*solved: int) -> tuple[Point, ...]:
    return tuple(Point(count=k, outcomes=outcomes(s)) for k, s in enumerate(solved))


def seed_result(seed: int, methods: dict[str, MethodFigures], **changes: Any) -> SeedResult:
    given: dict[str, Any] = {
        "target": "shop",
        "data_hash": "d1",
        "seed": seed,
        "budget": 500,
        "profile": "smoke",
        "base": "tiny",
        "revision": "r1",
        "settings": "s1",
        "trials": 2,
        "command": f"trace-agent compare-methods --target shop --seed {seed} --budget 500",
        "commit": "0.1.0+abc",
        "machine": {"system": "Linux", "processor": "A", "cores": 2, "memory_gib": 8.0, "python": "3.11"},
        "families": FAMILIES,
        "methods": methods,
    }
    return SeedResult(**{**given, **changes})
