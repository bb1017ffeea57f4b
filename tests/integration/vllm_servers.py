"""A real vLLM server for tests: the CPU build in its own virtual environment, on the embedded model or another; and
what tests of one share."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.fingerprint import TAG, take_fingerprint
from models.adapters.registry import Registry
from models.local.base import embedded_folder
from models.local.dtypes import fast_dtype
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.lifecycle import ServedAdapter
from models.serving.fleet.releases import Generation, ServedRelease
from models.vllm.server import VllmServer
from tests.integration.servers import clean_environment, free_port, status

PYTHON = Path(os.environ.get("TRACE_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
MISSING = f"vLLM is not installed in {PYTHON.parents[1].name}: run 'make install-vllm'"
PLUGIN = Path(__file__).parents[2] / "docker" / "vllm_cpu"
START = Path(__file__).parents[2] / "docker" / "vllm" / "start.sh"
MAX_RANK, CONTEXT = 16, 1024
# That of the local backend, so that the two can be compared closely.
DTYPE = str(fast_dtype()).removeprefix("torch.")


def installed() -> bool:
    """Whether the virtual environment is complete (the marker is written last)."""
    return PYTHON.is_file() and ((PYTHON.parents[1] / ".installed").is_file() or "TRACE_VLLM_PYTHON" in os.environ)


@dataclass
class Server:
    """A server that can be stopped and started again on the same port."""

    log: Path
    max_loras: int = 4
    model: Path | None = None  # the embedded one
    dtype: str = DTYPE
    options: tuple[str, ...] = ()  # further ones of vLLM's command line
    # One, as the tests beside it have: threads that do not all have a core wait for one another by spinning.
    threads: int = 1
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, seconds: float = 400) -> None:
        """Start and wait until it is healthy; an error with the end of its log when it is not."""
        given = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        given |= {"OMP_NUM_THREADS": str(self.threads)}
        given |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        # With one thread the engine computes in its own process. vLLM would start a third for the sake of more threads,
        # and each imports everything anew, one after the other.
        alone = self.threads == 1
        given |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if alone else {}
        # The plugin of this checkout goes before the one that was installed with vLLM.
        given |= {"PYTHON": str(PYTHON), "PYTHONPATH": str(PLUGIN)}
        # As the container starts it, so that its weights are compared.
        command = ["sh", str(START), str(self.model or embedded_folder()), "--dtype", self.dtype]
        command += ["--max-model-len", str(CONTEXT), *self.options]
        command += [
            "--enable-lora",
            "--max-loras",
            str(self.max_loras),
            "--max-cpu-loras",
            "16",
            "--max-lora-rank",
            str(MAX_RANK),
        ]
        command += ["--distributed-executor-backend", "uni"] if alone else []
        command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--max-num-seqs", "32"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=clean_environment(**given),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + seconds
        while status(f"{self.url}/health") != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"vLLM did not start within {seconds:.0f} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End the server and the engine process that it started."""
        if self.process is None:
            return
        for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                if sign == signal.SIGKILL:
                    break
        self.process = None


def _end_with_parent() -> None:
    """In the server's process before it begins: a test run that is killed takes the server with it (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


@contextmanager
def vllm_server(
    folder: Path,
    max_loras: int = 4,
    model: Path | None = None,
    dtype: str = DTYPE,
    options: tuple[str, ...] = (),
    threads: int = 1,
) -> Iterator[Server]:
    """A healthy server; its process group is gone afterwards, whatever happens."""
    server = Server(folder / "vllm.log", max_loras, model, dtype, options, threads)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def adapters_on(server: VllmServer) -> set[str]:
    """The names of a server's adapters: what has a base it belongs to."""
    return {name for name, model in server.models().items() if model.parent}


@dataclass
class World:
    """Everything that the tests share: the local model, the registry, a fleet on the server."""

    local: Any
    renderer: Any
    text: list[int]
    server: VllmServer
    registry: Registry
    run: str
    fleet: Fleet = field(init=False)
    wanted: ServedRelease | None = None

    def live(self) -> ServedRelease | None:
        """What the fleet is to serve."""
        return self.wanted

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        return self.registry.versions(capability)

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        return self.registry.download(adapter, destination)

    def release(self, *adapters: RegisteredAdapter, follow: bool = False) -> list[str]:
        """Another release is live; the next reconciliation, or what a gateway does in between (`follow`)."""
        number = self.wanted.number + 1 if self.wanted else 1
        self.wanted = ServedRelease(number, {a.capability: a for a in adapters})
        return self.fleet.follow() if follow else self.fleet.reconcile()

    def take(self, capability: str) -> tuple[Generation, ServedAdapter | None]:
        """What a request does."""
        generation = self.fleet.enter()
        return generation, self.fleet.acquire(generation, capability)

    def answers(self, capability: str) -> ServedAdapter | None:
        """Who answers a request now."""
        generation, served = self.take(capability)
        self.fleet.leave(generation, served.name if served else "")
        return served

    def register(self, capability: str, folder: Path, like: Path | None = None, **tags: str) -> RegisteredAdapter:
        """Register `folder` with the fingerprint of `like`, which is itself if not given."""
        self.local.load_adapter("taken", "taken", like or folder)
        try:
            taken = take_fingerprint(self.local, self.text, "taken")
        finally:
            self.local.unload_adapter("taken")
        base = self.local.identity()
        record = AdapterRecord(capability, base.base, base.revision, "round", {}, {TAG: taken.text()} | tags)
        return self.registry.register(record, folder, self.run)
