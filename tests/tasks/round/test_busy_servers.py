"""Servers that sleep for a training of another process are not woken: whoever needs them is told who has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from db import Round, Stage, open_store
from errors import ConfigurationError, ServersBusy
from flows.cli.main import app
from models.local.base import BaseModel
from models.vllm import server as vllm_server
from settings import Settings, load_settings
from tasks.measuring import policy_names
from tasks.measuring.policy_names import PolicyOptions, load_policy, parse_policy
from tasks.round.policies import check_policy, open_backend
from tasks.unattended import alive
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub

WHO = r"round 1 on shop trains 'pay' \(process elsewhere:1:ab\).* run the same command again"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(alive, "POLL_SECONDS", 0.01)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with vllm_stub() as running:
        running.asleep = True
        yield running


@pytest.fixture
def settings(stub: Stub, settings_folder: Path) -> Settings:
    return sharing(stub, sleep=True)


def sharing(stub: Stub, sleep: bool) -> Settings:
    """Servers and training on one GPU; with `sleep` off, as a shell has it in which nobody has set it."""
    policy = {"backend": "vllm", "url": stub.url}
    return load_settings(profile="smoke", home="home", policy=policy, devices={"sleep": sleep})


@pytest.fixture
def training(settings: Settings) -> Iterator[Stage]:
    """The stage of a training that another process begins and, where the test does not say so, never goes on with."""
    with open_store(settings.database_url) as store:
        begun: Round = store.start_round("shop", "d", 0, "smoke", settings.identity())
        yield store.stage(begun.id, "train:pay")


@pytest.fixture
def lives(training: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is at work: it is seen to prolong its lease, between one look and the next."""
    assert training.claim("elsewhere:1:ab", lease_seconds=3600)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: training.heartbeat())
    monkeypatch.setattr(alive, "time", clock)


def calls(stub: Stub) -> list[str]:
    return [path for path in stub.calls if path in ("/wake_up", "/sleep?level=1")]


@pytest.mark.usefixtures("lives")
@pytest.mark.parametrize("asleep", [True, False])
def test_a_training_that_lives_keeps_its_servers(settings: Settings, stub: Stub, asleep: bool) -> None:
    """Also while they are awake for its next step: they would be put to sleep under whoever asks them then."""
    stub.asleep = asleep
    with pytest.raises(ServersBusy, match=WHO):
        check_policy(settings)
    assert stub.calls == []


@pytest.mark.usefixtures("lives")
def test_what_they_sleep_for_may_have_begun_after_the_check(settings: Settings, stub: Stub, tiny_model: Any) -> None:
    policy, renderer = tiny_model
    with pytest.raises(ServersBusy, match=WHO):
        open_backend(settings, BaseModel(policy, renderer, policy.identity()))
    assert stub.calls == []


def test_a_training_that_was_killed_is_waited_for_until_its_lease_has_run_out(
    settings: Settings, stub: Stub, training: Stage
) -> None:
    assert training.claim("elsewhere:1:ab", lease_seconds=0.3)  # and no heartbeat follows
    check_policy(settings)
    assert calls(stub) == ["/wake_up"]


def test_a_lease_that_nobody_prolongs_and_that_holds_all_the_same_is_respected(
    settings: Settings, training: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "LEASE_SECONDS", 0.05)
    assert training.claim("elsewhere:1:ab", lease_seconds=3600)
    with pytest.raises(ServersBusy, match=WHO):
        check_policy(settings)


@pytest.mark.parametrize("whose", ["its own", "on this processor", "another stage's"])
def test_what_is_no_training_of_others_on_servers_stops_nobody(
    settings: Settings, stub: Stub, training: Stage, whose: str
) -> None:
    with open_store(settings.database_url) as store:
        local = store.start_round("shop", "d", 1, "smoke", load_settings().identity())
        stages = {"on this processor": (local.id, "train:pay"), "another stage's": (training.round_id, "evaluate")}
        stage = store.stage(*stages.get(whose, (training.round_id, training.name)))
        assert stage.claim(None if whose == "its own" else "elsewhere:1:ab", lease_seconds=3600)
        check_policy(settings)
    assert calls(stub) == ["/wake_up"]


@pytest.mark.parametrize("policy", ["base", "vllm:URL#base"])
def test_who_wakes_no_server_is_told_why_it_sleeps(stub: Stub, settings_folder: Path, policy: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{stub.url} is asleep: .*curl -X POST {stub.url}/wake_up"):
        ask(sharing(stub, sleep=False), policy)
    assert stub.calls == []


@pytest.mark.usefixtures("lives")
@pytest.mark.parametrize("policy", ["base", "vllm:URL#base"])
def test_who_wakes_no_server_is_told_for_whom_it_sleeps(stub: Stub, policy: str) -> None:
    with pytest.raises(ServersBusy, match=WHO):
        ask(sharing(stub, sleep=False), policy)
    assert stub.calls == []


def ask(settings: Settings, policy: str) -> None:
    """Have the servers looked at, as a round's model is, or as a model by the chat protocol."""
    if policy == "base":
        check_policy(settings)
        return
    nothing: Any = None
    name = parse_policy(policy.replace("URL", settings.policy.url))
    load_policy(name, PolicyOptions(), settings, nothing, nothing)


def test_release_0_is_the_bare_base_of_the_settings(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> None:
    """As `compare` and `rollback` have it."""
    nothing: Any = None
    monkeypatch.setattr(
        policy_names, "_load_token_policy", lambda name, *given: policy_names.LoadedPolicy(name, nothing, nothing)
    )
    given = PolicyOptions(), load_settings(base_model="smollm2-135m"), nothing, nothing
    loaded = load_policy(parse_policy("release@0"), *given)
    name = loaded.name
    assert (name.text, name.model, name.adapter, loaded.release) == ("release@0", "smollm2-135m", "", 0)


@pytest.mark.usefixtures("lives")
def test_evaluate_wakes_nothing_beside_a_training(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"POLICY__BACKEND": "vllm", "POLICY__URL": stub.url, "DEVICES__SLEEP": "true"}
    for name, value in given.items():
        monkeypatch.setenv(f"TRACE_{name}", value)
    result = CliRunner().invoke(app, ["evaluate", "--target", "shop", "--policy", "release", "--home", "home"])
    assert isinstance(result.exception, ServersBusy)
    assert stub.calls == []
