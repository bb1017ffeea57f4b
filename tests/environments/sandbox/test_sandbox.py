"""The sandbox against code that wants out, and the levels it may run at. Needs bubblewrap, as a user would."""

import concurrent.futures
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
from sandbox_attacks import ATTACKS

from environments.contract import content_hash
from environments.sandbox import workers as sandbox
from environments.sandbox.confinement import bubblewrap_command
from environments.sandbox.pool import WorkerPool
from environments.sandbox.seccomp import inner_filter, outer_filter
from environments.sandbox.workers import (
    ModuleError,
    SandboxLevel,
    SandboxLimits,
    Worker,
    WorkerDied,
    WorkerGone,
    choose_level,
)
from errors import ConfigurationError, SandboxError

LIMITS = SandboxLimits(call_seconds=0.6, clock_seconds=1.0)
ECHO = """
seen = []
def echo(x): return x
def remember(x):
    seen.append(x)
    return len(seen)
def spin():
    while True: pass
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A folder of the host with a canary in it; afterwards it, this process and its children must be as before."""
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    before = canary.stat()
    monkeypatch.setenv("TRACE_CANARY", "secret")
    children = own_children()
    yield {"canary": str(canary), "folder": str(tmp_path), "pid": os.getpid()}
    assert os.listdir(tmp_path) == ["canary"]
    assert canary.read_text() == "untouched"
    assert canary.stat().st_mode == before.st_mode
    assert canary.stat().st_nlink == before.st_nlink
    assert own_children() <= children


def own_children() -> set[int]:
    """Processes below this one. A PostgreSQL that another test started here begins workers of its own at any time."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() != "postgres":
                found.add(child.pid)
    return found


def runs(process):
    """Whether it still executes; a dead one may wait for init to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def source_of(body, host):
    lines = body.format(**host).splitlines()
    return "def attack():\n" + "".join(f"    {line}\n" for line in lines)


# The inner filter is the same at every level, so the weakest level is tried with what only the filter stops.
CASES = [(name, SandboxLevel.BUBBLEWRAP) for name in ATTACKS]
CASES += [
    (n, SandboxLevel.PROCESS) for n in ATTACKS if n.endswith("_raw") or n.startswith(("read_", "write_", "signal"))
]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_attacks_are_denied_and_end_within_five_seconds(name, level, host):
    worker = Worker(source_of(ATTACKS[name], host), level, LIMITS)
    process = psutil.Process(worker.pid)
    family = [process, *process.children(recursive=True)]
    started = time.monotonic()
    try:
        # Denied: the call raises, and what it raises is one of the sandbox's own errors.
        with pytest.raises((ModuleError, WorkerDied)):
            worker.call("attack")
    finally:
        worker.kill()
    assert time.monotonic() - started < 5
    while any(map(runs, family)) and time.monotonic() - started < 5:
        time.sleep(0.01)
    assert not any(map(runs, family))


def test_the_list_of_attacks_is_as_long_as_promised():
    assert len(ATTACKS) >= 30


def test_a_body_that_runs_at_load_time_is_confined_too(host):
    for body in ("import os\nos.system('touch {folder}/x')", "open('{canary}')", "while True: pass"):
        with pytest.raises(SandboxError):
            Worker(body.format(**host), SandboxLevel.BUBBLEWRAP, LIMITS)


def test_nothing_of_the_host_is_even_mounted(host):
    # The inner filter forbids looking; without it, the mount namespace alone must still hide everything.
    looking = "import os; print(sorted(os.listdir('/'))); print(os.path.exists({!r}), os.path.exists('/etc'), os.path.exists('/proc/1'), dict(os.environ).get('TRACE_CANARY'))"  # noqa: E501
    command = bubblewrap_command(0)
    index = command.index("--seccomp")
    command = [*command[:index], "--", sys.executable, "-I", "-S", "-c", looking.format(host["canary"])]
    command[command.index("--") + 1] = os.path.realpath(sys._base_executable)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    assert shown[1] == "False False False None"
    assert "'etc'" not in shown[0]


