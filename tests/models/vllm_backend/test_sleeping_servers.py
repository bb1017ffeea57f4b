"""Servers that share a GPU with the training sleep around its backward pass, and at no other time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError, PolicyError, TrainingMemoryError, Untrainable
from models.policy import PolicyIdentity
from models.training import actors
from models.training.actors import VllmActor
from models.training.grpo import train_adapter
from models.training.learner import FusedLearner
from models.training.records import StepRecord
from models.training.trl_trainer import EpisodeGRPO
from models.vllm import server as vllm_server
from models.vllm.answers import ServerAway
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from settings import load_settings
from tasks.round.policies import check_policy
from tests.models.training.test_grpo import SMALL, Source
from tests.models.training.test_out_of_memory import held, runs_out
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub

SLEEPING = ("/sleep?level=1", "/wake_up")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    # The stub's log-probabilities are no model's: what `prove` is for has its own tests.
    monkeypatch.setattr(actors, "prove", lambda *_, **__: type("Found", (), {"moved": 1.0, "base_apart": 0.0}))
    with vllm_stub() as running:
        running.context = 512
        yield running


@pytest.mark.parametrize("sleeps", [True, False])
def test_they_sleep_while_gradients_are_computed(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    local, renderer = tiny_model
    asleep: list[bool] = []
    run = FusedLearner.run
    monkeypatch.setattr(FusedLearner, "run", lambda *given: asleep.append(stub.asleep) or run(*given))
    monkeypatch.setattr("models.training.rollouts.Rollouts.decoder", local.decoder)
    identity = PolicyIdentity("small", "r1", "vllm:base", "", "renderer")
    policy = VllmPolicy([VllmServer(stub.url, "base")], identity, renderer.stop_ids, 8)
    actor = VllmActor(policy, local.model, tmp_path / "shared", [5, 6, 7, 8], "toy", sleeps)
    settings = replace(SMALL, steps=2 if sleeps else 1)
    train_adapter(Source(), actor, renderer, settings, tmp_path / "training", lambda _: None)
    policy.close()
    assert asleep, "the pass was seen"
    assert set(asleep) == {sleeps}
    called = [path.partition("?")[0] for path in stub.calls if path in SLEEPING]
    assert called == (["/sleep", "/wake_up"] * 2 if sleeps else [])
    assert not stub.asleep
    # What is asked of a server between the two would be refused by the stub; an adapter is loaded only once it is up.
    assert sum(path == "/v1/load_lora_adapter" for path in stub.calls) == settings.steps


def at_rest(stub: Stub, tiny_model: Any, folder: Path) -> tuple[VllmPolicy, VllmActor]:
    """An actor whose one server sleeps, as it does while a step's gradient is computed."""
    policy = VllmPolicy([VllmServer(stub.url, "base")], PolicyIdentity("s", "r", "v", "", "r"), frozenset({7}), 8)
    actor = VllmActor(policy, tiny_model[0].model, folder, [5, 6, 7], "toy", True)
    actor.rest()
    return policy, actor


