"""The level `container` against a stand-in for docker's command, which starts the worker as a plain process."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from environments.sandbox.confinement import WORKER
from environments.sandbox.workers import CallKilled, SandboxLevel, SandboxLimits, Worker

MODULE = """
import os
def echo(x): return x
def spin():
    while True: pass
def fork(): return os.fork()
"""
# os.environ has what the interpreter adds for itself, too.
DOCKER = """#!{python} -I
import json, os, sys
with open("/proc/self/environ") as given, open({calls!r}, "a") as stream:
    environment = dict(line.split("=", 1) for line in given.read().split("\\0") if line)
    stream.write(json.dumps([sys.argv[1:], environment]) + "\\n")
if sys.argv[1] == "run":
    os.execv({python!r}, [{python!r}, *sys.argv[sys.argv.index("some-image") + 1 :]])
"""
DAEMON = {
    "DOCKER_HOST": "tcp://elsewhere:2376",
    "DOCKER_CONTEXT": "rootless",
    "CONTAINER_HOST": "unix:///run/podman.sock",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What docker was called with, a line each: arguments and environment."""
    docker, called = tmp_path / "docker", tmp_path / "calls"
    docker.write_text(DOCKER.format(python=sys.executable, calls=str(called)))
    docker.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRACE_SANDBOX_IMAGE", "some-image")
    monkeypatch.setenv("TRACE_CANARY", "secret")
    return called


def runs(pid):
    """Whether it still executes; a dead one may wait for init to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("function", ["echo", "spin"])
def test_what_runs_in_a_container_ends_with_the_process_that_started_it(function, calls):
    """Also amid a call that loops, where it reads no pipe; the runtime learns of no death."""
    code = (
        "import os, psutil, signal, threading, time\n"
        "from environments.sandbox.workers import SandboxLevel, Worker\n"
        f"w = Worker({MODULE!r}, SandboxLevel.CONTAINER)\n"
        "print(w.pid, *(child.pid for child in psutil.Process(w.pid).children()), flush=True)\n"
        f"threading.Thread(target=w.call, args=[{function!r}, [1][:{int(function == 'echo')}]]).start()\n"
        "time.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    pids, deadline = list(map(int, done.stdout.split())), time.monotonic() + 3
    try:
        assert pids, done.stderr
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(runs, pids))
    finally:
        for pid in filter(runs, pids):
            psutil.Process(pid).kill()


def test_docker_is_told_where_its_daemon_is_and_nothing_else_of_the_environment(calls, monkeypatch):
    for name, value in DAEMON.items():
        monkeypatch.setenv(name, value)
    worker = Worker(MODULE, SandboxLevel.CONTAINER)
    assert worker.call("echo", [1]) == 1
    worker.kill()
    (run, of_run), (remove, of_remove) = map(json.loads, calls.read_text().splitlines())
    assert of_run == of_remove == {"PATH": str(calls.parent), **DAEMON}
    assert remove == ["rm", "--force", run[run.index("--name") + 1]]
    # A daemon elsewhere has no file of this machine.
    assert str(WORKER.parent) not in " ".join(run)


def test_a_container_tells_why_it_ended(calls):
    for function, why in (("fork", "killed for a denied system call"), ("spin", "deadline")):
        worker = Worker(MODULE, SandboxLevel.CONTAINER, SandboxLimits(call_seconds=0.3))
        with pytest.raises(CallKilled, match=why):
            worker.call(function)
        assert not worker.alive
