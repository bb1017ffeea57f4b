"""A target whose calls have limits while environments are composed from it and validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import Environment, Generators, Target, TargetTask
from environments.task_ids import generated
from models.episodes import STEP_SECONDS, Guarded, guarded


class GuardedTarget:
    """The target as it is composed from and validated: its calls have the limits that a `Player` sets them, so that
    one that hangs or raises is a reason against the environment and not the end of the stage. So is a generator that
    gives something else than it was asked for."""

    def __init__(self, target: Target, seconds: float = STEP_SECONDS) -> None:
        assert isinstance(target, Generators)
        self._target, self._generators, self._seconds = target, target, seconds
        self.name, self.licence = target.name, target.licence

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before `__init__`, where there is no target to ask
            raise AttributeError(name)
        return getattr(self._target, name)

    @property
    def data_hash(self) -> str:
        return self._target.data_hash

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return self._target.tasks(split)

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return self._generators.families()

    def generate(self, family: str, seed: int) -> TargetTask:
        return generated(guarded(self._seconds, "generate", self._generators.generate, family, seed), family)

    def environment(self) -> Environment:
        return Guarded(guarded(self._seconds, "make", self._target.environment), self._seconds)
