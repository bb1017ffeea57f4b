"""Several servers as one policy: proven equal, their turns move when one is lost, and what comes back is proven."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from errors import AdapterError, ConfigurationError, ProviderError
from models.adapters.files import WEIGHTS, carries_weights
from models.policy import PolicyIdentity, Request, Sampling
from models.vllm import server as vllm_server
from models.vllm import turns as vllm_turns
from models.vllm.answers import ServerAway
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from settings import load_settings
from tasks.round.policies import check_policy
from tests.models.vllm_backend.stub_episodes import Episodes
from tests.models.vllm_backend.stub_processes import stub_processes
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub

BASE = PolicyIdentity("small", "r1", "vllm:base", "", "renderer")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.02, 0.05, 0.1, 0.1))
    monkeypatch.setattr(vllm_turns, "PAUSE", 0.05)


@pytest.fixture
def two() -> Iterator[tuple[Stub, Stub]]:
    with vllm_stub() as one, vllm_stub() as other:
        yield one, other


def opened(*urls: str, stall_seconds: float = 60.0, concurrency: int = 8, seconds: float = 300.0) -> VllmPolicy:
    servers = [VllmServer(url, "base", connections=concurrency, seconds=seconds) for url in urls]
    return VllmPolicy(servers, BASE, frozenset(), concurrency, stall_seconds=stall_seconds)


def turn(session: str, adapter: str | None = None, seed: int = 0) -> Request:
    return Request(session, [1, 2, 3], Sampling(0.7, 2, seed), adapter)


def seeds(stub: Stub) -> set[int]:
    """Of the turns that a stub answered."""
    return {b["seed"] for b in stub.bodies if b.get("return_token_ids")}


def until(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- equality -------------------------------------------------------------------------------------------------------


def test_a_replica_with_other_weights_is_refused_before_the_first_turn(
    two: tuple[Stub, Stub], settings_folder: Path
) -> None:
    one, other = two
    other.moves["base"] = 0.015  # bfloat16's rounding is no other base
    opened(one.url, other.url).close()
    other.moves["base"] = 0.3
    told = rf"{other.url} serves another base than {one.url}: .* 0\.300 nats a token apart \(at most 0\.02\); start it"
    with pytest.raises(ConfigurationError, match=told):
        opened(one.url, other.url)
    with pytest.raises(ConfigurationError, match=told):
        check_policy(load_settings(policy={"backend": "vllm", "url": f"{one.url},{other.url}"}))
    # Of three, the odd one is named, also when it comes first.
    with vllm_stub() as third, pytest.raises(ConfigurationError, match=f"{other.url} serves another base than"):
        opened(other.url, one.url, third.url)
    assert seeds(one) == seeds(other) == set()


def test_an_adapter_that_one_replica_drops_is_refused_and_taken_from_all(
    two: tuple[Stub, Stub], tmp_path: Path
) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    for dropped, kept in ((one, other), (other, one)):
        dropped.moves["a@v1-1"], kept.moves["a@v1-1"] = 0.0, 0.4
        told = (
            rf"{dropped.url} dropped adapter 'a@v1-1': it answers as its base does, 0\.400 nats a token from {kept.url}"
        )
        with pytest.raises(AdapterError, match=told):
            policy.load_adapter("a@v1-1", "abc", tmp_path)
        assert (policy.adapters, one.names, other.names) == ((), set(), set())
    one.moves["a@v1-1"], other.moves["a@v1-1"] = 0.1, 0.4
    with pytest.raises(AdapterError, match=r"answers otherwise than .* with adapter 'a@v1-1': 0\.3"):
        policy.load_adapter("a@v1-1", "abc", tmp_path)
    one.moves["a@v1-1"] = 0.4
    policy.load_adapter("a@v1-1", "abc", tmp_path)
    assert one.names == other.names == {"a@v1-1"}
    policy.close()


@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_an_adapter_with_weights_that_moves_nothing_at_all_was_dropped(tmp_path: Path, size: float) -> None:
    a, b = torch.ones(2, 4), torch.zeros(4, 2, dtype=torch.bfloat16)
    b[3, 1] = size
    save_file({"m.lora_A.weight": a, "m.lora_B.weight": b}, tmp_path / WEIGHTS)
    assert carries_weights(tmp_path) is bool(size)
    with vllm_stub() as stub:
        policy = opened(stub.url)
        stub.moves["a@v1-1"] = 0.0
        if size:
            with pytest.raises(AdapterError, match=rf"{stub.url} dropped adapter 'a@v1-1': it moves .* by 0\.0 nats"):
                policy.load_adapter("a@v1-1", "abc", tmp_path)
            assert stub.names == set()
        else:  # as before the first step of a training
            policy.load_adapter("a@v1-1", "abc", tmp_path)
        policy.close()
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(AdapterError, match="cannot be read"):
        carries_weights(tmp_path)


# --- failover -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_quick")
def test_the_turns_of_a_replica_that_dies_go_to_the_other_and_stay_there(two: tuple[Stub, Stub]) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    asked = [turn(f"s{i}", seed=i) for i in range(12)]
    first = policy.generate(asked)
    assert 0 < len(seeds(one)) < 12
    assert seeds(one) | seeds(other) == set(range(12))
    one.gone = True  # connections break, as many as there are
    for _ in range(3):
        assert [a.ids for a in policy.generate(asked)] == [a.ids for a in first]
    assert [s.url for s in policy._turns.used()] == [other.url]
    one.gone = False
    until(lambda: len(policy._turns.used()) == 2)
    one.bodies.clear()
    assert [a.ids for a in policy.generate(asked)] == [a.ids for a in first]
    assert seeds(one) == set()  # their conversations lie in the other's cache by now
    policy.close()


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("status", [500, 503, -1])
def test_a_replica_that_fails_three_times_in_a_row_is_left_out_until_it_is_proven(
    two: tuple[Stub, Stub], status: int
) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    policy.generate([turn(f"s{i}") for i in range(8)])
    one.failures = [status] * 40
    answers = policy.generate([turn(f"s{i}", seed=i) for i in range(40)])
    assert [a.ids[0] for a in answers] == [(6 + i) % 50 for i in range(40)]
    # It was asked a few times, not by every session; and not once it was open but to prove it.
    failed = 40 - len(one.failures)
    assert 3 <= failed <= 30
    one.failures = []
    until(lambda: len(policy._turns.used()) == 2)
    policy.generate([turn(f"n{i}", seed=100 + i) for i in range(8)])
    assert seeds(one) & set(range(100, 108))
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_one_failure_moves_a_turn_at_once_and_costs_the_replica_nothing(two: tuple[Stub, Stub]) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    one.failures, other.failures = [503], [503]
    began = time.perf_counter()
    assert policy.generate([turn("s")])[0].ids == (6, 7)
    assert time.perf_counter() - began < 5
    assert len(policy._turns.used()) == 2
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_a_replica_that_comes_back_has_its_adapters_before_its_first_turn(
    two: tuple[Stub, Stub], tmp_path: Path
) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    for name in ("a@v1-1", "b@v1-1"):
        policy.load_adapter(name, "abc", tmp_path)
    one.names.clear()  # started again
    one.moves["b@v1-1"] = 0.0  # and at first it drops one of them
    before = len(one.calls)
    policy.generate([turn(f"s{i}", "a@v1-1") for i in range(8)])
    until(lambda: "/v1/load_lora_adapter" in one.calls[before:])
    assert [s.url for s in policy._turns.used()] == [other.url]
    policy.unload_adapter("a@v1-1")  # while it is away
    del one.moves["b@v1-1"]
    until(lambda: len(policy._turns.used()) == 2)
    assert one.names == other.names == {"b@v1-1"}
    policy.close()


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("own", [True, False])
def test_a_replica_that_comes_back_keeps_what_was_unloaded_once_and_is_loaded_again(
    two: tuple[Stub, Stub], tmp_path: Path, own: bool
) -> None:
    """Its own adapter, and one that another process has loaded again under the same name."""
    one, other = two
    policy, name = opened(one.url, other.url), "a@v1-1"
    policy.load_adapter(name, "abc", tmp_path)
    policy.unload_adapter(name)
    if own:
        policy.load_adapter(name, "abc", tmp_path)
    else:
        for stub in two:
            stub.names.add(name)
        policy.know_adapter(name, "abc")
    policy._turns.lose(policy.servers[0], ProviderError("it broke", transient=True))
    until(lambda: len(policy._turns.used()) == 1)
    until(lambda: len(policy._turns.used()) == 2)
    assert one.names == other.names == {name}
    assert len(policy.generate([turn(f"s{i}", name) for i in range(8)])) == 8
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_a_replica_that_comes_back_with_other_weights_stays_out_and_is_told(
    two: tuple[Stub, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    with caplog.at_level(logging.WARNING, "trace.models"):
        policy = opened(one.url, other.url)
        one.moves["base"] = 0.5
        policy._turns.lose(policy.servers[0], ProviderError("it broke", transient=True))
        until(lambda: f"{one.url} is still left out: {one.url} serves another base" in caplog.text)
    assert "0.500 nats a token apart" in caplog.text
    policy.generate([turn(f"n{i}", seed=100 + i) for i in range(8)])
    assert not seeds(one) & set(range(100, 108))
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_a_replica_that_was_started_again_while_it_was_idle_is_proven_before_its_next_adapter(
    two: tuple[Stub, Stub], tmp_path: Path
) -> None:
    one, other = two
    policy = opened(one.url, other.url)
    one.moves["base"] = 0.5  # another model
    policy.load_adapter("a@v1-1", "abc", tmp_path)
    assert (one.names, other.names) == (set(), {"a@v1-1"})
    assert len(policy.generate([turn(f"s{i}", "a@v1-1") for i in range(8)])) == 8
    other.moves["base"] = 0.5
    with pytest.raises(ProviderError, match=f"{other.url} serves another base than the servers at the beginning"):
        policy.load_adapter("b@v1-1", "abc", tmp_path)
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_a_replica_that_is_away_at_the_start_is_left_out_and_none_is_an_error() -> None:
    with vllm_stub() as one:
        policy = opened("http://127.0.0.1:9", one.url)
        assert policy.generate([turn("s")])[0].ids == (6, 7)
    policy.submit(turn("s"))
    with pytest.raises(ServerAway, match=r"no vLLM server is left: .*127\.0\.0\.1:9.*; no vLLM server answers at"):
        policy.poll()
    assert policy.poll() == []
    policy.close()
    with pytest.raises(ServerAway):
        opened("http://127.0.0.1:9", "http://127.0.0.1:10")


# --- stalls ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_quick")
def test_a_replica_that_stalls_loses_its_turns_and_one_that_works_on_long_ones_does_not(
    two: tuple[Stub, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    policy = opened(one.url, other.url, stall_seconds=0.6)
    policy.generate([turn(f"s{i}") for i in range(8)])
    one.stalled.set()
    for i in range(8):
        policy.submit(turn(f"s{i}", seed=i))
    answers = policy.poll()
    end = time.monotonic() + 1.2
    while time.monotonic() < end:  # it answers none, but its count of tokens grows
        one.tokens = (one.tokens or 0) + 1
        time.sleep(0.02)
    assert len(policy._turns.used()) == 2
    while len(answers) < 8:  # and now it does not
        answers += policy.poll()
    assert sorted(a.ids[0] for a in answers) == [6 + i for i in range(8)]
    assert f"{one.url} answered no turn for" in caplog.text
    assert "and worked on nothing" in caplog.text
    one.stalled.clear()
    until(lambda: len(policy._turns.used()) == 2)
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_without_metrics_a_stall_is_told_apart_by_nothing_but_the_longest_wait(
    two: tuple[Stub, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    one.tokens = other.tokens = None
    policy = opened(one.url, other.url, stall_seconds=0.2)
    policy.generate([turn(f"s{i}") for i in range(8)])
    one.stalled.set()
    for i in range(8):
        policy.submit(turn(f"s{i}"))
    until(lambda: f"{one.url} has no /metrics: only policy.seconds ends a stall of it" in caplog.text)
    one.stalled.clear()
    answers = policy.poll()
    while len(answers) < 8:
        answers += policy.poll()
    assert len(policy._turns.used()) == 2
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_turns_whose_time_is_up_at_once_move_from_a_replica_that_is_used_again_when_it_is_well(
    two: tuple[Stub, Stub],
) -> None:
    """As those of a batch that was sent together: the third of them loses the server while the others are leaving."""
    one, other = two
    policy = opened(one.url, other.url, concurrency=16)
    policy._turns._replicas[one.url].server.seconds = 0.3  # the other may take its time
    one.stalled.set()
    answers = policy.generate([turn(f"s{i}", seed=i) for i in range(16)])
    assert [a.ids[0] for a in answers] == [(6 + i) % 50 for i in range(16)]
    assert [s.url for s in policy._turns.used()] == [other.url]
    one.stalled.clear()
    until(lambda: len(policy._turns.used()) == 2)
    policy.close()


@pytest.mark.usefixtures("_quick")
def test_a_turn_that_takes_longer_than_the_longest_wait_is_asked_of_each_server_once(two: tuple[Stub, Stub]) -> None:
    policy = opened(*(s.url for s in two), seconds=0.5)
    before = [len(s.calls) for s in two]
    for stub in two:
        stub.delay = 2.0
    policy.submit(turn("s"))
    (answer,) = policy.poll()
    assert "broke off after 0.5 s (TimeoutError" in str(answer.problem)
    assert isinstance(answer.problem, ProviderError)
    assert answer.problem.transient, "its episode is owed again"
    assert [len(s.calls) - n for s, n in zip(two, before, strict=True)] == [1, 1]
    assert len(policy._turns.used()) == 2
    policy.close()


def test_waking_a_policy_ends_its_poll_and_loses_no_turn(two: tuple[Stub, Stub]) -> None:
    policy = opened(*(s.url for s in two))
    two[0].stalled.set()
    two[1].stalled.set()
    policy.submit(turn("s"))
    policy.wake()
    assert policy.poll() == []
    two[0].stalled.clear()
    two[1].stalled.clear()
    assert policy.poll()[0].ids == (6, 7)
    policy.close()


# --- the whole ------------------------------------------------------------------------------------------------------


def test_two_of_four_replicas_killed_and_one_stalled_lose_no_episode_and_change_no_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_turns, "PAUSE", 0.2)
    with ExitStack() as stack:
        one, two, three, four = stubs = stack.enter_context(stub_processes(4, seconds=0.02))
        policy = opened(*(s.url for s in stubs), stall_seconds=1.0, concurrency=64)
        stack.callback(policy.close)
        stack.callback(three.go_on)  # before the policy asks it once more
        happens = {150: (one, one.kill), 350: (three, three.stall), 600: (two, two.kill)}

        def answered(turns: int) -> None:
            if turns in happens:
                replica, what = happens[turns]
                assert replica.url in {s.url for s in policy._turns.used()}
                what()

        episodes = Episodes(120, 8)
        assert episodes.play(policy, answered) == episodes.expected()
        assert [s.url for s in policy._turns.used()] == [four.url]
        # Each is used again once it is there.
        three.go_on()
        one.start()
        until(lambda: {s.url for s in policy._turns.used()} == {one.url, three.url, four.url}, 60)
