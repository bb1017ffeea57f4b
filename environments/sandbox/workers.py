"""Where generated modules run: one worker process per module, confined, with a deadline for every call.

A deadline is one of processor time: what else the machine does is no fault of a module's. There is one on the clock,
too, for what sleeps or blocks.

Levels, strongest first; the setting `sandbox` (TRACE_SANDBOX) may name one:

- `container` (1): a container without network, read-only, no capabilities (a daemon and TRACE_SANDBOX_IMAGE);
- `bubblewrap` (2): own user, pid, network, ipc, uts and mount namespaces, a read-only system, no file of the host;
- `process` (3): a plain process. It is used only when the user asks for it, with a warning.

At every level the worker also limits its own memory, files and processes and puts a system-call filter around the
module that opens, executes, forks and signals nothing. Covered and not covered: docs/5-synthesis.md.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from environments.sandbox.allowance import Allowance, TimeLimit, processor_seconds
from environments.sandbox.confinement import (
    SPAWNER,
    SandboxLevel,
    container_environment,
    describe_exit,
    made_by_bubblewrap,
)
from environments.sandbox.seccomp import inner_filter
from errors import ConfigurationError, SandboxError
from settings import machine_settings

logger = logging.getLogger(__name__)

# What a module may import; the worker loads all of it before the filter closes the file system.
MODULE_IMPORTS = (
    "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap",
    "typing",
)  # fmt: skip
# Imported by the above, or by what compiles a module, at first use only, when it would be too late.
_LATE_IMPORTS = (
    "__future__", "_strptime", "_pydecimal", "collections.abc", "encodings.latin_1", "locale", "unicodedata",
)  # fmt: skip
_HEADER = 4
_PIPE = 1 << 16  # bytes that a pipe holds: a larger read would only cost its memory
# How what a `WorkerNotStarted` says begins: of a stored episode the text is all that is left.
NOT_STARTED = "no worker could be started"
# Levels that a probe has worked at in this process. A probe that failed may have met a busy machine: it is made again.
_WORKING: set[SandboxLevel] = set()


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of one worker. `call_seconds` is the processor time of every call and of loading the module,
    `clock_seconds` its time on the clock, for what sleeps or blocks; `start_seconds` that of our own code before it (a
    busy machine needs it). Bytes are of memory, of one request and of one answer."""

    call_seconds: float = 3.0
    clock_seconds: float = 60.0
    start_seconds: float = 20.0
    memory_bytes: int = 512 << 20
    request_bytes: int = 1 << 20
    answer_bytes: int = 1 << 20
    recursion: int = 500


DEFAULT_LIMITS = SandboxLimits()


class ModuleError(SandboxError):
    """The module raised or answered something impossible; the worker lives on. A module is a function of what it is
    given: asked the same again it does the same."""

    lasting = True


class WorkerDied(SandboxError):
    """The worker was killed: by the filter, for passing its deadline, or for breaking the pipe's protocol. `plain` is
    the message without what was measured (`measured`), which is another at every try."""

    def __init__(self, plain: str, measured: str = "") -> None:
        super().__init__(f"{plain} ({measured})" if measured else plain)
        self.plain, self.measured = plain, measured


class WorkerNotStarted(WorkerDied):
    """No worker came to take a module: the machine is out of something, or too busy. It says nothing of the module."""

    transient = True

    def __init__(self, why: str) -> None:
        super().__init__(f"{NOT_STARTED}: {why}")


class CallKilled(WorkerDied):
    """The worker was well until this call, and was killed for it: for what the call does, whatever else the machine
    does."""

    lasting = True


class WorkerGone(WorkerDied):
    """The worker had died before it had the request: another call's fault, and safe to ask another worker."""


def choose_level(wanted: str | None = None) -> SandboxLevel:
    """The level to use: `wanted`, else the machine's setting `sandbox`, else the strongest that works here.

    Raises `ConfigurationError` on an unknown name and `SandboxError` where neither a container nor bubblewrap works.
    """
    name = machine_settings().sandbox if wanted is None else wanted
    if name and name not in set(SandboxLevel):
        raise ConfigurationError(
            f"the sandbox level is {name!r}; it may be one of {[str(v) for v in SandboxLevel]} or unset"
        )
    if name == SandboxLevel.PROCESS:
        logger.warning(
            "TRACE_SANDBOX=process: generated code runs as your user, without namespaces; install bubblewrap"
        )
        return SandboxLevel.PROCESS
    if name:
        why = _why_not(SandboxLevel(name))
        if why:
            raise SandboxError(f"the sandbox level {name!r} does not work here: {why}")
        return SandboxLevel(name)
    reasons = []
    for level in (SandboxLevel.CONTAINER, SandboxLevel.BUBBLEWRAP):
        why = _why_not(level)
        if not why:
            return level
        reasons.append(f"{level}: {why}")
    raise SandboxError(
        "no sandbox works here (" + "; ".join(reasons) + "). Install bubblewrap (apt-get install bubblewrap), or set "
        "TRACE_SANDBOX=process to run generated code with a system-call filter only"
    )


