"""Which policy a round samples from, and how its adapters get there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.contract import Message, Prompt
from errors import AdapterError, ConfigurationError, ProviderError
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.local.base import BaseModel
from models.vllm import server as vllm_server
from models.vllm.answers import ServerAway
from models.vllm.policy import VllmPolicy
from settings import load_settings
from tasks.round import policies
from tasks.round import stage as stages
from tasks.round.context import Context
from tasks.round.policies import check_adapters, check_policy, open_backend, open_servers
from tasks.round.stage import forget
from tests.adapters_made import make_adapter
from tests.models.vllm_backend.vllm_stub import MOVE, Stub, vllm_stub
from tests.tasks.counting_target import target
from tests.tokenizers_trained import tiny_policy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with vllm_stub() as running:
        yield running


@pytest.fixture
def base(tiny_model: tuple[Any, Any], stub: Stub) -> BaseModel:
    """A tiny base, which the stub serves."""
    policy, renderer = tiny_model

    def scored(ids: list[int], model: str) -> list[float]:
        found: list[float] = policy.next_logprobs(ids, 0, model if model in policy.adapters else None).tolist()
        if model == "base" or model in policy.adapters:
            return found
        return [f + MOVE * (t % 2) for t, f in enumerate(found)]  # what only the servers have moves something, too

    stub.scorer = scored
    return BaseModel(policy, renderer, policy.identity())


def on_servers(**policy: Any) -> Any:
    return load_settings(policy={"backend": "vllm", **policy})


def test_the_local_model_is_the_default_and_changes_no_rounds_identity(settings_folder: Path, base: BaseModel) -> None:
    settings = load_settings()
    backend = open_backend(settings, base)
    assert backend.policy is base.policy
    assert "policy" not in settings.identity()
    assert backend.actor([1, 2], "x").policy is base.policy
    check_policy(settings)  # asks nobody


def test_where_the_servers_are_is_no_part_of_what_a_round_is(settings_folder: Path) -> None:
    one, two = on_servers(url="http://a:1"), on_servers(url="http://b:1, http://c:1", concurrency=5)
    assert one.identity() == two.identity()
    assert one.identity() != load_settings().identity()
    assert two.policy.urls == ("http://b:1", "http://c:1")
    assert one.lora_folder == one.folder / "served"


def test_a_rank_above_the_servers_is_refused_before_anything_starts(settings_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train\.rank = 16 is above policy\.max_lora_rank = 8"):
        on_servers(max_lora_rank=8)
    assert load_settings(policy={"max_lora_rank": 8}).policy.backend == "local"


def test_servers_are_checked_before_a_round(settings_folder: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    check_policy(on_servers(url=stub.url))
    with pytest.raises(ConfigurationError, match="does not serve 'other'"):
        check_policy(on_servers(url=stub.url, model="other"))
    with pytest.raises(ServerAway):
        check_policy(on_servers(url=f"{stub.url},http://127.0.0.1:9"))
    with pytest.raises(ConfigurationError, match="names no server"):
        open_servers(on_servers(url=" , "))
    stub.key = "secret"
    with pytest.raises(ConfigurationError, match="which is not set"):
        check_policy(on_servers(url=stub.url, api_key_env="STUB_KEY"))
    monkeypatch.setenv("STUB_KEY", "secret")
    check_policy(on_servers(url=stub.url, api_key_env="STUB_KEY"))


def test_a_server_that_warms_up_on_its_first_text_is_waited_for(
    settings_folder: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at once what it is asked of itself. A text takes longer than that may, not longer than a turn may."""
    monkeypatch.setattr(policies, "CHECK_SECONDS", 0.15)
    stub.delay = 0.3
    check_policy(on_servers(url=stub.url))
    assert len(stub.bodies) == 3
    with pytest.raises(ProviderError, match=r"broke off after 0\.[12] s"):
        check_policy(on_servers(url=stub.url, seconds=0.15))


def test_other_weights_are_refused_before_anything_is_sampled(
    settings_folder: Path, stub: Stub, base: BaseModel, caplog: pytest.LogCaptureFixture
) -> None:
    settings = on_servers(url=stub.url)
    stub.weights = "0123456789ab"
    with pytest.raises(ConfigurationError, match=rf"weights-0123456789ab, and .* weights-{base.identity.revision}"):
        open_backend(settings, base)
    assert stub.bodies == []
    stub.weights = base.identity.revision
    open_backend(settings, base).policy.close()
    assert "weights" not in caplog.text
    stub.weights = ""
    open_backend(settings, base).policy.close()
    assert f"{stub.url} does not say which weights it has" in caplog.text


def test_a_server_with_another_base_is_refused_before_anything_is_sampled(
    settings_folder: Path, stub: Stub, base: BaseModel, tiny_tokenizer: Any
) -> None:
    open_backend(on_servers(url=stub.url), base).policy.close()
    with torch.no_grad():  # another revision: every weight a little off
        for weight in base.policy.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    other = tiny_policy(tiny_tokenizer)[0]
    stub.scorer = lambda ids, model: other.next_logprobs(ids).tolist()
    stub.bodies.clear()
    with pytest.raises(ConfigurationError, match=r"does not serve 'tiny' \(revision 1\).*nats a token.*--revision"):
        open_backend(on_servers(url=stub.url), base)
    assert all(body["max_tokens"] == 1 for body in stub.bodies), "nothing but scores was asked for"


