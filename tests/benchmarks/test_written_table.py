"""What `benchmarks.written` makes of its trainings' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.written import table


def trained(folder: Path, kind: str, seed: int, own: list[int], successes: int) -> None:
    """The file of a training after which `own` tasks of twenty are solved (none before), one of the rest is lost."""
    tasks = {f"own-{i}": "asked" for i in range(20)} | {f"rest-{i}": "other" for i in range(10)}
    found: dict[str, Any] = {
        "seed": seed,
        "capability": "ask",
        "kind": kind,
        "families": ["asked"],
        "calibration": {"hinted": None},
        "steps": 8,
        "chosen": 8,
        "episodes": 256,
        "check": {"successes": successes, "episodes": 24},
        "tasks": tasks,
        "before": {task: tasks[task] == "other" for task in tasks},
        "after": {task: task != "rest-0" and (tasks[task] == "other" or int(task[4:]) in own) for task in tasks},
    }
    (folder / f"ask-{kind}-{seed}.json").write_text(json.dumps(found))


def test_half_of_what_the_generators_gain_is_taken_off_and_signs_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        trained(tmp_path, "generators", seed, list(range(20)), 9)
        trained(tmp_path, "written", seed, list(range(15)), 9 if seed == 1 else 0)
    table(tmp_path)
    said = capsys.readouterr().out
    assert "own +75.0 on 20 tasks, rest -10.0 on 10, check  9 of 24" in said
    assert "generators                 +100.0 points (+100.0 to +100.0), 2 seeds" in said
    assert "written - 0.5 x generators  +25.0 points" in said
    assert "written: the check told the sign of 1 of 2 gains (2 are above 0)" in said