def test_the_outer_filter_alone_denies_sockets_and_processes(tmp_path):
    program = tmp_path / "filter"
    program.write_bytes(outer_filter())
    with program.open("rb") as stream:
        command = bubblewrap_command(stream.fileno())
        probe = "import socket, os\nfor f in (socket.socket, os.fork):\n    try: f(); print('worked')\n    except PermissionError: print('denied')"  # noqa: E501
        command = [*command[:-2], "-c", probe]  # in place of -B and the worker
        done = subprocess.run(
            command, pass_fds=[stream.fileno()], capture_output=True, text=True, timeout=10, check=False
        )
    assert done.stdout.split() == ["denied", "denied"], done.stderr


def test_filters_exist_for_both_machines_and_no_other():
    for machine in ("x86_64", "aarch64"):
        assert len(inner_filter(machine)) % 8 == len(outer_filter(machine)) % 8 == 0
    with pytest.raises(SandboxError, match="riscv64"):
        inner_filter("riscv64")


def test_one_worker_serves_many_calls_from_many_threads():
    pool = WorkerPool(ECHO)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: pool.call("echo", [{"n": n}])["n"], range(400))) == list(range(400))
    assert pool.restarts == 0
    pool.close()


def test_a_worker_outlives_the_thread_that_asked_for_it():
    workers = []
    thread = threading.Thread(target=lambda: workers.append(Worker(ECHO)))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert workers[0].call("echo", [1]) == 1
    workers[0].kill()


FUTURE = """\
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class _Order:
    id: str
    lines: list[str] | None = None

def euros():
    return _Order("\\N{EURO SIGN}").id
"""


def test_what_models_often_write_at_the_top_of_a_module_loads():
    worker = Worker(FUTURE)
    assert worker.call("euros") == "\u20ac"
    worker.kill()


def test_a_worker_that_misbehaves_is_replaced():
    pool = WorkerPool(ECHO, limits=LIMITS)
    assert pool.call("remember", [1]) == 1
    with pytest.raises(WorkerDied, match="deadline"):
        pool.call("spin")
    assert pool.call("remember", [1]) == 1
    assert pool.restarts == 1
    with pytest.raises(ModuleError, match="AttributeError"):
        pool.call("missing")
    assert pool.call("remember", [1]) == 2
    pool.close()


def test_calls_that_wait_for_a_worker_which_is_killed_go_to_the_next():
    """Two of them kill it, one after another; only these two are lost."""
    pool = WorkerPool(ECHO, limits=LIMITS)
    pool.call("echo", [0])
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        bad = [threads.submit(pool.call, "spin") for _ in range(2)]
        time.sleep(0.2)
        good = [threads.submit(pool.call, "echo", [n]) for n in range(6)]
        assert [call.result(20) for call in good] == list(range(6))
        for call in bad:
            assert "deadline" in str(call.exception(20))
    assert 1 <= pool.restarts <= 2
    pool.close()


def test_a_call_that_has_reached_its_worker_is_never_made_twice():
    pool = WorkerPool(ECHO + "\ndef leave():\n    raise SystemExit(seen.append(1))\n", limits=LIMITS)
    worker = pool._current()
    worker._process.kill()
    worker._process.wait()
    assert pool.call("remember", [1]) == 1, "it had died before"
    with pytest.raises(WorkerDied, match="deadline") as caught:
        pool.call("spin")
    assert not isinstance(caught.value, WorkerGone)
    assert pool.restarts == 1
    pool.close()


class Interrupt(BaseException):
    """As a limit of time is raised within a call that takes too long, or a user's Ctrl-C."""


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(monkeypatch):
    pool = WorkerPool(ECHO)
    pool.call("echo", [0])
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_answer", lambda *given: (_ for _ in ()).throw(Interrupt))
        with pytest.raises(Interrupt):
            pool.call("echo", ["interrupted"])
    assert pool.call("echo", ["next"]) == "next"
    pool.close()


def test_a_worker_whose_start_is_interrupted_is_ended(monkeypatch):
    started = []

    def interrupted(worker, source):
        started.append(psutil.Process(worker.pid))
        raise Interrupt

    monkeypatch.setattr(Worker, "_load", interrupted)
    with pytest.raises(Interrupt):
        Worker(ECHO)
    assert not runs(started[0])


