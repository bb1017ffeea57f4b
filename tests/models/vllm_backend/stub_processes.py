"""Stub servers in processes of their own, fast enough for a thousand turns a second, to be killed and stopped.

    python -m tests.models.vllm_backend.stub_processes PORT SECONDS SLOTS

`SECONDS` is how long each answer takes, `SLOTS` how many are made at once; others wait for their turn. Answers are
those of `vllm_stub`. Little is imported: four of them start in a moment.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from tests.models.vllm_backend.vllm_stub import MOVE, completion

ROOT = Path(__file__).parents[3]


class _Server(asyncio.Protocol):
    """One connection. Of all connections: `free` is when each slot is, `names` are the adapters, `tokens` a count."""

    seconds = 0.0
    free: list[float] = []  # noqa: RUF012
    names: set[str] = set()  # noqa: RUF012
    tokens = 0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.rest = transport, b""

    def data_received(self, data: bytes) -> Any:
        self.rest += data
        head, ended, body = self.rest.partition(b"\r\n\r\n")
        if not ended:
            return None
        _, named, length = head.lower().partition(b"content-length:")
        size = int(length.split(b"\r\n", 1)[0]) if named else 0
        if len(body) < size:
            return None
        self.rest = body[size:]
        answer = self._answer(head.split(b" ", 2)[1].decode(), body[:size])
        if not size:
            return self.transport.write(answer)
        loop = asyncio.get_running_loop()
        done = max(loop.time(), self.free[0]) + self.seconds
        heapq.heapreplace(self.free, done)
        return loop.call_at(done, self.transport.write, answer)

    def _answer(self, path: str, content: bytes) -> bytes:
        kind, status = b"application/json", b"200 OK"
        body: Any = json.loads(content) if content else {}
        if path == "/metrics":
            kind, text = b"text/plain", f"vllm:generation_tokens_total {_Server.tokens}\n".encode()
        else:
            found = self._reply(path, body)
            status = status if found is not None else b"404 Not Found"
            text = json.dumps(found if found is not None else {"error": {"message": "no such model"}}).encode()
        return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, kind, len(text), text)

    def _reply(self, path: str, body: dict[str, Any]) -> Any:
        names = self.names
        if path == "/v1/models":
            return {"data": [{"id": "base", "max_model_len": 4096}, *({"id": n, "parent": "base"} for n in names)]}
        if path.endswith("lora_adapter"):
            (names.add if path == "/v1/load_lora_adapter" else names.discard)(body["lora_name"])
            return "ok"
        if body["model"] not in {"base", *names}:
            return None
        _Server.tokens += int(body["max_tokens"])
        return completion(body, 0.0 if body["model"] == "base" else MOVE)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


@dataclass
class StubProcess:
    """A running stub; `kill` and `stall` are what happens to machines, `go_on` ends a stall."""

    port: int
    seconds: float
    slots: int
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", __name__, str(self.port), str(self.seconds), str(self.slots)]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < until, "the stub did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stall(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def stub_processes(count: int, seconds: float = 0.0, slots: int = 64) -> Iterator[list[StubProcess]]:
    """Stubs that answer; gone afterwards, whatever happened to them."""
    stubs = [StubProcess(_free_port(), seconds, slots) for _ in range(count)]
    try:
        for stub in stubs:
            stub.start()
        for stub in stubs:
            stub.wait()
        yield stubs
    finally:
        for stub in stubs:
            if hasattr(stub, "process"):
                stub.kill()


if __name__ == "__main__":
    _Server.seconds, _Server.free = float(sys.argv[2]), [0.0] * int(sys.argv[3])
    uvloop.run(_serve(int(sys.argv[1])))
