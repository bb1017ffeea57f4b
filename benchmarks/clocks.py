"""Where the wall time of a round goes: the command line with clocks around its stages, its store and MLflow.

    python -m benchmarks.clocks FIGURES.json improve --seed 0 --home FOLDER

Does what `trace-agent` does with the words after the file, and writes `Clocks` there when it ends. Nothing is measured
inside other threads: what they do beside a stage costs it no wall time of its own.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


@dataclass
class StageClock:
    """Seconds of one stage: all, and of these in the model, the environment, the store and MLflow; `work` are the
    tokens that the model computed in it (`models/work.py`)."""

    name: str
    began: float
    seconds: float = 0.0
    model: float = 0.0
    environment: float = 0.0
    store: float = 0.0
    mlflow: float = 0.0
    work: dict[str, int] = field(default_factory=dict)


class Clocks:
    """The stages of a process, in order; `spent` adds up what the thread of a stage spends in store and MLflow."""

    def __init__(self) -> None:
        self.stages: list[StageClock] = []
        self.spent = {"store": 0.0, "mlflow": 0.0}
        self.works: list[Any] = []
        self._here = threading.local()

    def call(self, kind: str, made: Callable[[], Any]) -> Any:
        """What `made` gives, its seconds added to `kind`; the outermost call alone counts."""
        if not getattr(self._here, "stage", False) or getattr(self._here, "inside", False):
            return made()
        self._here.inside, began = True, time.perf_counter()
        try:
            return made()
        finally:
            self._here.inside = False
            self.spent[kind] += time.perf_counter() - began

    def watch(self, kind: str, owner: type) -> None:
        """Put a clock around the public functions of a class."""
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and not name.startswith("_"):
                setattr(owner, name, self._watched(kind, function))

    def _watched(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def each(*args: Any, **more: Any) -> Iterator[Any]:
                made, end = function(*args, **more), object()
                while (item := self.call(kind, lambda: next(made, end))) is not end:
                    yield item

            return each

        @functools.wraps(function)
        def called(*args: Any, **more: Any) -> Any:
            return self.call(kind, lambda: function(*args, **more))

        return called

    def stage(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """`Stage.do` with a clock."""

        @functools.wraps(do)
        def done(stage: Any, context: Any, *args: Any, **more: Any) -> Any:
            clock = StageClock(":".join([stage.name, *map(str, args)]), time.perf_counter() - BEGAN)
            before = self._now(context)
            self._here.stage = True
            try:
                return do(stage, context, *args, **more)
            finally:
                self._here.stage = False
                after = self._now(context)
                clock.seconds = time.perf_counter() - BEGAN - clock.began
                for name in ("model", "environment", "store", "mlflow"):
                    setattr(clock, name, after[name] - before[name])
                clock.work = {name: n - before["work"].get(name, 0) for name, n in after["work"].items()}
                self.stages.append(clock)

        return done

    def _now(self, context: Any) -> dict[str, Any]:
        base = vars(context).get("base")  # a cached property: not loaded for a question
        works = [*self.works, *([base.policy.work] if base is not None else [])]
        total: dict[str, int] = {}
        for work in works:
            for name, n in asdict(work).items():
                total[name] = total.get(name, 0) + n
        model, environment = context.model.seconds, context.environment.seconds
        return {**self.spent, "model": model, "environment": environment, "work": total}


def main() -> None:
    from db import Store
    from flows.cli.main import main as command_line

    output = Path(sys.argv[1])
    sys.argv = ["trace-agent", *sys.argv[2:]]
    import models.training.trl_trainer as trainer
    from models.adapters.registry import Registry
    from models.adapters.runs import RunLog
    from tasks.round.stage import Stage

    clocks = Clocks()
    clocks.watch("store", Store)
    clocks.watch("mlflow", Registry)
    clocks.watch("mlflow", RunLog)
    make = trainer.make_learner

    def made(*args: Any) -> Any:
        learner = make(*args)
        clocks.works.append(learner.work)
        return learner

    trainer.make_learner = made  # type: ignore[assignment]
    Stage.do = clocks.stage(Stage.do)  # type: ignore[method-assign]
    try:
        command_line()
    finally:
        told = {"stages": [asdict(s) for s in clocks.stages], "seconds": time.perf_counter() - BEGAN}
        output.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
