"""Work in a process of its own: ended with the process that ordered it, its error raised there."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from graphlib import TopologicalSorter
from typing import Any

import errors
from errors import TraceError
from tasks.unattended.stalls import pulse

logger = logging.getLogger("trace")
POLL_SECONDS = 0.5
# A job that is asked to end has this long before it is killed.
PATIENCE = 10.0
# What an error says of itself, and whoever reads it from a job goes by.
FLAGS = ("transient", "lasting", "unpaid")


class Stopped(Exception):
    """What ordered the job ends, and the job with it."""


def run_job(
    command: Sequence[str], seconds: float, share: Mapping[str, str], stop: threading.Event
) -> tuple[int, str] | None:
    """Exit status and standard output of the process; None when it was ended after `seconds`. `share` are variables of
    its environment. It is ended with this process, too: its standard input is a pipe that stays open, and it ends when
    the pipe does (`models/deadline.py:end_with_parent`). Raises `Stopped` once `stop` is set.
    """
    if stop.is_set():
        raise Stopped("ended with what ordered it")
    # Its lines are this process's: Prefect would send them for a run that it does not know, if it has none of its own.
    environment = {**os.environ, "PREFECT_LOGGING_EXTRA_LOGGERS": "", **share}
    # What it prints goes to a file: a pipe that nobody reads until the end would hold it up once it is full.
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, env=environment, text=True, start_new_session=True
        )
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return None
                pulse()  # the other process has a watch of its own
                if stop.wait(POLL_SECONDS):
                    raise Stopped("ended with what ordered it")
            said.seek(0)
            return process.returncode, said.read()
        finally:
            end_group(process)


def run_at_once(
    commands: Mapping[str, Sequence[str]],
    places: Sequence[Mapping[str, str]],
    after: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Run the commands, by name, as many at a time as there are `places` (variables of a process's environment), in
    their order; one that comes `after` others once these have ended well. One that fails stops no other but those after
    it: the first's error is raised when all are over, the others' are told."""
    after, order = after or {}, {name: i for i, name in enumerate(commands)}
    sorter, stop = TopologicalSorter({name: after.get(name, ()) for name in commands}), threading.Event()
    sorter.prepare()

    def one(name: str, place: Mapping[str, str]) -> None:
        done = run_job(commands[name], float("inf"), place, stop)
        assert done is not None, "it has no limit"
        raise_failure(done, f"the process of {name}")

    free, ready, problems = list(places), list[str](), dict[str, BaseException]()
    running = dict[Future[None], tuple[str, Mapping[str, str]]]()
    waiting, ended = list(commands), set[str]()
    with ThreadPoolExecutor(len(places)) as pool:
        try:
            while True:
                ready = sorted([*ready, *sorter.get_ready()], key=order.__getitem__)
                while ready and free:
                    name, place = ready.pop(0), free.pop(0)
                    waiting.remove(name)
                    running[pool.submit(one, name, place)] = name, place
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, place = running.pop(future)
                    free.append(place)
                    if problem := future.exception():
                        problems[name] = problem
                    else:
                        ended.add(name)
                        sorter.done(name)
        except BaseException:
            stop.set()
            raise
    for name in waiting:
        behind = " and ".join(sorted(set(after[name]) - ended))
        logger.error("%s is not run: it follows %s, which failed", name, behind)
    for name, problem in list(problems.items())[1:]:
        logger.error("%s failed, too: %s: %s", name, type(problem).__name__, problem)
    for problem in problems.values():
        raise problem


def say_failure(problem: TraceError) -> None:
    """In the job: say what went wrong, as a line of JSON on standard output."""
    kind = next(k.__name__ for k in type(problem).__mro__ if getattr(errors, k.__name__, None) is k)
    said = {"error": kind, "message": str(problem), "transient": problem.transient}
    said |= {flag: True for flag in FLAGS if getattr(problem, flag, False)}
    print(json.dumps(said), flush=True)


def raise_failure(done: tuple[int, str], what: str) -> None:
    """Raise what the job raised; `what` is its name where it said nothing."""
    status, said = done
    if status == 0:
        return
    for line in reversed(said.splitlines()):  # other processes of the job may have said something, too
        try:
            problem = json.loads(line)
        except ValueError:
            continue
        kind = getattr(errors, str(problem.get("error")), None) if isinstance(problem, dict) else None
        if isinstance(kind, type) and issubclass(kind, TraceError):
            raised = kind(problem["message"])
            for flag in FLAGS:  # a child that is killed for memory says less
                setattr(raised, flag, bool(problem.get(flag, getattr(raised, flag, False))))
            raise raised
    raise RuntimeError(f"{what} ended with status {status}; its log says why")


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that was started with a session of its own, and all that it started."""
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