def test_servers_that_were_left_asleep_are_woken_before_they_are_asked(
    settings_folder: Path, stub: Stub, base: BaseModel
) -> None:
    stub.asleep = True
    settings = on_servers(url=stub.url)
    devices = settings.devices.model_copy(update={"sleep": True})
    open_backend(settings.model_copy(update={"devices": devices}), base).policy.close()
    assert stub.calls[0] == "/wake_up"


def test_servers_that_drop_adapters_are_found_before_the_first_episode(
    settings_folder: Path, stub: Stub, base: BaseModel
) -> None:
    settings = on_servers(url=stub.url)
    backend = open_backend(settings, base)
    before = {name: weight.clone() for name, weight in base.policy.model.named_parameters()}
    check_adapters(settings, base, backend)
    assert (stub.names, base.policy.adapters, list(settings.lora_folder.iterdir())) == (set(), (), [])
    after = dict(base.policy.model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    stub.scorer = lambda ids, model: base.policy.next_logprobs(ids).tolist()  # loads any adapter, and leaves it out
    with pytest.raises(
        ConfigurationError, match=rf"{stub.url} does not take.*'tiny'.*dropped adapter.*--lora-target-modules"
    ):
        check_adapters(settings, base, backend)
    stub.loading = False
    with pytest.raises(ConfigurationError, match="--enable-lora"):
        check_adapters(settings, base, backend)
    assert (stub.names, base.policy.adapters, list(settings.lora_folder.iterdir())) == (set(), (), [])
    backend.policy.close()


def test_a_rounds_adapter_gets_a_name_and_folder_of_its_own_on_servers(
    settings_folder: Path, stub: Stub, base: BaseModel
) -> None:
    settings = on_servers(url=stub.url, stall_seconds=7.0)
    policy = open_backend(settings, base).policy
    assert isinstance(policy, VllmPolicy)
    assert policy.stall_seconds == 7.0
    assert policy.identity().id != base.identity.id
    assert policy.identity().revision == base.identity.revision
    folder = make_adapter(base.policy.model, settings_folder / "made", layers=(1, 2))
    digest = adapter_digest(folder)
    name = load_folder(policy, folder, "pay", "round1", digest)
    assert name == f"pay@round1-{digest[:8]}"
    assert stub.names == {name}
    assert policy.identity(name).adapter == digest
    assert load_folder(policy, folder, "pay", "round1", digest) == name  # already there
    policy.close()
    assert stub.names == set()  # nothing stays behind
    # Another process of the round finds the folder; one that was changed is not loaded.
    again = open_backend(settings, base).policy
    config = settings.lora_folder / name / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2}))
    with pytest.raises(AdapterError, match="not what was trained"):
        load_folder(again, folder, "pay", "round1", digest)
    again.close()


def test_the_local_model_holds_two_versions_of_a_capability(settings_folder: Path, base: BaseModel) -> None:
    folder = make_adapter(base.policy.model, settings_folder / "made", layers=(1, 2))
    digest = adapter_digest(folder)
    name = load_folder(base.policy, folder, "pay", "round1", digest)
    assert name == f"pay@{digest[:8]}"
    assert replace(base.identity, adapter=digest) == base.policy.identity(name)
    newer = make_adapter(base.policy.model, settings_folder / "newer", layers=(1, 2), seed=9)
    other = load_folder(base.policy, newer, "pay", "round2", adapter_digest(newer))
    assert other != name
    assert {name, other} <= set(base.policy.adapters)
    for loaded in (name, other):
        base.policy.unload_adapter(loaded)


def test_a_round_that_is_dropped_leaves_nothing_on_the_servers(
    settings_folder: Path, stub: Stub, base: BaseModel
) -> None:
    context = Context(on_servers(url=stub.url), store=None, round=None)  # type: ignore[arg-type]
    context.__dict__["base"] = base
    folder = make_adapter(base.policy.model, settings_folder / "made", layers=(1, 2))
    name = load_folder(context.policy, folder, "pay", "round1", adapter_digest(folder))
    assert stub.names == {name}
    assert context.policy is context.backend.policy
    actor = context.backend.actor([1, 2, 3], "pay@round1")
    assert (actor.policy, actor.model) == (context.policy, base.policy.model)
    stages._OPEN["r"] = context
    forget("r")
    assert stub.names == set()


def test_a_new_adapter_is_probed_with_the_targets_first_task(settings_folder: Path, base: BaseModel) -> None:
    context = Context(load_settings(target="tests.tasks.counting_target:target"), store=None, round=None)  # type: ignore[arg-type]
    context.__dict__ |= {"base": base, "target": target}
    wanted = base.renderer.start(Prompt("Count.", target.environment().tools), [Message("user", "Count 0.")])
    assert context.probe == wanted
