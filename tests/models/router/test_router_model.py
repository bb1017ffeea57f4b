"""The router on the embedded model and the shop's generated tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from environments.contract import Message, Observation, TargetTask
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import target
from errors import ConfigurationError, PolicyError
from models.adapters.deltas import Delta
from models.local.policy import LocalPolicy
from models.policy import Request, Sampling
from models.renderer import Renderer
from models.router.first_observation import embed, embed_openings, layer_range, openings
from models.router.label_prompt import Candidate, label_probabilities
from models.router.router import Router
from models.router.validation import accuracy, choose_mode
from tests.tokenizers_trained import plain_twin

pytestmark = pytest.mark.model
Embedded = tuple[LocalPolicy, Renderer]
CAPABILITY = {"refund": "refund_payment", "move": "change_address", "swap": "exchange_item"}
# `benchmarks/router.py` measures with 25 and 10.
TRAINING_SEEDS, TEST_SEEDS = range(8), range(1000, 1004)


def drawn(seeds: Iterable[int]) -> tuple[list[TargetTask], list[str]]:
    tasks = [target().generate(family, seed) for family in FAMILIES for seed in seeds]
    return tasks, [CAPABILITY.get(task.family.partition("_")[0], "") for task in tasks]


@pytest.fixture(scope="module")
def router(embedded_model: Embedded) -> Router:
    policy, renderer = embedded_model
    tasks, labels = drawn(TRAINING_SEEDS)
    vectors = embed_openings(policy, openings(target().environment, renderer, tasks))
    return Router.fit(vectors, labels, [t.id for t in tasks])


def test_unseen_requests_get_their_adapter_or_none(embedded_model: Embedded, router: Router) -> None:
    policy, renderer = embedded_model
    tasks, truth = drawn(TEST_SEEDS)
    decisions = router.route(policy, renderer, openings(target().environment, renderer, tasks))
    needs = [i for i, label in enumerate(truth) if label]
    alone = [i for i, label in enumerate(truth) if not label]
    assert accuracy([decisions[i] for i in needs], [truth[i] for i in needs]) >= 0.9
    assert accuracy([decisions[i] for i in alone], [truth[i] for i in alone]) >= 0.8
    assert all(d.milliseconds > 0 for d in decisions)


def test_vectors_are_the_models_own_hidden_states(embedded_model: Embedded) -> None:
    """Against a plain forward pass of the whole prompt, one prompt at a time, without the shared prefix."""
    policy, renderer = embedded_model
    tasks, _ = drawn(range(1))
    given = openings(target().environment, renderer, [tasks[0], tasks[4], tasks[-1]])
    vectors = embed(policy, [one.prompt for one in given], given[0].shared)
    first, last = layer_range(policy.model.config.num_hidden_layers)
    plain = plain_twin(policy)
    for one, vector in zip(given, vectors, strict=True):
        with torch.no_grad():
            states = plain.model(torch.tensor([one.prompt]), output_hidden_states=True).hidden_states
        expected = torch.stack([s[0, one.shared :].float() for s in states[first : last + 1]]).mean(dim=(0, 1))
        # In bf16 the two ways round differently: its numbers have 8 bits.
        near = 1e-3 if states[0].dtype == torch.float32 else 2e-2
        np.testing.assert_allclose(vector, expected.numpy(), rtol=near, atol=near * float(expected.abs().max()))


def test_embedding_leaves_open_sessions_alone(embedded_model: Embedded) -> None:
    policy, renderer = embedded_model
    tasks, _ = drawn(range(1))
    given = openings(target().environment, renderer, tasks[:3])
    name = "model.layers.0.self_attn.q_proj"
    weight = policy.decoder.layers[name].base
    policy.load_deltas("loud", "0", {name: Delta.dense(torch.full_like(weight, 0.01))})

    def answer(between: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
        sampling = Sampling(0.0, 6)
        policy.submit(Request("s", given[0].prompt, sampling, "loud", given[0].shared))
        if between:
            embed_openings(policy, given)
        done = policy.poll()[0]
        prompt = (*given[0].prompt, *done.ids)
        if between:
            embed_openings(policy, given)
        again = policy.generate([Request("s", prompt, sampling, "loud", given[0].shared)])[0]
        return done.ids + again.ids, done.logprobs + again.logprobs

    before = embed_openings(policy, given)
    plain, interrupted = answer(False), answer(True)
    assert interrupted[0] == plain[0]
    np.testing.assert_allclose(interrupted[1], plain[1], atol=1e-4)
    np.testing.assert_allclose(embed_openings(policy, given), before, atol=1e-4)
    policy.unload_adapter("loud")


def test_label_probabilities_are_calibrated(embedded_model: Embedded) -> None:
    policy, renderer = embedded_model
    candidates = [Candidate("refund_payment", "give money back"), Candidate("")]
    label = label_probabilities(policy, renderer, candidates, ["N/A", "Refund order 5.", "Where is <|im_end|>?"])
    assert label.shape == (3, 2)
    np.testing.assert_allclose(label.sum(axis=1), 1, atol=1e-6)
    # The empty request is what is divided by: no preference is left.
    np.testing.assert_allclose(label[0], 0.5, atol=1e-3)
    with pytest.raises(ConfigurationError, match="27 candidates"):
        label_probabilities(policy, renderer, [Candidate(f"c{i}") for i in range(27)], ["x"])


def test_retrieval_stays_unless_labels_are_better(embedded_model: Embedded, router: Router) -> None:
    policy, renderer = embedded_model
    tasks, truth = drawn(range(2000, 2001))
    rows = list(zip(openings(target().environment, renderer, tasks), truth, strict=True))
    choice = choose_mode(router, policy, renderer, rows)
    assert set(choice.accuracies) == {"retrieval", "label", "both"}
    best = max(choice.accuracies.values())
    assert choice.mode == "retrieval" or choice.accuracies[choice.mode] == best > choice.accuracies["retrieval"] + 0.02
    # With truth turned around, retrieval is nearly always wrong, and the choice follows the evidence.
    turned = [(one, "" if label else "refund_payment") for one, label in rows]
    assert choose_mode(router, policy, renderer, turned).mode != "retrieval"


def test_wrong_base_and_mixed_prefixes_are_refused(embedded_model: Embedded, router: Router) -> None:
    policy, renderer = embedded_model
    given = openings(target().environment, renderer, drawn(range(1))[0][:2])
    with pytest.raises(ConfigurationError, match="fit it again"):
        replace(router, source="another").route(policy, renderer, given)
    with pytest.raises(PolicyError, match="differs from prompt 0"):
        embed(policy, [given[0].prompt, (5, *given[1].prompt[1:])], given[0].shared)
    assert replace(router, source=policy.identity().id).route(policy, renderer, given)


def test_every_task_opens_behind_one_prompt_also_where_tools_differ(embedded_model: Embedded) -> None:
    """A router is fitted and served behind one prompt; behind a task's own, hidden states would be others."""
    tasks = [TargetTask(str(n), "test", "f", n, {}) for n in range(3)]
    made = iter(range(3))

    def environment() -> Any:
        n = next(made)
        tool = {
            "type": "function",
            "function": {"name": f"tool_{n}", "parameters": {"type": "object", "properties": {}}},
        }
        first = Observation((Message("user", f"number {n}"),))
        return SimpleNamespace(
            instructions="", tools=(tool,), examples=(), max_steps=1, reset=lambda task: first, close=lambda: None
        )

    given = openings(environment, embedded_model[1], tasks)
    assert len({(one.prompt[: one.shared], one.shared) for one in given}) == 1
    assert len({one.prompt for one in given}) == 3
