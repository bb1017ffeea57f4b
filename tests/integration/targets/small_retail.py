"""tau2's retail domain with three tasks of each split: real prompts and real checks, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from environments.contract import TargetTask
from environments.targets.catalogue import load_target

EACH = 3


class SmallRetail:
    """The first tasks of `tau2:retail`, whose user is scripted."""

    def __init__(self) -> None:
        self._whole: Any = load_target("tau2:retail", "scripted")
        self.name, self.licence, self.user = "small-retail", self._whole.licence, self._whole.user
        self.data_hash = f"{self._whole.data_hash}-{EACH}"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return self._whole.tasks(split)[:EACH]

    def environment(self) -> Any:
        return self._whole.environment()


def target() -> SmallRetail:
    return SmallRetail()
