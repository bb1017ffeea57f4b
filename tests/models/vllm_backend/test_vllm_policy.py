"""The vLLM backend against a stub: what is sent, many in flight, and every way in which a server can fail."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from environments.contract import Observation, TargetTask
from errors import AdapterError, ConfigurationError, ContextOverflow, NotFinite, PolicyError, ProviderError
from models.adapters.files import adapter_digest
from models.policy import PolicyIdentity, Request, Sampling, TokenPolicy
from models.serving.upstreams.contract import Replica
from models.serving.upstreams.pool import Pool, Servers
from models.vllm import policy as vllm_policy
from models.vllm import server as vllm_server
from models.vllm.answers import ModelMissing, ServerAway
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from tests.models.serving.gateway_servers import serving
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub

BASE = PolicyIdentity("small", "r1", "vllm:base", "", "renderer")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with vllm_stub() as running:
        yield running


@pytest.fixture
def policy(stub: Stub) -> Iterator[VllmPolicy]:
    opened = VllmPolicy([VllmServer(stub.url, "base")], BASE, frozenset({7}), 8)
    yield opened
    opened.close()


def turn(session: str = "s", adapter: str | None = None, tokens: int = 3, seed: int = 0) -> Request:
    return Request(session, [1, 2, 3], Sampling(0.7, tokens, seed), adapter)


def test_it_is_a_token_policy_and_sends_every_sampling_setting(stub: Stub, policy: VllmPolicy) -> None:
    assert isinstance(policy, TokenPolicy)
    assert (policy.context, policy.identity()) == (64, BASE)
    (answer,) = policy.generate([turn(seed=11)])
    assert answer.ids == ((1 + 2 + 3 + 11) % 50, 18, 19)
    assert len(answer.logprobs) == 3
    assert answer.finish_reason == "length"
    sent = stub.bodies[-1]
    assert sent["prompt"] == [1, 2, 3]
    assert (sent["temperature"], sent["seed"], sent["stop_token_ids"], sent["ignore_eos"]) == (0.7, 11, [7], True)
    # What generation_config.json could change on the server is said outright.
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)


def test_a_stop_id_ends_a_turn(policy: VllmPolicy) -> None:
    (answer,) = policy.generate([Request("s", [1], Sampling(0.0, 1, 6))])
    assert (answer.ids, answer.finish_reason) == ((7,), "stop")


def test_many_turns_are_in_flight_but_no_more_than_asked_for(stub: Stub, policy: VllmPolicy) -> None:
    stub.delay = 0.05
    answers = policy.generate([turn(f"s{i}", seed=i) for i in range(40)])
    assert [a.session for a in answers] == [f"s{i}" for i in range(40)]
    assert 4 <= stub.busiest <= 8
    assert policy.poll() == []


def test_sessions_keep_to_their_server() -> None:
    with vllm_stub() as one, vllm_stub() as two:
        policy = VllmPolicy([VllmServer(s.url, "base") for s in (one, two)], BASE, frozenset(), 4)
        before = len(one.bodies), len(two.bodies)
        for _ in range(3):
            policy.generate([turn(f"s{i}", seed=i) for i in range(8)])
        seen = [{b["seed"] for b in s.bodies[n:]} for s, n in zip((one, two), before, strict=True)]
        assert seen[0]
        assert seen[1]
        assert not seen[0] & seen[1]
        policy.close()


def test_adapters_are_loaded_by_folder_named_once_and_forgotten(stub: Stub, policy: VllmPolicy, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"'a@v1-1' is not loaded \(loaded: none\)"):
        policy.submit(turn(adapter="a@v1-1"))
    policy.load_adapter("a@v1-1", "abc", tmp_path)
    assert policy.identity("a@v1-1").adapter == "abc"
    policy.generate([turn(adapter="a@v1-1")])
    assert stub.bodies[-1]["model"] == "a@v1-1"
    with pytest.raises(AdapterError, match="was used before"):
        policy.load_adapter("a@v1-1", "abc", tmp_path)
    policy.unload_adapter("a@v1-1")
    assert stub.names == set()
    with pytest.raises(AdapterError, match="lora_folder"):
        policy.load_adapter("a@v2-1", "abc", tmp_path / "nowhere")
    stub.loading = False
    with pytest.raises(ConfigurationError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        policy.load_adapter("a@v3-1", "abc", tmp_path)


def test_an_adapter_that_the_server_lost_is_loaded_again(stub: Stub, policy: VllmPolicy, tmp_path: Path) -> None:
    policy.load_adapter("a@v1-1", "abc", tmp_path)
    stub.names.clear()
    answers = policy.generate([turn(f"s{i}", "a@v1-1") for i in range(6)])
    assert all(a.ids for a in answers)
    assert stub.names == {"a@v1-1"}


def test_servers_seeing_the_folder_elsewhere(stub: Stub, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "one").mkdir(parents=True)
    policy = VllmPolicy([VllmServer(stub.url, "base")], BASE, frozenset(), 1, tmp_path / "ours", str(theirs))
    policy.load_adapter("a@v1-1", "abc", tmp_path / "ours" / "one")
    assert stub.names == {"a@v1-1"}
    policy.close()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """An adapter's folder, outside of what servers see."""
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}), encoding="utf-8")
    save_file({"q.lora_A.weight": np.zeros((4, 8), np.float32)}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def sharing(stub: Stub, tmp_path: Path) -> Iterator[VllmPolicy]:
    """A policy whose servers read adapters in a folder of their own."""
    (tmp_path / "shared").mkdir()
    opened = VllmPolicy([VllmServer(stub.url, "base")], BASE, frozenset(), 1, tmp_path / "shared")
    yield opened
    opened.close()


def test_a_copy_that_is_used_again_is_as_new(sharing: VllmPolicy, trained: Path) -> None:
    """Else it would be removed with what nothing has needed for a month."""
    copy = sharing._shared("a@r1-1", trained)
    os.utime(copy, (0, 0))
    assert sharing._shared("a@r1-1", trained) == copy
    assert copy.stat().st_mtime > 0


def test_a_copy_that_was_cut_off_is_made_again(
    sharing: VllmPolicy, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vllm_policy.export_adapter

    def full(source: Path, part: Path) -> Path:
        real(source, part)
        raise OSError(errno.ENOSPC, "No space left on device")

    def killed(source: Path, part: Path) -> Path:
        part.mkdir()
        (part / "adapter_config.json").write_text("{", encoding="utf-8")
        return real(source, part)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_policy, "export_adapter", full)
        with pytest.raises(OSError, match="No space left"):
            sharing._shared("a@r1-1", trained)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_policy, "export_adapter", killed)
        patch.setattr(vllm_policy.shutil, "rmtree", lambda *given, **named: None)  # as SIGKILL, which cleans nothing up
        with pytest.raises(AdapterError, match="exists"):
            sharing._shared("a@r1-1", trained)
    assert adapter_digest(sharing._shared("a@r1-1", trained)) == adapter_digest(trained)
    assert [p.name for p in sharing._shared("a@r1-1", trained).parent.iterdir()] == ["a@r1-1"]


