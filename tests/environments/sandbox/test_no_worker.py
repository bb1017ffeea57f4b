"""A machine that starts no worker any more: nothing of it is a module's fault."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.contract import Action, TargetTask
from environments.sandbox import confinement, workers
from environments.sandbox.pool import WorkerPool
from environments.sandbox.workers import SandboxLevel, SandboxLimits, Worker, WorkerNotStarted
from environments.synthesized.drawing import first_made
from environments.synthesized.module_files import validate_module
from environments.validation.checks import Limits
from environments.validation.playing import play
from errors import SandboxError

SOURCE = (Path(__file__).parents[2] / "integration" / "targets" / "module_move_order.py").read_text(encoding="utf-8")
FULL = [
    SandboxError("the sandbox could not be started: [Errno 11] Resource temporarily unavailable"),
    OSError(errno.EMFILE, "Too many open files"),
    RuntimeError("can't start new thread"),
]


class Full:
    """Starts so many workers, and none after them."""

    def __init__(self, left: int, problem: Exception = FULL[1]) -> None:
        self.left, self.problem, self._real = left, problem, workers.SPAWNER

    def run(self, level: SandboxLevel) -> Any:
        if not self.left:
            raise self.problem
        self.left -= 1
        return self._real.run(level)


@pytest.mark.parametrize("problem", FULL)
def test_no_process_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    monkeypatch.setattr(workers, "SPAWNER", Full(0, problem))
    with pytest.raises(WorkerNotStarted, match=r"no worker could be started: .*(Resource|open files|thread)") as found:
        Worker("", SandboxLevel.PROCESS)
    assert found.value.transient


def test_a_worker_that_is_not_ready_in_time_has_seen_nothing_of_the_module() -> None:
    with pytest.raises(WorkerNotStarted, match="deadline"):
        Worker("", SandboxLevel.PROCESS, SandboxLimits(start_seconds=0.0))


def test_a_sandbox_that_is_ended_while_it_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has told its child to die with it, bubblewrap left it waiting for ever."""
    child = tmp_path / "child"
    starting = ["/bin/sh", "-c", f"sleep 300 & echo $! > {child}.new; mv {child}.new {child}; wait"]
    monkeypatch.setattr(confinement, "bubblewrap_command", lambda *given: starting)
    with pytest.raises(WorkerNotStarted, match="deadline"):
        Worker("", SandboxLevel.BUBBLEWRAP, SandboxLimits(start_seconds=1.0))
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(child.read_text())).wait(5)  # raises `TimeoutExpired` where it lives on


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_module_is_not_refused_for_it(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """The module's own worker does not start, or one of its twins: its author would use up all versions at once."""
    monkeypatch.setattr(workers, "SPAWNER", Full(left))
    with pytest.raises(WorkerNotStarted):
        validate_module(SOURCE, Limits(10, 20, 5, 1, 5), level=SandboxLevel.PROCESS)


def test_a_seed_is_not_passed_over_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool("def scenario(seed):\n    return seed\n", SandboxLevel.PROCESS)

    def make(seed: int) -> TargetTask:
        return TargetTask(str(pool.call("scenario", [seed])), "synthesized", "f", seed)

    assert first_made(make, [3, 4]).seed == 3
    pool.close()
    with monkeypatch.context() as patched:
        patched.setattr(workers, "SPAWNER", Full(0, FULL[0]))
        with pytest.raises(WorkerNotStarted):
            first_made(make, [3, 4])
    assert first_made(make, [3, 4]).seed == 3
    pool.close()


def test_an_episode_is_not_lost_to_it() -> None:
    class Restarted:
        tools, instructions, examples, max_steps = (), "", (), 3

        def reset(self, task: TargetTask) -> Any:
            raise WorkerNotStarted("no worker could be started: Too many open files")

    with pytest.raises(WorkerNotStarted):
        play(Restarted(), TargetTask("t", "test", "f", 0), lambda *_: Action("Hello."))  # type: ignore[arg-type]
