"""One vLLM server as a client sees it: which models it has, completions on token ids, scores, loading of adapters.

Failures are distinguished by what helps against them: no server (`ServerAway`), a name that the server does not have
(`ModelMissing`), a busy or broken server (`ProviderError`, transient, after retries), a request that cannot work
(`PolicyError`, `ContextOverflow`), an adapter that has come apart (`NotFinite`), a server that is
set up otherwise (`ConfigurationError`). What its answers say is read in `models/vllm/answers.py`.

The server: vLLM 0.32 or later, started with `--enable-lora --logprobs-mode processed_logprobs` and, for loading,
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` in its environment. Its loading endpoints are for administrators: keep it where
only this project reaches it.
"""

from __future__ import annotations

import base64
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from errors import AdapterError, ConfigurationError, PolicyError, ProviderError
from models.policy import Request
from models.vllm.answers import (
    CANNOT_SAY,
    Completion,
    ModelMissing,
    ServerAway,
    ServerFailed,
    ServerSilent,
    come_apart,
    figure,
    read_choices,
    read_completion,
    read_document,
    refusal,
)

logger = logging.getLogger("trace.models")

CONNECT_SECONDS = 5.0
# Waits before another try, in seconds: a server that restarts needs the longer ones.
WAITS = (0.2, 0.5, 1.0, 2.0, 4.0)
# The second name of a base that docker/vllm/start.sh started: the revision of the weights that the server read.
WEIGHTS = "weights-"
COMPLETIONS = "/v1/completions"
EXAMPLE = "http://127.0.0.1:8000"
# What a completion is asked with, so that ids and log-probabilities come back.
EXACT = {"logprobs": 0, "return_token_ids": True}
# Of /metrics: together they grow as long as the engine works on anything.
_COUNTED = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True)
class ServedModel:
    """A line of `/v1/models`. `parent` is the base of an adapter, else empty; `context` in tokens, 0 if not told."""

    name: str
    parent: str
    context: int


def address_of(url: str, api_key: str = "") -> tuple[str, dict[str, str]]:
    """A server's address as it may be told to anybody, without the name and password that may stand in it and without
    `/v1`; and the header that it is asked with. Logs, errors and pages name addresses. Raises `ConfigurationError`
    where it is no address."""
    try:
        parts = urlsplit(url.strip().rstrip("/").removesuffix("/v1"))
    except ValueError as problem:  # it may hold a password, so it is not repeated
        raise ConfigurationError(f"a server address is none ({problem}); give one such as {EXAMPLE}") from None
    login, _, host = parts.netloc.rpartition("@")
    sent = f"Bearer {api_key}" if api_key else ""
    if login:
        sent = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
    return parts._replace(netloc=host).geturl(), {"Authorization": sent} if sent else {}


def body_of(request: Request, model: str, stop_ids: Collection[int]) -> dict[str, Any]:
    """A turn as a server is asked for it, by rounds and by the gateway alike: all that decides how it is sampled."""
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # Our own stop ids and no others end a turn; they are part of the answer.
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,
    }


