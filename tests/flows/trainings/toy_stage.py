"""What a job does that trains on a toy: the stage itself, with an environment that needs no target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from environments.contract import TargetTask
from flows import train_apart
from tasks import train as stage_file
from tests.tasks.test_train_carry import Named

# Longer than another process takes to begin.
LONG = 300.0


class Apart(Named):
    """A capability's environment, whose scenarios are like no other's."""

    def scenario(self, seed: int) -> TargetTask:
        return super().scenario(seed + 1000 * len(self.capability))

    def own_scenario(self, seed: int) -> TargetTask:
        return super().own_scenario(seed + 1000 * len(self.capability))


def made(store: Any, opened: Any, target: Any, capability: str, keep: Any) -> Apart:
    """Stands for the environment that the stage `synthesize` has stored."""
    return Apart(capability)


def lead(order: dict[str, Any]) -> int:
    """Begin when all have begun that are to train at once: trainings one after another would wait for ever."""
    folder = Path(order["meet"])
    (folder / order["capability"]).touch()
    late = time.monotonic() + LONG
    while len(list(folder.iterdir())) < order["trainings"]:
        if time.monotonic() > late:
            raise TimeoutError(f"{order['capability']} has waited for the others for {LONG:g} s")
        time.sleep(0.05)
    stage_file.stored_environment = made  # type: ignore[assignment]
    return train_apart.lead(order)
