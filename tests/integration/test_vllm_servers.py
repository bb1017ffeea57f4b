"""Policy, training and adapter lifecycle against a real vLLM server (CPU build) with the embedded model.

One server for the module; only the last test starts it again. The adapters are random: made in a second, not trained.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from db import open_store
from environments.contract import Message, Prompt
from errors import AdapterError, ContextOverflow, PolicyError
from models.adapters.files import CONFIG, WEIGHTS, RegisteredAdapter, adapter_digest
from models.adapters.limits import ServerLimits, linear_modules
from models.adapters.loading import fingerprint_on, load_folder
from models.adapters.registry import Registry
from models.local.base import BaseModel
from models.policy import Request, Sampling
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import AdapterState
from models.training.actors import VllmActor
from models.training.grpo import StepRecord, train_adapter
from models.vllm.answers import ModelMissing
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from settings import load_settings
from tasks.measuring.policy_names import PolicyOptions
from tasks.measuring.targets import EvaluateRequest, evaluate_targets
from tasks.round.policies import open_backend
from tasks.round.registry import open_registry
from tests.adapters_made import make_adapter, renamed
from tests.integration.vllm_servers import DTYPE, MAX_RANK, MISSING, Server, World, adapters_on, installed, vllm_server
from tests.models.training.test_grpo import SMALL, Source, Toy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.model,
    pytest.mark.skipif(not installed(), reason=MISSING),
]

TEXT = (
    "Order 314 was a blue lamp. It came broken, so the customer asks: please cancel order 314 and refund it to my card."
)
# Nats. The same weights on another engine: bfloat16 moves a token's log-probability by some hundredths.
TOLERANCE = 1e-2 if DTYPE == "float32" else 0.3
PER_SECOND, SECONDS = 20, 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with vllm_server(tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture(scope="module")
def world(server: Server, embedded_model: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    policy, renderer = embedded_model
    folder = tmp_path_factory.mktemp("registry")
    registry = Registry(f"sqlite:///{folder / 'mlflow.db'}", "made", folder / "artifacts")
    client = VllmServer(server.url, "base", seconds=120)
    base = policy.identity()
    limits = ServerLimits(base.base, base.revision, MAX_RANK, linear_modules(policy.model))
    text = renderer.tokenizer(TEXT)["input_ids"]
    made = World(policy, renderer, text, client, registry, registry.start_run("made"))
    made.fleet = Fleet(made, [VllmHost(client)], folder / "served", limits)
    yield made
    client.close()


@pytest.fixture(scope="module")
def remote(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPolicy]:
    """The policy as the settings open it."""
    home = tmp_path_factory.mktemp("home")
    settings = load_settings(
        home=home, policy={"backend": "vllm", "url": world.server.url, "concurrency": 16, "max_lora_rank": MAX_RANK}
    )
    opened = open_backend(settings, BaseModel(world.local, world.renderer, world.local.identity())).policy
    assert isinstance(opened, VllmPolicy)
    yield opened
    opened.close()


def test_ids_and_logprobs_are_those_of_the_local_backend(world: World, remote: VllmPolicy, tmp_path: Path) -> None:
    folder = make_adapter(world.local.model, tmp_path / "made", size=0.3)
    digest = adapter_digest(folder)
    world.local.load_adapter("made", digest, folder)
    remote.load_adapter("made@v1-same", digest, folder)
    assert remote.identity("made@v1-same").adapter == world.local.identity("made").adapter
    assert remote.identity().id != world.local.identity().id
    try:
        for adapter, temperature in ((None, 0.0), ("made", 0.0), (None, 0.7), ("made", 0.7)):
            prompts = [world.text[: 12 + 3 * i] for i in range(4)]
            served = f"{adapter}@v1-same" if adapter else None
            asked = [Request(f"{i}", p, Sampling(temperature, 6, i), served) for i, p in enumerate(prompts)]
            answers = remote.generate(asked)
            gaps = []
            for prompt, answer in zip(prompts, answers, strict=True):
                assert len(answer.ids) == 6 or answer.ids[-1] in remote.stop_ids
                for at, (token, value) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
                    raw = world.local.next_logprobs([*prompt, *answer.ids[:at]], 0, adapter)
                    mine = torch.log_softmax(raw / (temperature or 1.0), dim=-1)
                    gaps.append(abs(float(mine[token]) - value))
                    if not temperature:  # greedy: the local choice, unless the two are a rounding apart
                        assert float(mine.max() - mine[token]) < TOLERANCE
            assert sum(gaps) / len(gaps) < TOLERANCE / 3
            assert max(gaps) < TOLERANCE
            if temperature:
                # The seed decides. Alone both times: what else is in a batch moves bfloat16's last digits.
                first, again = (remote.generate(asked[:1])[0].ids for _ in range(2))
                assert first == again
                others = [
                    Request(f"other-{i}", prompts[0], Sampling(temperature, 6, 100 + i), served) for i in range(4)
                ]
                assert any(remote.generate([other])[0].ids != first for other in others)
    finally:
        world.local.unload_adapter("made")
        remote.unload_adapter("made@v1-same")


def test_scores_are_those_of_the_local_backend(world: World) -> None:
    local, remote = (p.score(world.text, 12) for p in (world.local, world.server))
    assert max(abs(a - b) for a, b in zip(local, remote, strict=True)) < TOLERANCE


def test_the_server_refuses_what_cannot_work_in_our_words(world: World, remote: VllmPolicy) -> None:
    with pytest.raises(ContextOverflow):
        world.server.complete({"model": "base", "prompt": [1] * 1024, "max_tokens": 4})
    with pytest.raises(ContextOverflow):
        remote.submit(Request("x", [1] * 1023, Sampling(0.0, 4)))
    with pytest.raises(PolicyError, match="400"):
        world.server.complete({"model": "base", "prompt": [10**7], "max_tokens": 1})
    with pytest.raises(ModelMissing):
        world.server.complete({"model": "ghost", "prompt": [1], "max_tokens": 1})
    assert world.server.unload("ghost") is False


def test_a_release_with_four_broken_members_leaves_the_one_before_whole(world: World, tmp_path: Path) -> None:
    right = make_adapter(world.local.model, tmp_path / "right", seed=1)
    good = world.register("correct", right)
    world.release(good)
    zero = world.register("zero_b", make_adapter(world.local.model, tmp_path / "zero", size=0.0), like=right)
    base = world.register("wrong_base", make_adapter(world.local.model, tmp_path / "base", seed=2), like=right)
    modules = world.register("wrong_modules", renamed(right, tmp_path / "modules", "q_proj", "query"), like=right)
    cut = world.register("truncated", make_adapter(world.local.model, tmp_path / "cut", seed=3))
    stored = world.registry.download(cut, tmp_path / "fetched")
    root = world.registry.artifact_root
    assert root is not None
    for file in root.rglob(WEIGHTS):
        if file.read_bytes() == (stored / WEIGHTS).read_bytes():
            file.write_bytes(file.read_bytes()[:-1000])
    before = world.fleet.standing().serving.number
    world.release(good, zero, base, modules, cut)
    found, standing = {a.capability: (a.state, a.reason) for a in world.fleet.adapters()}, world.fleet.standing()
    assert {c for c, (state, _) in found.items() if state == AdapterState.LIVE} == {"correct"}
    words = {"zero_b": "not live", "wrong_modules": "query", "truncated": "", "wrong_base": "not what was registered"}
    for capability, word in words.items():
        assert found[capability][0] == AdapterState.REFUSED
        assert word in found[capability][1], found[capability]
        assert found[capability][1] in standing.problem
    assert (standing.serving.number, standing.wanted) == (before, before + 1)
    # Nothing that was refused stays on the server, and requests for it go to the base.
    assert adapters_on(world.server) == {good.served_name}
    assert world.answers("zero_b") is None
    live = world.answers("correct")
    assert live is not None
    assert live.replicas == (world.server.url,)
    world.release(good)
    assert [a.capability for a in world.fleet.adapters()] == ["correct"]


def test_the_server_itself_refuses_what_the_checks_would_have_stopped(world: World, tmp_path: Path) -> None:
    big = make_adapter(world.local.model, tmp_path / "big", rank=2 * MAX_RANK)
    with pytest.raises(AdapterError, match="refuses"):
        world.server.load("big@v1-0", str(big))
    with pytest.raises(AdapterError, match="lora_folder"):
        world.server.load("none@v1-0", str(tmp_path / "nowhere"))
    whole = make_adapter(world.local.model, tmp_path / "whole")
    (whole / WEIGHTS).write_bytes((whole / WEIGHTS).read_bytes()[:-500])
    with pytest.raises(AdapterError, match="refuses"):
        world.server.load("cut@v1-0", str(whole))
    assert (whole / CONFIG).is_file()
    assert not {"big@v1-0", "none@v1-0", "cut@v1-0"} & set(world.server.models())


def test_an_adapter_that_vanishes_is_reported_and_comes_back(world: World, remote: VllmPolicy, tmp_path: Path) -> None:
    (served,) = world.fleet.adapters()
    world.server.unload(served.name)
    generation, acquired = world.take("correct")
    assert acquired is not None
    with pytest.raises(ModelMissing):
        world.server.complete({"model": served.name, "prompt": world.text, "max_tokens": 1})
    world.fleet.report(served.name, world.server.url)
    world.fleet.leave(generation, served.name)
    assert world.answers("correct") is None
    world.fleet.reconcile()
    assert world.answers("correct") is not None
    assert world.server.complete({"model": served.name, "prompt": world.text, "max_tokens": 1}).ids
    # In a rollout the policy loads it again by itself.
    folder = make_adapter(world.local.model, tmp_path / "made", seed=5)
    remote.load_adapter("made@v2-gone", "d", folder)
    world.server.unload("made@v2-gone")
    (answer,) = remote.generate([Request("x", world.text, Sampling(0.0, 2), "made@v2-gone")])
    assert answer.ids
    remote.unload_adapter("made@v2-gone")


def test_promotion_under_load_fails_no_request(
    world: World, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """20 requests a second of 2 tokens while version 2 takes the place of version 1."""
    one = world.register("load", make_adapter(world.local.model, tmp_path / "one", seed=11))
    correct = world.wanted.members["correct"]  # type: ignore[union-attr]
    world.release(correct, one)
    two: list[RegisteredAdapter] = []
    answered: Counter[str] = Counter()
    failed: list[BaseException] = []
    lock = threading.Lock()

    def request(number: int) -> None:
        generation, served = world.take("load")
        try:
            assert served is not None, "no adapter to route to"
            prompt = world.text[: 8 + number % 8]
            done = world.server.complete({"model": served.name, "prompt": prompt, "max_tokens": 2, "ignore_eos": True})
            assert len(done.ids) == 2
            with lock:
                answered[served.name] += 1
        except (AssertionError, AdapterError, PolicyError) as problem:
            failed.append(problem)
        finally:
            world.fleet.leave(generation, served.name if served else "")

    def promote() -> None:
        two.append(world.register("load", make_adapter(world.local.model, tmp_path / "two", seed=12)))
        world.release(correct, two[0], follow=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(64) as pool:
        promoting = None
        for number in range(PER_SECOND * SECONDS):
            time.sleep(max(0.0, began + number / PER_SECOND - time.perf_counter()))
            pool.submit(request, number)
            if number == PER_SECOND:
                promoting = threading.Thread(target=promote)
                promoting.start()
    seconds = time.perf_counter() - began
    assert promoting is not None
    promoting.join(300)
    record_property("answered per second", round(sum(answered.values()) / seconds, 1))
    assert failed == []
    assert sum(answered.values()) == PER_SECOND * SECONDS
    assert answered[one.served_name]
    assert world.fleet.standing().serving.number == world.wanted.number, world.fleet.standing().problem  # type: ignore[union-attr]
    world.fleet.follow()  # what nobody uses any more is taken from the server
    assert one.served_name not in world.server.models()
    request(0)
    assert failed == []
    assert answered[two[0].served_name]


def test_grpo_samples_on_the_server_with_each_steps_adapter(world: World, remote: VllmPolicy, tmp_path: Path) -> None:
    steps: list[StepRecord] = []
    shared = tmp_path / "shared"
    shared.mkdir()
    loaded: list[str] = []
    load = remote.load_adapter

    def watched(name: str, digest: str, folder: Path) -> None:
        loaded.append(name)
        load(name, digest, folder)

    remote.load_adapter = watched  # type: ignore[method-assign]
    before = set(world.server.models())
    actor = VllmActor(remote, world.local.model, shared, world.text, "toy@round")
    try:
        result = train_adapter(
            Source(), actor, world.renderer, replace(SMALL, learning_rate=1e-3), tmp_path / "out", steps.append
        )
    finally:
        remote.load_adapter = load  # type: ignore[method-assign]
    assert [s.step for s in steps] == [1, 2]
    assert len(set(loaded)) == 2  # a name for each step, used once
    for step in steps:
        assert step.logprob_gap < TOLERANCE / 3
        assert step.metrics["sampler_ratio"] == pytest.approx(1.0, abs=0.1)
        assert step.metrics["sampler_ratio_worst"] < 2
        assert step.metrics["gap_alarm"] == 0.0
    assert set(world.server.models()) == before
    assert list(shared.iterdir()) == []
    assert (result.folder / WEIGHTS).is_file()
    # What was trained is loaded for evaluation under a name of its own, and its fingerprint is taken on the server.
    strong = make_adapter(world.local.model, tmp_path / "strong", size=0.3, seed=21)
    digest = adapter_digest(strong)
    name = load_folder(remote, strong, "toy", "round1", digest)
    assert name == f"toy@round1-{digest[:8]}"
    probe = world.renderer.start(Prompt.of(Toy()), [Message("user", "Please cancel order 314.")])
    taken = fingerprint_on(remote, probe, name)
    assert taken.largest_move > 0.1
    remote.unload_adapter(name)


def test_a_registered_adapter_is_evaluated_on_the_server(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "tests.tasks.counting_target:target"
    settings = load_settings(home=tmp_path / "home", policy={"backend": "vllm", "url": world.server.url})
    registry = open_registry(settings, target)
    mine = World(world.local, world.renderer, world.text, world.server, registry, registry.start_run("x"))
    made = mine.register("count", make_adapter(world.local.model, tmp_path / "count", size=0.3, seed=5))
    monkeypatch.setenv("TRACE_POLICY__BACKEND", "vllm")
    monkeypatch.setenv("TRACE_POLICY__URL", world.server.url)
    before = set(world.server.models())
    row, base_row = (
        evaluate_targets(
            EvaluateRequest(target, "test", policy, home=tmp_path / "home"),
            PolicyOptions(temperature=0.0, max_tokens=8),
        )[0]
        for policy in ("smollm2-135m@count", "smollm2-135m")
    )
    assert row.owed == base_row.owed == 0
    assert set(world.server.models()) == before  # nothing stays behind
    with open_store(settings.database_url) as store:
        played, plain = ([t.messages for t in store.trajectories(None, group_id=r.evaluation)] for r in (row, base_row))
        ids = {t.adapter_id for t in store.trajectories(None, group_id=row.evaluation)}
    assert len(played) == len(plain) == 8
    assert played != plain  # the adapter sampled
    assert all(name and name.startswith(made.served_name) for name in ids)


def test_a_server_that_was_started_again_gets_its_adapters_back(world: World, server: Server) -> None:
    before = {a.name for a in world.fleet.adapters() if a.state == AdapterState.LIVE}
    assert before
    server.stop()
    changes = world.fleet.reconcile()
    assert world.answers("correct") is None
    assert any("is away" in c for c in changes)
    server.start()
    assert adapters_on(world.server) == set()
    world.fleet.reconcile()
    assert before <= set(world.server.models())
    served = world.answers("correct")
    assert served is not None
    assert world.server.complete({"model": served.name, "prompt": world.text, "max_tokens": 1}).ids