class VllmServer:
    """Thread-safe. `url` is the server's address with or without `/v1`; `model` the name its base is served under;
    `connections` bounds how many requests are open; `seconds` is the longest wait for one answer."""

    def __init__(self, url: str, model: str, api_key: str = "", connections: int = 64, seconds: float = 300.0) -> None:
        self.url, self.headers = address_of(url, api_key)
        self.model = model
        if not self.url.startswith(("http://", "https://")):
            shown = self.url.rpartition("@")[2]
            raise ConfigurationError(f"server address {shown!r} is not http(s); give one such as {EXAMPLE}")
        self.seconds, self._given, self._api_key = seconds, url, api_key
        self._client = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,  # a proxy in the environment is for the outside
        )
        self._closed = threading.Event()

    def limited(self, seconds: float) -> VllmServer:
        """A client of the same server that waits at most `seconds` for an answer."""
        return VllmServer(self._given, self.model, self._api_key, 2, min(seconds, self.seconds))

    def away(self, said: str) -> ServerAway:
        """The error for an address at which nobody is."""
        return ServerAway(f"no vLLM server answers at {self.url} ({said}); start it or set policy.url", transient=True)

    def refusal(self, path: str, status: int, text: str) -> PolicyError | ConfigurationError:
        """The error for an answer other than 200; `text` is its body, which may quote what it was asked with."""
        sent = self.headers.get("Authorization", "").partition(" ")[2]
        for secret in filter(None, (sent, unquote(urlsplit(self._given).password or ""))):
            text = text.replace(secret, "***")
        return refusal(f"{self.url}{path}", status, text)

    def close(self) -> None:
        """Close connections; requests that wait for another try give up."""
        self._closed.set()
        self._client.close()

    # --- asking -----------------------------------------------------------------------------------------------

    def models(self, waits: Sequence[float] = ()) -> dict[str, ServedModel]:
        """Everything that the server answers as, by name. Raises `ConfigurationError` for a list that vLLM does not
        give."""
        cards = self._send("GET", "/v1/models", None, waits).get("data", [])
        try:
            found = [
                ServedModel(str(c["id"]), str(c.get("parent") or ""), int(c.get("max_model_len") or 0)) for c in cards
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigurationError(
                f"{self.url}/v1/models gives {cards!r:.80} as data, not models with an id ({problem!r}); a vLLM server "
                "is needed"
            ) from problem
        return {m.name: m for m in found}

    def check(self) -> int:
        """The base's context in tokens, after proving that the server is there, has the base, samples as needed and
        returns token ids. Raises `ServerAway` or `ConfigurationError`."""
        served = self.models(WAITS[:2])
        if self.model not in served:
            raise ConfigurationError(
                f"{self.url} does not serve {self.model!r} but {', '.join(sorted(served)) or 'nothing'}; set "
                "policy.model, or start the server with --served-model-name"
            )
        tops = [self._top_logprob(temperature) for temperature in (1.0, 0.5)]
        if abs(tops[0] - tops[1]) < 1e-4:
            raise ConfigurationError(
                f"{self.url} returns log-probabilities that do not follow the temperature; start it with "
                "--logprobs-mode processed_logprobs (importance ratios need those of the distribution sampled from)"
            )
        return served[self.model].context

    def check_weights(self, revision: str) -> None:
        """Compare the weights that the server says it has with the `revision` of those in this process; a warning where
        it says nothing. Raises `ConfigurationError` for others."""
        names = [m.name for m in self.models(WAITS[:2]).values() if not m.parent and m.name.startswith(WEIGHTS)]
        if WEIGHTS + revision in names:
            return
        if names:
            raise ConfigurationError(
                f"{self.url} has the {names[0]}, and this process has {WEIGHTS}{revision}: two models. Write one to a "
                "folder ('trace-agent export-model FOLDER') that both read, here as base_model"
            )
        logger.warning(
            "%s does not say which weights it has, so they are not compared with those here; start it with "
            "docker/vllm/start.sh, or serve it under the name %s%s too",
            self.url,
            WEIGHTS,
            revision,
        )

    def tokens_done(self) -> float | None:
        """Tokens that the server has read and sampled since its start; None where its /metrics do not say."""
        try:
            text = str(self._send("GET", "/metrics", None, ()).get("text", ""))
        except ModelMissing:
            return None
        figures = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(_COUNTED)]
        return sum(map(float, figures)) if figures else None

    def _top_logprob(self, temperature: float) -> float:
        body = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": temperature, "top_p": 1.0}
        choice = self._choice(body | {"top_k": 0, "min_p": 0.0, "logprobs": 1, "seed": 0})
        try:
            return max(map(float, choice["logprobs"]["top_logprobs"][0].values()))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigurationError(
                f"{self.url} gives no log-probabilities ({problem!r}); a vLLM server of version 0.32 or later is needed"
            ) from problem

    def complete(self, body: Mapping[str, Any]) -> Completion:
        """Sample one completion; `body` as for `/v1/completions`, its `prompt` token ids. Transient failures are tried
        again."""
        return read_completion(self.url, body["model"], self._send("POST", COMPLETIONS, {**body, **EXACT}, WAITS))

    def score(self, ids: Sequence[int], count: int, model: str | None = None) -> list[float]:
        """Log-probabilities (nats, temperature 1) of the last `count` (fewer than all) of `ids`, each given what stands
        before it. Raises `NotFinite` for an adapter that has come apart: vLLM answers 500, for JSON has no NaN, but
        answers for the base that it stands on."""
        of_base = model in (None, self.model)
        try:
            found = self._scored(ids, count, model, WAITS)
        except ServerFailed as failed:
            if of_base or failed.status != CANNOT_SAY:
                raise
            self._scored(ids, count, None, WAITS)  # raises where it is the server that fails
            try:
                return self._scored(ids, count, model, ())
            except ServerFailed as again:
                raise come_apart(self.url, str(model), f"which answers for its base, and here: {again}") from again
        if not of_base and not all(map(math.isfinite, found)):
            raise come_apart(self.url, str(model), f"log-probabilities {found}")
        return found

    def _scored(self, ids: Sequence[int], count: int, model: str | None, waits: Sequence[float]) -> list[float]:
        # One token is sampled after each beginning, and the wanted one's figure listed with it. `prompt_logprobs` would
        # take one prompt, but it ends the engine of vLLM 0.32 for CPUs when LoRA is on and others are in the batch.
        wanted = list(ids[len(ids) - count :])
        beginnings = [list(ids[:end]) for end in range(len(ids) - count, len(ids))]
        body = {"model": model or self.model, "prompt": beginnings, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}
        body |= {"top_k": 0, "min_p": 0.0, "seed": 0, "logprobs": 0, "return_tokens_as_token_ids": True}
        choices = self._choices(body | {"logprob_token_ids": sorted(set(wanted))}, count, waits)
        try:
            listed = [choice["logprobs"]["top_logprobs"][0] for choice in sorted(choices, key=itemgetter("index"))]
            return [figure(figures[f"token_id:{token}"]) for token, figures in zip(wanted, listed, strict=True)]
        except (KeyError, IndexError, TypeError) as problem:
            raise PolicyError(
                f"{self.url} did not give the log-probabilities that it was asked for ({problem!r}); a vLLM server of "
                "version 0.32 or later is needed"
            ) from problem

    def _choice(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._choices(body, 1, WAITS)[0]

    def _choices(self, body: Mapping[str, Any], count: int, waits: Sequence[float]) -> list[dict[str, Any]]:
        return read_choices(self.url, body["model"], count, self._send("POST", COMPLETIONS, body, waits))

    # --- adapters ---------------------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Load an adapter under a name that was never used. `path` is the folder as the server sees it. That the name
        is loaded already counts as done: names are never reused. Raises `AdapterError` when the server refuses it."""
        body = {"lora_name": name, "lora_path": path}
        try:
            self._send("POST", "/v1/load_lora_adapter", body, WAITS[:3], final=500)
        except ModelMissing as problem:
            if name in self.models():
                return
            if "Not Found" in str(problem) and path not in str(problem):
                raise ConfigurationError(
                    f"{self.url} loads no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from problem
            raise AdapterError(
                f"{self.url} does not find adapter {name!r} at {path}; set policy.lora_folder to a folder that the "
                "server sees too (policy.server_folder when it sees it elsewhere)"
            ) from problem
        except PolicyError as problem:
            # 500 is how the engine says that the files do not fit it.
            broken = isinstance(problem, ServerFailed) and problem.status == 500
            if isinstance(problem, ProviderError) and problem.transient and not broken:
                raise
            if name not in self.models():
                raise AdapterError(f"{self.url} refuses adapter {name!r}: {problem}") from problem

    def unload(self, name: str) -> bool:
        """Take the name away; False if the server did not have it."""
        try:
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, WAITS[:3])
        except (ModelMissing, PolicyError) as problem:
            if isinstance(problem, ProviderError) and problem.transient:
                raise
            if name in self.models():
                raise
            return False
        return True

    # --- sleep ------------------------------------------------------------------------------------------------

    def rouse(self) -> None:
        """Wake a server that was left asleep: what put it to sleep was killed. Raises `ConfigurationError` for a server
        that cannot sleep at all."""
        try:
            asleep = self._send("GET", "/is_sleeping", None, WAITS[:2]).get("is_sleeping")
        except ModelMissing as problem:
            raise ConfigurationError(
                f"devices.sleep is on and {self.url} cannot sleep; start it with --enable-sleep-mode and "
                "VLLM_SERVER_DEV_MODE=1 where only this project reaches it, or switch devices.sleep off and give "
                "sampling and training GPUs of their own"
            ) from problem
        if asleep:
            logger.warning("%s is asleep, as a training that was killed leaves it; it is woken", self.url)
            self.wake_up()

    def asleep(self) -> bool:
        """Whether the server says that it sleeps; False too where it cannot, or does not say."""
        try:
            return bool(self._send("GET", "/is_sleeping", None, ()).get("is_sleeping"))
        except PolicyError:
            return False

    def sleep(self) -> None:
        """Give the GPU's memory back: weights wait in the machine's, what was cached is forgotten."""
        self._send("POST", "/sleep?level=1", None, WAITS[:3])

    def wake_up(self) -> None:
        """Take the memory again; turns may follow."""
        self._send("POST", "/wake_up", None, WAITS[:3])

    # --- transport --------------------------------------------------------------------------------------------

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, waits: Sequence[float], final: int = 0
    ) -> dict[str, Any]:
        """One request, tried again after each of `waits` while its failure is transient and its status not `final`."""
        for wait in (*waits, None):
            try:
                return self._once(method, path, body)
            except ProviderError as problem:
                ended = isinstance(problem, ServerFailed) and problem.status == final
                # Whoever was silent for the longest wait is not waited for as long again.
                ended = ended or isinstance(problem, ServerSilent)
                if ended or not problem.transient or wait is None or self._closed.is_set():
                    raise
                logger.warning("%s; trying again in %.1f s", problem, wait)
                self._closed.wait(wait)
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            response = self._client.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
            raise self.away(str(problem) or type(problem).__name__) from problem
        except httpx.TransportError as problem:
            seconds = time.perf_counter() - began
            kind = ServerSilent if isinstance(problem, httpx.ReadTimeout) else ProviderError
            raise kind(
                f"{self.url}{path} broke off after {seconds:.1f} s ({type(problem).__name__}: {problem}); look at the "
                "server's log",
                transient=True,
            ) from problem
        except RuntimeError as problem:  # httpx: the client was closed under a waiting thread
            raise ProviderError(
                f"the connection to {self.url} was closed: {problem}; open the policy again"
            ) from problem
        if response.status_code == 200:
            return _document(response)
        raise self.refusal(path, response.status_code, response.text)


def _document(response: httpx.Response) -> dict[str, Any]:
    """The answer as JSON; loading endpoints answer in plain text."""
    if "json" not in response.headers.get("content-type", ""):
        return {"text": response.text}
    return read_document(str(response.url), response.content)
