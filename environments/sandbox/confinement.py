"""How a sandboxed process is started: the levels, their command lines, and the one thread that starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from environments.sandbox.seccomp import outer_filter
from errors import SandboxError
from settings import machine_settings

WORKER = Path(__file__).with_name("worker_process.py")
# What of this process's environment says where docker's daemon is, or podman's service, and how it is spoken to.
_DAEMON = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH",
    "DOCKER_API_VERSION", "CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY", "XDG_RUNTIME_DIR",
)  # fmt: skip


class SandboxLevel(StrEnum):
    """How a worker is confined; stored with every environment that was validated in it."""

    CONTAINER = "container"
    BUBBLEWRAP = "bubblewrap"
    PROCESS = "process"

    @property
    def isolated(self) -> bool:
        """False where only the system-call filter and limits stand between the module and the host."""
        return self is not SandboxLevel.PROCESS


@dataclass(frozen=True)
class Spawned:
    """A started process with non-blocking pipes, the command that cleans up after it (containers only), and where
    bubblewrap writes which process it made (JSON; None at other levels)."""

    process: subprocess.Popen[bytes]
    cleanup: list[str]
    told: int | None = None


class _Spawner:
    """Starts workers from one thread that lives as long as the process.

    Bubblewrap's --die-with-parent means the *thread* that started it: from a short-lived thread the worker would die
    in the middle of an episode.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._thread, self._lock = None, threading.Lock()

    def run(self, level: SandboxLevel) -> Spawned:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawner")
            return self._thread.submit(_spawn, level).result()


SPAWNER = _Spawner()


def _spawn(level: SandboxLevel) -> Spawned:
    python = [sys.executable, "-I", "-S", "-B", str(WORKER)]
    filter_file, cleanup = None, []
    descriptors: tuple[int, ...] = ()
    told: int | None = None
    if level is SandboxLevel.PROCESS:
        command = python
    elif level is SandboxLevel.CONTAINER:
        name = f"trace-sandbox-{os.getpid()}-{time.monotonic_ns()}"
        command, cleanup = _container_command(name), ["docker", "rm", "--force", name]
    else:
        filter_file = tempfile.TemporaryFile()  # noqa: SIM115 - bubblewrap reads it after this function; closed below
        filter_file.write(outer_filter())
        filter_file.seek(0)
        told, tells = os.pipe()
        command = bubblewrap_command(filter_file.fileno(), tells)
        descriptors = (filter_file.fileno(), tells)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=container_environment() if level is SandboxLevel.CONTAINER else {},
            cwd="/",
            start_new_session=True,
            pass_fds=descriptors,
            bufsize=0,
        )
    except OSError as error:
        if told is not None:
            os.close(told)
        raise SandboxError(f"the sandbox could not be started: {error}") from error
    finally:
        if filter_file is not None:
            filter_file.close()
        for tells in descriptors[1:]:
            os.close(tells)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return Spawned(process, cleanup, told)


def bubblewrap_command(filter_descriptor: int, tells: int | None = None) -> list[str]:
    """The full command line of level 2. Only the interpreter, its standard library and shared libraries are visible.
    `tells` is where bubblewrap writes which process it made."""
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    binds = {"/usr/lib", "/usr/lib64", "/lib", "/lib64"}
    if sys.base_prefix not in ("/usr", "/usr/local"):
        binds.add(os.path.join(sys.base_prefix, "lib"))
    elif sys.base_prefix == "/usr/local":
        binds.add("/usr/local/lib")
    command = ["bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    for path in sorted(binds):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for folder in ("site-packages", "dist-packages"):
        packages = os.path.join(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}), folder)
        if os.path.isdir(packages):
            command += ["--tmpfs", packages]
    command += ["--ro-bind", executable, executable, "--ro-bind", str(WORKER), "/worker.py"]
    command += ["--size", "1048576", "--tmpfs", "/home", "--chdir", "/home", "--remount-ro", "/"]
    command += ["--info-fd", str(tells)] if tells is not None else []
    command += ["--seccomp", str(filter_descriptor), "--", executable, "-I", "-S", "-B", "/worker.py"]
    return command


def made_by_bubblewrap(told: int) -> int | None:
    """The id, on the host, of the process that runs the module, of a bubblewrap whose worker has answered; None where
    it did not say. It is read before the module runs, which could write here, too."""
    os.set_blocking(told, False)
    try:
        found = re.search(rb'"child-pid"\s*:\s*(\d+)\D', os.read(told, 4096))
    except BlockingIOError:
        return None
    return int(found[1]) if found else None


def container_environment() -> dict[str, str]:
    """What docker's command gets of the environment: where to find programs and the daemon, and nothing else."""
    return {name: os.environ[name] for name in ("PATH", *_DAEMON) if name in os.environ}


def _container_command(name: str) -> list[str]:
    """The worker goes along as text: the daemon may be on a machine, or in a container, that has no such file."""
    image = machine_settings().sandbox_image
    command = ["docker", "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"]
    command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", "16", "--memory", "1g"]
    command += ["--user", "65534:65534", "--ipc", "none", "--tmpfs", "/home:size=1m", "--workdir", "/home"]
    command += ["--entrypoint", "python3", image, "-I", "-S", "-B", "-c", WORKER.read_text(encoding="utf-8")]
    return command


def describe_exit(code: int | None) -> str:
    """What an exit status says; bubblewrap reports a signal as 128 + its number."""
    number = -code if code is not None and code < 0 else (code or 0) - 128
    if number == signal.SIGSYS:
        return "killed for a denied system call"
    if number > 0 and number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"it ended with status {code}"
