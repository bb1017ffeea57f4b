"""What `benchmarks.month` runs a month on, and breaks: PostgreSQL, a disk, a webhook's receiver, `trace-agent up`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from benchmarks.month_target import target
from flows.services import connect, pids
from tests.integration.servers import clean_environment, free_port
from tests.tokenizers_trained import chatml_tokenizer, tiny_policy

ROOT = Path(__file__).parents[1]
TRACE = [sys.executable, "-m", "flows.cli.main"]
HOOK = "MONTH_HOOK"
SECONDS_TO_START = 300.0
MIB = 2**20
# A round that does all there is to do in some fifteen seconds of a processor: two adapters, a gate that can decide.
ROUND = {
    "profile": "smoke", "target": target.name, "dtype": "float32",
    "rollout": {"max_tokens": 6, "temperature": 1.0, "tasks": 0},
    "selection": {"most": 2, "delta": 0.1},
    "calibration": {"seeds": 4, "samples": 6, "uniform": 1.0, "low": 0.0, "high": 1.0, "informative": 0.1},
    "train": {
        "groups": 2, "group_size": 16, "rank": 8, "alpha": 16, "upper_layers": 3, "temperature": 1.0, "steps": 12,
        "learning_rate": 0.05,
    },
    "evaluation": {"validation_trials": 2, "fresh": 16},
}  # fmt: skip


def make_model(folder: Path) -> Path:
    """A random model of three layers, as a folder with safetensors."""
    tokenizer = chatml_tokenizer()
    policy, _ = tiny_policy(tokenizer)
    policy.model.config._attn_implementation = "eager"
    policy.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Disk:
    """A file system of so many MiB in memory, which can be filled and emptied. Needs the right to mount."""

    def __init__(self, folder: Path, mib: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self._ballast = folder, folder / "ballast"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "trace-month", str(folder)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * MIB)
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=False)


class Receiver:
    """A webhook's receiver that keeps what it took, and can be down."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/notices"
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.taken.append(body | {"key": self.headers["Idempotency-Key"]})
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Deployment:
    """All services of a home, as `trace-agent up` runs them, with a store in PostgreSQL."""

    def __init__(self, folder: Path, home: Path, database: str, hook: str) -> None:
        self.home, self.ports = home, {name: free_port() for name in ("prefect", "mlflow", "gateway", "worker")}
        self._log = folder / "up.log"
        settings = dict(_variables("TRACE", ROUND | {"base_model": str(make_model(folder / "model"))}))
        self.environment = clean_environment(
            **settings,
            **{HOOK: hook},
            PYTHONPATH=str(ROOT),
            PREFECT_WORKER_QUERY_SECONDS="2",
            TRACE_HOME=str(home),
            TRACE_DATABASE=database,
            TRACE_UNATTENDED__WEBHOOK_VARIABLE=HOOK,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds until all were healthy, as the command says."""
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*TRACE, "up", "--target", target.name, *ports],
                cwd=ROOT, env=self.environment, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + SECONDS_TO_START
        while not (found := re.search(r"all healthy after (\d+) s", self.said())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"'trace-agent up' did not come up: {self.said()[-3000:]}")
            time.sleep(0.5)
        return float(found[1])

    def said(self) -> str:
        """What `trace-agent up` has printed."""
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """As Ctrl-C does, which a shell has its background jobs ignore; its exit status."""
        if self._process is None:
            return 0
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(180)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return -9

    def trace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of `trace-agent` on the home."""
        return subprocess.run(
            [*TRACE, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )

    def kill_worker(self, with_run: bool) -> None:
        """SIGKILL of the worker's process group. A run has a session of its own: it is left to find out that its worker
        is gone, or, `with_run`, killed too."""
        pid = self._pids()["worker"]
        below = psutil.Process(pid).children(recursive=True)
        os.killpg(pid, signal.SIGKILL)
        for process in below if with_run else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def restart(self, name: str) -> None:
        """Stop a service in order, and start it again."""
        supervisor = connect(self.home / "up" / "s")
        supervisor.stopProcess(name, True)
        supervisor.startProcess(name, False)

    def sizes(self) -> dict[str, tuple[float, int]]:
        """Resident MiB and open files of each service, its children included; nothing of one that is starting."""
        assert self._process is not None
        found = {}
        for name, pid in {**self._pids(), "up": self._process.pid}.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                children = [] if name == "up" else process.children(recursive=True)
                every = [process, *children]
                found[name] = (sum(p.memory_info().rss for p in every) / MIB, sum(p.num_fds() for p in every))
        return found

    def _pids(self) -> Mapping[str, int]:
        return {name: pid for name, pid in pids(connect(self.home / "up" / "s")).items() if pid}

    def prefect(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """An answer of Prefect's API; None while it does not answer."""
        return self._ask(f"http://127.0.0.1:{self.ports['prefect']}/api{path}", body)

    def gateway(self) -> Any:
        """The gateway's status; None while it does not answer."""
        return self._ask(f"http://127.0.0.1:{self.ports['gateway']}/status")

    def _ask(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, OSError, HTTPException, ValueError):
            return None


def _variables(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings as environment variables."""
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _variables(f"{prefix}_{name.upper()}_", value)
        else:
            found.append((f"{prefix}_{name.upper()}", str(value)))
    return found