class Worker:
    """One confined process with one module loaded; calls are serialised, each under its deadline.

    Raises `ModuleError` when the module's first lines fail, `WorkerNotStarted` when it never came to these, and
    `WorkerDied` when the process breaks down. A worker that passed a deadline, died or broke the protocol is killed at
    once and answers no more: build another.
    """

    def __init__(self, source: str, level: SandboxLevel | None = None, limits: SandboxLimits = DEFAULT_LIMITS) -> None:
        self.level = level or choose_level()
        self.limits = limits
        self._lock = threading.RLock()  # a call that ends the worker holds it already
        self._count = 0
        self.used = 0.0  # seconds of processor time that all calls, and loading the module, have taken
        self._measured: int | None = None  # the process of the module, where its processor time can be read
        try:
            spawned = SPAWNER.run(self.level)
        except (OSError, RuntimeError) as problem:  # no process, thread, file or place for one
            raise WorkerNotStarted(str(problem)) from problem
        self._process, self._cleanup, self._told = spawned.process, spawned.cleanup, spawned.told
        try:
            self.names: tuple[str, ...] = tuple(self._load(source))
        except BaseException:  # whatever it was, a limit of time among it: nobody else can end the process
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id, on the host, of the process that was started (bubblewrap's, where that is the level)."""
        return self._process.pid

    @property
    def module_pid(self) -> int | None:
        """The process id, on the host, of the process that runs the module; None where it is another machine's, or not
        known."""
        return self._measured

    def call(self, function: str, arguments: Sequence[Any] = ()) -> Any:
        """The JSON value that `function(*arguments)` of the module gives. Raises `ModuleError`, `WorkerGone`, or
        `CallKilled`."""
        with self._lock:
            self._count += 1
            request = {"id": self._count, "function": function, "arguments": list(arguments)}
            try:
                return self._exchange(request, self._limit)
            except WorkerGone:
                raise
            except WorkerDied as died:
                raise CallKilled(died.plain, died.measured) from died

    def kill(self) -> None:
        """End the process now; safe to call again."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a bubblewrap that still starts leaves the child that it made
        self._process.wait()
        with self._lock:  # another thread's call meets the end of the pipe first: its number may be another file's then
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._hear()
        command, self._cleanup = self._cleanup, []
        if command:
            try:
                subprocess.run(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20, check=False,
                    env=container_environment(),
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as problem:  # no fault of the module's, or of the call's
                logger.warning("a sandbox may still be there: %r failed (%s)", " ".join(command), problem)

    def _load(self, source: str) -> list[str]:
        first = {
            "id": 0,
            "imports": [*MODULE_IMPORTS, *_LATE_IMPORTS],
            # Bubblewrap sees to it itself. What docker runs is no child of this process or of docker's command.
            "dies_with_parent": self.level is SandboxLevel.PROCESS,
            "watched": self.level is SandboxLevel.CONTAINER,
            "filter": base64.b64encode(inner_filter()).decode(),
            **asdict(self.limits),
        }
        try:
            ready = self._exchange(first, TimeLimit(math.inf, self.limits.start_seconds))
        except WorkerDied as died:
            raise WorkerNotStarted(str(died)) from died
        if ready != "ready":
            raise WorkerNotStarted("it did not confine itself")
        self._measure()
        names = self._exchange({"id": 0, "source": source}, self._limit)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise WorkerDied("the worker did not name the module's functions")
        return names

    def _measure(self) -> None:
        """Find out how the processor time of the module is known, before any of it runs."""
        self.used, told = 0.0, self._hear()  # what it has taken so far was our own code
        self._measured = self._process.pid if self.level is SandboxLevel.PROCESS else told
        self._limit = TimeLimit(self.limits.call_seconds, self.limits.clock_seconds)
        try:
            if self._measured is not None:
                processor_seconds(self._measured)
                return
        except OSError:
            self._measured = None
        if self.level is SandboxLevel.CONTAINER:  # it may be another machine's: the worker has a timer of its own
            self._limit = TimeLimit(math.inf, self.limits.clock_seconds)
            return
        self._limit = TimeLimit(math.inf, self.limits.call_seconds)
        slowed = "a call is killed after %g s on the clock, also where other load has slowed it"
        logger.warning(f"the processor time of sandboxed code cannot be read here: {slowed}", self.limits.call_seconds)

    def _hear(self) -> int | None:
        """What bubblewrap has told of the process that it made, once."""
        told, self._told = self._told, None
        if told is None:
            return None
        try:
            return made_by_bubblewrap(told)
        finally:
            os.close(told)

    def _clock(self) -> float:
        return processor_seconds(self._measured) if self._measured is not None else 0.0

    def _took(self, allowed: Allowance, answer: Mapping[str, Any]) -> float:
        """Seconds of processor time of an exchange. Where they cannot be read the worker tells them, which is believed
        within what has passed on the clock."""
        if self._measured is not None:
            return min(allowed.used, allowed.elapsed)
        told, elapsed = answer.get("used"), allowed.elapsed
        return float(told) if isinstance(told, int | float) and 0 <= told <= elapsed else elapsed

    def _exchange(self, request: Mapping[str, Any], limit: TimeLimit) -> Any:
        if not self.alive:
            raise WorkerGone(f"the worker is gone ({describe_exit(self._process.returncode)})")
        try:
            body = json.dumps(request, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, TypeError, RecursionError, UnicodeEncodeError) as error:
            raise ModuleError(f"the request is no plain JSON: {error}") from error
        if len(body) > self.limits.request_bytes:
            raise ModuleError(f"the request has {len(body)} bytes, more than {self.limits.request_bytes}")
        allowed = Allowance(limit, self._clock)
        try:
            self._write(len(body).to_bytes(_HEADER, "big") + body, allowed)
            answer = self._answer(allowed)
            if not isinstance(answer, dict) or answer.get("id") != request["id"]:
                raise WorkerDied("the worker wrote something that is no answer to the call")
        except BaseException:  # also a limit of time: the next call would be given this one's answer
            self.used += self._took(allowed, {})
            self.kill()
            raise
        self.used += self._took(allowed, answer)
        if "error" in answer:
            # What a module raises may hold half a character, which no request to its author could hold.
            raise ModuleError(str(answer["error"]).encode("utf-8", "replace").decode()[:1000])
        return answer.get("value")

    def _write(self, data: bytes, allowed: Allowance) -> None:
        assert self._process.stdin is not None
        descriptor, view = self._process.stdin.fileno(), memoryview(data)
        while view:
            # Small frames fit the pipe: try first, wait only when it is full.
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                self._wait(descriptor, select.POLLOUT, allowed)
            except BrokenPipeError:
                raise WorkerGone(f"the worker is gone ({self._epitaph()})") from None

    def _answer(self, allowed: Allowance) -> Any:
        whole = self._read(b"", _HEADER, allowed)
        size = int.from_bytes(whole[:_HEADER], "big")
        if size > self.limits.answer_bytes:
            raise WorkerDied(f"the worker announced an answer of {size} bytes, more than {self.limits.answer_bytes}")
        body = self._read(whole, _HEADER + size, allowed)[_HEADER:]
        if len(body) > size:
            raise WorkerDied("the worker wrote more than its answer")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WorkerDied(f"the worker wrote no JSON: {type(error).__name__}") from error

    def _read(self, parts: bytes, count: int, allowed: Allowance) -> bytes:
        """`parts` and what comes behind them until these are `count` bytes: all that is there, as one read costs as
        much as the answer of a small call."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while len(parts) < count:
            self._wait(descriptor, select.POLLIN, allowed)
            part = os.read(descriptor, _PIPE)
            if not part:
                raise self._died(allowed)
            parts += part
        return parts

    def _wait(self, descriptor: int, event: int, allowed: Allowance) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(1000 * allowed.pause):
            if passed := allowed.over():
                raise WorkerDied(f"the call passed its deadline of {passed}", allowed.spent())

    def _died(self, allowed: Allowance) -> WorkerDied:
        why = self._epitaph()
        if self.level is SandboxLevel.CONTAINER and why == describe_exit(-signal.SIGPROF):
            passed = f"{self.limits.call_seconds:g} s of processor time"
            return WorkerDied(f"the call passed its deadline of {passed}", allowed.spent())
        return WorkerDied(f"the worker is gone ({why})")

    def _epitaph(self) -> str:
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return describe_exit(self._process.returncode)


def _why_not(level: SandboxLevel) -> str:
    """Empty when the level works here (a worker was started and answered), else the reason. What works is asked once a
    process."""
    if level in _WORKING:
        return ""
    why = _probed(level)
    if not why:
        _WORKING.add(level)
    return why


def _probed(level: SandboxLevel) -> str:
    """What `_why_not` says of a level, tried now."""
    if level is SandboxLevel.CONTAINER:
        if not machine_settings().sandbox_image:
            return "TRACE_SANDBOX_IMAGE names no image"
        if shutil.which("docker") is None:
            return "there is no docker command"
    elif shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    try:
        worker = Worker("def ping():\n    return 'pong'\n", level, DEFAULT_LIMITS)
    except SandboxError as error:
        return str(error)
    try:
        return "" if worker.call("ping") == "pong" else "a probe gave a wrong answer"
    except SandboxError as error:
        return str(error)
    finally:
        worker.kill()