def test_a_copy_that_another_process_made_meanwhile_is_taken(
    sharing: VllmPolicy, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vllm_policy.export_adapter

    def slow(source: Path, part: Path) -> Path:
        real(source, part.with_name("a@r1-1"))
        return real(source, part)

    monkeypatch.setattr(vllm_policy, "export_adapter", slow)
    shared = sharing._shared("a@r1-1", trained)
    assert [p.name for p in shared.parent.iterdir()] == ["a@r1-1"]


@pytest.mark.parametrize("status", [500, 502, 503, 429, -1])
def test_transient_failures_are_tried_again(stub: Stub, policy: VllmPolicy, status: int) -> None:
    stub.failures = [status, status]
    (answer,) = policy.generate([turn()])
    assert len(answer.ids) == 3


def test_a_turn_that_fails_for_good_is_its_own_problem_only(stub: Stub, policy: VllmPolicy) -> None:
    stub.failures = [500] * 4
    policy.submit(turn("bad"))
    (answer,) = policy.poll()
    assert (answer.session, answer.ids, answer.finish_reason) == ("bad", (), "error")
    assert isinstance(answer.problem, ProviderError)
    assert answer.problem.transient
    assert "500" in str(answer.problem)
    assert policy.generate([turn("good")])[0].problem is None


def test_an_adapter_that_has_come_apart_is_no_fault_of_a_server(stub: Stub, policy: VllmPolicy, tmp_path: Path) -> None:
    """Finite weights whose figures are none: vLLM answers 500, for JSON has no NaN, or null."""
    stub.torn = {"a@v1-1"}
    with pytest.raises(NotFinite, match=r"'a@v1-1' gives log-probabilities that are not finite .* lower learning rate"):
        policy.load_adapter("a@v1-1", "abc", tmp_path)
    assert (stub.names, policy.adapters) == (set(), ())
    stub.moves["a@v2-1"] = float("nan")
    with pytest.raises(NotFinite, match="'a@v2-1'"):
        policy.load_adapter("a@v2-1", "abc", tmp_path)
    assert policy.generate([turn()])[0].problem is None, "the others go on"
    # One whose probe is well, on a turn of its own.
    for name, torn in (("a@v3-1", {"a@v3-1"}), ("a@v4-1", set())):
        policy.load_adapter(name, "abc", tmp_path)
        stub.torn, stub.moves[name] = torn, float("nan")
        with pytest.raises(NotFinite, match=f"{name!r} gives log-probabilities that are not finite"):
            policy.generate([turn("bad", name), turn("good")])


def test_a_server_that_fails_at_an_adapter_and_its_base_is_to_blame(
    stub: Stub, policy: VllmPolicy, tmp_path: Path
) -> None:
    policy.load_adapter("a@v2-1", "abc", tmp_path)
    stub.torn = {"base", "a@v2-1"}
    (answer,) = (policy.submit(turn("s", "a@v2-1")), policy.poll())[1]
    assert isinstance(answer.problem, ProviderError)
    assert answer.problem.transient
    stub.torn = set()
    stub.failures = [500] * 4  # all tries of the turn: then the base answers, and so does the adapter
    assert policy.generate([turn("s", "a@v2-1")])[0].ids
    stub.failures = [0, *[500] * 4]  # the base is proven first
    policy.load_adapter("a@v3-1", "abc", tmp_path)
    stub.torn = {"base", "a@v1-1"}
    with pytest.raises(ProviderError, match="500") as raised:
        policy.load_adapter("a@v1-1", "abc", tmp_path)
    assert raised.value.transient


def test_a_refused_request_is_not_tried_again(stub: Stub, policy: VllmPolicy) -> None:
    stub.failures = [400]
    before = len(stub.calls)
    with pytest.raises(PolicyError, match="400"):
        policy.generate([turn()])
    assert len(stub.calls) == before + 1


def test_the_episode_of_a_failed_turn_ends_with_its_error(stub: Stub, policy: VllmPolicy, tiny_model: Any) -> None:
    from models.episodes import Episode, Player
    from tests.models.training.test_grpo import Toy

    stub.failures = [500] * 4
    _, renderer = tiny_model
    policy.context = 4096
    task = TargetTask("t", "training", "toy", 0)
    (played,) = Player(Toy, policy, renderer, Sampling(1.0, 4)).play([Episode("k", task)])
    assert played.score is None
    assert (played.boundary, "500" in played.error) == ("provider", True)
    assert isinstance(Toy().reset(task), Observation)


def test_what_cannot_fit_is_refused_before_it_is_sent(stub: Stub, policy: VllmPolicy) -> None:
    before = len(stub.calls)
    with pytest.raises(ContextOverflow, match="62 prompt"):
        policy.submit(Request("s", [1] * 62, Sampling(0.0, 3)))
    with pytest.raises(PolicyError, match="empty"):
        policy.submit(Request("s", [], Sampling(0.0, 3)))
    assert len(stub.calls) == before


def test_a_server_that_goes_away_fails_everything_and_may_be_tried_again() -> None:
    with vllm_stub() as stub:
        policy = VllmPolicy([VllmServer(stub.url, "base")], BASE, frozenset(), 4)
    for i in range(4):
        policy.submit(turn(f"s{i}"))
    with pytest.raises(ServerAway, match=r"start it or set policy\.url") as raised:
        policy.poll()
    assert raised.value.transient
    assert policy.poll() == []
    policy.close()


def test_a_server_that_is_not_as_needed_is_refused_at_once(stub: Stub) -> None:
    def opened(model: str = "base", key: str = "") -> None:
        VllmPolicy([VllmServer(stub.url, model, key)], BASE, frozenset())

    with pytest.raises(ConfigurationError, match="does not serve 'other' but base"):
        opened("other")
    stub.raw_logprobs = True
    with pytest.raises(ConfigurationError, match="--logprobs-mode processed_logprobs"):
        opened()
    stub.raw_logprobs, stub.key = False, "secret"
    with pytest.raises(ConfigurationError, match=r"policy\.api_key_env"):
        opened()
    opened(key="secret")
    stub.answers_as = "gpt"
    with pytest.raises(ProviderError, match="answered as 'gpt'"):
        opened(key="secret")
    with pytest.raises(ConfigurationError, match="is not http"):
        VllmServer("localhost:8000", "base")
    with pytest.raises(ServerAway):
        VllmServer("http://127.0.0.1:9", "base").check()
    with pytest.raises(
        ConfigurationError, match=r"a server address is none \(Invalid IPv6 URL\); give one such as http"
    ) as none:
        VllmServer("http://me:secret@[::1", "base")
    assert "secret" not in str(none.value)


def test_a_name_that_nobody_loaded_is_told_apart(stub: Stub) -> None:
    server = VllmServer(stub.url, "base")
    with pytest.raises(ModelMissing, match="404"):
        server.score([1, 2, 3], 2, "ghost@v1-1")
    assert server.unload("ghost@v1-1") is False


def test_a_server_that_is_silent_for_the_longest_wait_is_not_waited_for_again(stub: Stub) -> None:
    stub.stalled.set()
    server = VllmServer(stub.url, "base", seconds=300).limited(0.2)
    with pytest.raises(ProviderError, match=r"broke off after 0\.\d s \(ReadTimeout"):
        server.score([1, 2, 3], 2)
    assert stub.calls == ["/v1/completions"]
    assert VllmServer(stub.url, "base", seconds=0.1).limited(5.0).seconds == 0.1


@pytest.mark.parametrize(("login", "key"), [("me:hunter%2Fsecret@", ""), ("", "sk-secret-1234")])
def test_no_message_has_the_key_or_login_of_a_server(login: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of its address, nor where the server quotes what it was asked with; the gateway asks it the same way."""
    seen: list[str] = []

    async def refuse(request: HttpRequest) -> Response:
        seen.append(request.headers["authorization"])
        return JSONResponse({"error": {"message": f"who is {seen[-1]}{', hunter/secret' * bool(login)}?"}}, 401)

    paths = ("/v1/models", "/v1/completions", "/health")
    app = Starlette(routes=[Route(path, refuse, methods=["GET", "POST"]) for path in paths])

    async def at_the_gateway(url: str) -> list[Replica]:
        pool = Pool(Servers([url], key))
        async with pool.post("/v1/completions", b"{}") as (address, _):
            assert address == pool.addresses[0]
        looked = await pool.replicas()
        await pool.close()
        return looked

    with serving(app) as address:
        url = address.replace("://", f"://{login}")
        server = VllmServer(url, "base", key)
        assert server.url == address
        with pytest.raises(ConfigurationError, match=f"{address}/v1/models answers 401: who is ") as refused:
            server.limited(5).models()
        looked = asyncio.run(at_the_gateway(url))
    with pytest.raises(ServerAway) as away:
        VllmServer(f"http://{login}127.0.0.1:9", "base", key).models((0.0,))
    with pytest.raises(ConfigurationError, match=r"server address '127.0.0.1:9' is not http") as wrong:
        VllmServer(f"{login}127.0.0.1:9", "base", key)
    told = [*(str(e.value) for e in (refused, away, wrong)), caplog.text, repr(looked)]
    assert not [text for text in told if "secret" in text or seen[0].partition(" ")[2] in text]
    plain = base64.b64encode(b"me:hunter/secret").decode()
    assert set(seen) == {f"Basic {plain}" if login else f"Bearer {key}"}
    assert len(seen) == 3