def test_they_are_awake_after_a_training_that_failed(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, actor = at_rest(stub, tiny_model, tmp_path)
    assert stub.asleep
    with pytest.raises(PolicyError):
        policy.servers[0].complete({"model": "base", "prompt": [1], "max_tokens": 1})
    actor.retire()
    assert not stub.asleep
    actor.retire()
    assert [c for c in stub.calls if c in SLEEPING] == list(SLEEPING)
    policy.close()


def test_a_server_that_does_not_wake_is_told_and_is_woken_at_the_next_try(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, actor = at_rest(stub, tiny_model, tmp_path)

    def silent(server: VllmServer) -> None:
        raise ServerAway("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(VllmServer, "wake_up", silent)
        with pytest.raises(ServerAway):
            actor.retire()
    assert stub.asleep
    actor.retire()
    assert not stub.asleep
    policy.close()


@pytest.mark.parametrize("wakes", [True, False])
def test_they_wake_when_what_a_failed_step_holds_is_free(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: bool
) -> None:
    """They share its GPU. One that cannot wake all the same does not hide what went wrong."""
    local, renderer = tiny_model
    waking: list[list[bool]] = []
    wake_up = VllmServer.wake_up

    def watched(server: VllmServer) -> None:
        waking.append(held())
        if not wakes:
            raise ServerAway("it does not answer")
        wake_up(server)

    monkeypatch.setattr(VllmServer, "wake_up", watched)
    monkeypatch.setattr(EpisodeGRPO, "_compute_loss", runs_out)
    monkeypatch.setattr("models.training.rollouts.Rollouts.decoder", local.decoder)
    servers = [VllmServer(stub.url, "base"), VllmServer(stub.url, "base")]
    policy = VllmPolicy(servers, PolicyIdentity("small", "r1", "v", "", "renderer"), renderer.stop_ids, 8)
    actor = VllmActor(policy, local.model, tmp_path / "shared", [5, 6, 7, 8], "toy", True)
    with pytest.raises(TrainingMemoryError, match="ran out of the GPU's memory"):
        train_adapter(Source(), actor, renderer, SMALL, tmp_path / "training", lambda _: None)
    assert waking == [[False, False]] * 2, "both are asked, the first one's failure or not"
    assert stub.asleep is not wakes
    policy.close()


@pytest.mark.parametrize("name", ["fingerprint_of", "prove"])
def test_a_step_whose_adapter_is_not_proven_leaves_none_behind(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither its own nor that of the step before, on the server or in the shared folder."""
    local, renderer = tiny_model
    done, plain = list[StepRecord](), getattr(actors, name)

    def fails_later(*given: Any, **named: Any) -> Any:
        if done:
            raise PolicyError("the server is gone")
        return plain(*given, **named)

    monkeypatch.setattr(actors, name, fails_later)
    policy = VllmPolicy([VllmServer(stub.url, "base")], local.identity(), renderer.stop_ids, 8)
    actor = VllmActor(policy, local.model, tmp_path / "shared", [5, 6, 7, 8], "toy")
    with pytest.raises(PolicyError, match="the server is gone"):
        train_adapter(Source(), actor, renderer, SMALL, tmp_path / "training", done.append)
    assert len(done) == 1
    assert policy.adapters == ()
    assert [*(tmp_path / "shared").iterdir()] == []
    policy.close()


def test_servers_that_cannot_sleep_are_refused_before_the_round(stub: Stub, settings_folder: Path) -> None:
    given: dict[str, Any] = {"home": settings_folder, "policy": {"backend": "vllm", "url": stub.url}}
    check_policy(load_settings(**given, devices={"sleep": True}))
    stub.sleeps = False
    check_policy(load_settings(**given))
    with pytest.raises(ConfigurationError, match=r"devices\.sleep is on and .* cannot sleep; start it with --enable"):
        check_policy(load_settings(**given, devices={"sleep": True}))
    assert not [c for c in stub.calls if c in SLEEPING]


def test_servers_that_a_killed_round_left_asleep_are_woken_before_they_are_asked(
    stub: Stub, settings_folder: Path
) -> None:
    stub.asleep = True
    policy = {"backend": "vllm", "url": stub.url}
    check_policy(load_settings(home=settings_folder, policy=policy, devices={"sleep": True}))
    assert [c for c in stub.calls if c in SLEEPING] == ["/wake_up"]


def test_weights_that_have_come_apart_are_no_fault_of_a_server(stub: Stub, tiny_model: Any, tmp_path: Path) -> None:
    """An `AdapterError` of what the server answers would end the round, and not this training alone."""
    local, renderer = tiny_model
    policy = VllmPolicy([VllmServer(stub.url, "base")], PolicyIdentity("s", "r", "v", "", "r"), renderer.stop_ids, 8)
    actor = VllmActor(policy, local.model, tmp_path / "shared", [5, 6, 7, 8], "toy", True)
    settings = replace(SMALL, learning_rate=float("inf"))
    with pytest.raises(Untrainable, match="the adapter after step 1 gives log-probabilities that are not finite"):
        train_adapter(Source(), actor, renderer, settings, tmp_path / "training", lambda _: None)
    policy.close()
    assert sum(path == "/v1/load_lora_adapter" for path in stub.calls) == 1
    assert not stub.asleep


def test_an_adapter_that_overflows_on_the_servers_ends_its_own_training(
    stub: Stub, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, renderer = tiny_model
    monkeypatch.setattr(vllm_server, "WAITS", (0.01,))
    policy = VllmPolicy([VllmServer(stub.url, "base")], PolicyIdentity("s", "r", "v", "", "r"), renderer.stop_ids, 8)
    actor = VllmActor(policy, local.model, tmp_path / "shared", [5, 6, 7, 8], "toy", True)
    load = policy.load_adapter

    def torn(name: str, digest: str, folder: Path) -> None:
        stub.torn.add(name)
        load(name, digest, folder)

    monkeypatch.setattr(policy, "load_adapter", torn)
    with pytest.raises(Untrainable, match="the adapter after step 0 gives log-probabilities that are not finite"):
        train_adapter(Source(), actor, renderer, SMALL, tmp_path / "training", lambda _: None)
    policy.close()
    assert (stub.names, stub.asleep) == (set(), False)
