"""A training in a process of its own, which can be ended: a call that hangs in C takes no exception, a process can be
killed. What it had stored stays, and it goes on from its last whole checkpoint.

    limits.training_minutes = 90        # how long one may take; 0, the default: in the round's own process

The other process loads the base once more (time and memory), which is why this is not the default.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import errors
from db import open_store
from errors import TraceError, TrainingStuck
from settings import MachineSettings, load_settings
from tasks.round.context import Context
from tasks.round.results import TrainResult
from tasks.round.stage import adopt, forget
from tasks.train import train
from tasks.unattended.stalls import end_with_parent, pulse, watched

logger = logging.getLogger("trace")
# A training that was ended is gone on with this often: what hung by chance does not hang again.
ATTEMPTS = 2
POLL_SECONDS = 0.5
PATIENCE = 10.0
COMMAND = (sys.executable, "-m", "flows.train_apart")


def train_apart(context: Context, capability: str, command: tuple[str, ...] = COMMAND) -> None:
    """Do the stage `train` of a capability in another process, unless it is done. Its result is in the store.

    Raises `TrainingStuck` when it took longer than `limits.training_minutes` twice, and what the stage raised.
    """
    if context.found(TrainResult, capability) is not None:
        return
    minutes = context.settings.limits.training_minutes
    order = {"settings": _settings_of(context), "round": context.round.id, "capability": capability}
    for attempt in range(ATTEMPTS):
        done = _run(command, json.dumps(order), 60 * minutes)
        if done is not None:
            _check(done, capability)
            return
        logger.warning(
            "the training of %s took longer than limits.training_minutes = %g and was ended%s",
            capability, minutes, "; it goes on from its last checkpoint" if attempt + 1 < ATTEMPTS else "",
        )  # fmt: skip
    raise TrainingStuck(
        f"the training of {capability!r} was ended {ATTEMPTS} times after limits.training_minutes = {minutes:g}; raise "
        "it if the training was slow, or look at the log for what it waited for: its checkpoints are kept"
    )


def _settings_of(context: Context) -> dict[str, Any]:
    """The round's settings without the machine's, which the other process reads for itself: a key stays where it is."""
    return context.settings.model_dump(mode="json", exclude=set(MachineSettings.model_fields))


def _run(command: tuple[str, ...], order: str, seconds: float) -> tuple[int, str] | None:
    """Exit status and standard output of the process; None when it was ended after `seconds`. It is ended with this
    process, too: it reads its orders from a pipe that stays open, and ends when the pipe does."""
    # Its lines are this process's: Prefect would send them for a run that it does not know.
    environment, pipe = {**os.environ, "PREFECT_LOGGING_EXTRA_LOGGERS": ""}, subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True)
    assert process.stdin is not None
    deadline = time.monotonic() + seconds
    try:
        process.stdin.write(order + "\n")
        process.stdin.flush()
        while process.poll() is None:
            if time.monotonic() > deadline:
                return None
            pulse()  # the other process has a watch of its own
            time.sleep(POLL_SECONDS)
        assert process.stdout is not None
        return process.returncode, process.stdout.read()
    except BrokenPipeError:
        return process.wait(), ""
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and all that it started."""
    for what, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, what)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _check(done: tuple[int, str], capability: str) -> None:
    """Raise what the other process raised."""
    status, said = done
    if status == 0:
        return
    lines = said.strip().splitlines()
    try:
        problem = json.loads(lines[-1]) if lines else {}
    except ValueError:
        problem = {}
    kind = getattr(errors, str(problem.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, TraceError):
        raise kind(problem["message"])
    raise RuntimeError(f"the process that trained {capability!r} ended with status {status}; its log says why")


def main() -> int:
    """The other process: do the stage, or say what went wrong in the last line."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    order = json.loads(sys.stdin.readline())
    end_with_parent()
    settings = load_settings(**order["settings"])
    with open_store(settings.database_url) as store:
        context = adopt(settings, store, store.round(order["round"]))
        Path(context.folder).mkdir(exist_ok=True)
        try:
            with watched(settings.limits.idle_minutes, context.folder):
                train.do(context, order["capability"])
        except TraceError as problem:
            print(json.dumps({"error": type(problem).__name__, "message": str(problem)}), flush=True)
            return 1
        finally:
            forget(context.round.id)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