def test_a_worker_may_be_killed_while_another_thread_reads_from_it(monkeypatch):
    """The reading thread comes to its read only when the other one has had all the time to close the pipe."""
    worker, killed, wait = Worker(ECHO, limits=LIMITS), threading.Event(), Worker._wait

    def dawdling(*given):
        wait(*given)
        killed.wait(0.3)

    monkeypatch.setattr(Worker, "_wait", dawdling)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        spinning = threads.submit(worker.call, "spin")
        threads.submit(worker.kill).result(20)
        killed.set()
        assert isinstance(spinning.exception(20), WorkerDied)


def test_a_container_that_cannot_be_removed_changes_no_verdict_and_is_told(caplog):
    pool = WorkerPool(ECHO, limits=LIMITS)
    pool.call("echo", [0])
    pool._current()._cleanup = ["/no/docker", "rm", "--force", "trace-sandbox-1"]
    with pytest.raises(WorkerDied, match="deadline"), caplog.at_level(logging.WARNING):
        pool.call("spin")
    assert "trace-sandbox-1" in caplog.text
    assert pool.call("echo", [1]) == 1
    pool.close()


def test_what_a_module_raises_can_be_told_to_its_author():
    """A smiley as a model writes it in JSON is two halves of a character in Python: no request could hold them."""
    pool = WorkerPool('def look(x):\n    raise ValueError("no order \\ud83d\\ude0a")\n')
    with contextlib.closing(pool), pytest.raises(ModuleError, match="no order") as found:
        pool.call("look", [1])
    assert content_hash(str(found.value))


@pytest.mark.parametrize("argument", [float("nan"), object(), "x" * (2 << 20), {1, 2}])
def test_requests_that_cannot_be_sent_are_refused_and_leave_the_worker_well(argument):
    worker = Worker(ECHO)
    with pytest.raises(ModuleError):
        worker.call("echo", [argument])
    assert worker.call("echo", ["\ud800"]) == "\ud800"
    worker.kill()
    with pytest.raises(WorkerDied, match="gone"):
        worker.call("echo", [1])


@pytest.mark.parametrize("level", [SandboxLevel.PROCESS, SandboxLevel.BUBBLEWRAP])
@pytest.mark.parametrize("body", ["return 1", "while True: pass"])
def test_a_worker_ends_with_the_process_that_started_it(level, body):
    """Also amid a call that loops, where it reads no pipe."""
    code = (
        "import os, signal, sys, threading, time\nfrom environments.sandbox.workers import SandboxLevel, Worker\n"
        f"w = Worker('def f():\\n    {body}', SandboxLevel({str(level)!r}))\nprint(w.pid, flush=True)\n"
        "threading.Thread(target=w.call, args=['f']).start()\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    deadline = time.monotonic() + 3
    pid = int(done.stdout)
    while psutil.pid_exists(pid) and runs(psutil.Process(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or not runs(psutil.Process(pid))


def test_the_level_is_chosen_refused_and_warned_about(monkeypatch, caplog):
    monkeypatch.delenv("TRACE_SANDBOX", raising=False)
    monkeypatch.delenv("TRACE_SANDBOX_IMAGE", raising=False)
    assert choose_level() is SandboxLevel.BUBBLEWRAP
    assert choose_level().isolated
    with pytest.raises(ConfigurationError, match="'none'"):
        choose_level("none")
    with pytest.raises(SandboxError, match="TRACE_SANDBOX_IMAGE"):
        choose_level("container")
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("TRACE_SANDBOX", "process")
        assert not choose_level().isolated
    assert "without namespaces" in caplog.text


def test_without_any_sandbox_it_refuses(monkeypatch):
    monkeypatch.delenv("TRACE_SANDBOX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sandbox, "_WORKING", set())
    with pytest.raises(SandboxError, match="Install bubblewrap"):
        Worker(ECHO)


def test_a_probe_that_failed_is_made_again_and_one_that_worked_is_not(monkeypatch):
    made = []

    class Busy(Worker):
        def __init__(self, *given):
            made.append(given)
            if len(made) == 1:
                raise WorkerDied("the call passed its deadline")
            super().__init__(*given)

    monkeypatch.setattr(sandbox, "_WORKING", set())
    monkeypatch.setattr(sandbox, "Worker", Busy)
    with pytest.raises(SandboxError, match="'bubblewrap' does not work here: the call passed its deadline"):
        choose_level("bubblewrap")
    assert [choose_level("bubblewrap") for _ in range(3)] == [SandboxLevel.BUBBLEWRAP] * 3
    assert len(made) == 2
