"""A stub that speaks the part of vLLM's HTTP interface that is used, with failures on demand. The real server is in
`tests/integration/test_vllm_*.py`; this stands for what it cannot be made to do at will."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# What the stub's models do to a token's log-probability, where it is not set here by name: the base nothing, an adapter
# a little.
MOVE = 0.05
Moves = dict[str, float]


@dataclass
class Stub:
    """State of the stub. `failures` are statuses that the next completions get first; `delay` is seconds an answer.
    While `stalled` is set, completions get no answer. `tokens` is what /metrics count; None: there are none. `scorer`
    gives a model's log-probabilities of the token after a prompt, in the place of `logprob`. Of models in `torn` it
    cannot say any: 500, as JSON has no NaN. `cards` are what it lists as models, in the place of those that it has."""

    url: str = ""
    names: set[str] = field(default_factory=set)
    moves: Moves = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    failures: list[int] = field(default_factory=list)
    delay: float = 0.0
    raw_logprobs: bool = False
    no_logprobs: bool = False
    answers_as: str = ""
    loading: bool = True
    key: str = ""
    context: int = 64
    weights: str = ""
    cards: Any = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    sleeps: bool = True
    asleep: bool = False
    gone: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)
    tokens: int | None = 0
    busy: int = 0
    busiest: int = 0
    scorer: Callable[[list[int], str], Sequence[float]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def logprob(token: int, move: float) -> float:
    """The stub's log-probability of a token; alternate tokens are moved up and down."""
    return -0.5 - 0.01 * (token % 7) + (move if token % 2 else -move)


def completion(
    body: dict[str, Any],
    move: float = 0.0,
    raw: bool = False,
    scorer: Callable[[list[int], str], Sequence[float]] | None = None,
) -> dict[str, Any]:
    """The answer to a completion, which prompt and seed decide alone; `raw` log-probabilities know no temperature."""
    prompt: Any = body["prompt"]
    choice: dict[str, Any] = {"finish_reason": "length"}
    if "logprob_token_ids" in body:
        choices = []
        for index, beginning in enumerate(prompt):
            seen = scorer(beginning, body["model"]) if scorer else None
            figures = {t: logprob(t, move) if seen is None else float(seen[t]) for t in body["logprob_token_ids"]}
            tops = [{f"token_id:{t}": value for t, value in figures.items()}]
            choices.append(choice | {"index": index, "logprobs": {"top_logprobs": tops}})
        return {"model": body["model"], "choices": choices}
    if body.get("return_token_ids"):
        ids = sampled(prompt, body.get("seed", 0), body["max_tokens"])
        choice |= {"token_ids": ids, "logprobs": {"token_logprobs": [logprob(t, move) for t in ids]}}
    elif "logprobs" in body:
        choice["logprobs"] = {"top_logprobs": [{"a": -1.0 if raw else -1.0 * body["temperature"]}]}
    return {"model": body["model"], "choices": [choice]}


def sampled(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The ids that every stub samples."""
    return [(sum(prompt) + i + seed) % 50 for i in range(count)]


class _Handler(BaseHTTPRequestHandler):
    stub: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "code": status}})

    def do_GET(self) -> None:
        if self.stub.key and self.headers.get("Authorization") != f"Bearer {self.stub.key}":
            return self._refuse(401, "Unauthorized")
        if self.path == "/is_sleeping":
            if not self.stub.sleeps:
                return self._refuse(404, "Not Found")
            return self._answer(200, {"is_sleeping": self.stub.asleep})
        if self.path == "/metrics":
            return self._metrics()
        cards = [{"id": "base", "parent": None, "max_model_len": self.stub.context}]
        if self.stub.weights:
            cards.append({"id": f"weights-{self.stub.weights}", "parent": None, "max_model_len": self.stub.context})
        cards += [{"id": n, "parent": "base", "max_model_len": None} for n in sorted(self.stub.names)]
        return self._answer(200, {"data": cards if self.stub.cards == () else self.stub.cards})

    def _metrics(self) -> None:
        if self.stub.tokens is None:
            return self._refuse(404, "Not Found")
        text = f"# HELP vllm:x\nvllm:generation_tokens_total{{engine='0'}} {self.stub.tokens}.0\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None

    def do_POST(self) -> None:
        stub = self.stub
        if stub.gone:  # a connection that is still open dies with its server
            self.close_connection = True
            return None
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        with stub.lock:
            stub.calls.append(self.path)
        if self.path in ("/sleep?level=1", "/wake_up"):
            stub.asleep = self.path != "/wake_up"
            return self._answer(200, {})
        if stub.asleep:  # a request would hang, or be answered from memory that is not there
            return self._refuse(400, "asleep")
        if self.path == "/v1/load_lora_adapter":
            return self._load(body)
        if self.path == "/v1/unload_lora_adapter":
            found = body["lora_name"] in stub.names
            stub.names.discard(body["lora_name"])
            return self._answer(200, "ok") if found else self._refuse(404, "no such adapter")
        with stub.lock:
            failure = stub.failures.pop(0) if stub.failures else 0
            stub.busy += 1
            stub.busiest = max(stub.busiest, stub.busy)
        try:
            time.sleep(stub.delay)
            while stub.stalled.is_set() and not stub.gone:
                time.sleep(0.01)
            if failure == -1:  # break off without an answer
                self.close_connection = True
                return None
            if failure:
                return self._refuse(failure, "stub was told to fail")
            return self._complete(body)
        finally:
            with stub.lock:
                stub.busy -= 1

    def _load(self, body: dict[str, Any]) -> None:
        stub, name = self.stub, body["lora_name"]
        if not stub.loading:
            return self._answer(404, {"detail": "Not Found"})
        if not Path(body["lora_path"]).is_dir():
            return self._refuse(404, f"no adapter at {body['lora_path']}")
        if name in stub.names:
            return self._refuse(400, "already been loaded")
        stub.names.add(name)
        return self._answer(200, "ok")

    def _complete(self, body: dict[str, Any]) -> None:
        stub, model = self.stub, body["model"]
        if model != "base" and model not in stub.names:
            return self._refuse(404, f"The model `{model}` does not exist.")
        if model in stub.torn:
            return self._refuse(500, "Out of range float values are not JSON compliant: nan")
        with stub.lock:
            stub.bodies.append(body)
        move = stub.moves.get(model, 0.0 if model == "base" else MOVE)
        with stub.lock:
            stub.tokens = None if stub.tokens is None else stub.tokens + 1
        answer = completion(body, move, stub.raw_logprobs, stub.scorer)
        if stub.no_logprobs:  # of a server that is not vLLM
            answer["choices"] = [choice | {"logprobs": None} for choice in answer["choices"]]
        return self._answer(200, answer | {"model": stub.answers_as or model})


@contextmanager
def vllm_stub(port: int = 0) -> Iterator[Stub]:
    """A running stub on a free port."""
    stub = Stub()
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.gone = True
        server.shutdown()
        server.server_close()
        thread.join()
