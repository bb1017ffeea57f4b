"""What a router sees of a task: its first observation, and the base model's hidden states over it.

The vector is the mean over the first observation's own tokens and over a range of middle layers, where a small model
holds what a request is about and whether what is offered fits it; the last layers hold the next token. The shared
prefix (instructions and examples) is computed once and kept by the policy. Not covered: policies outside this process,
which do not show hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from environments.contract import Environment, Message, Prompt, TargetTask
from errors import ConfigurationError, EnvironmentFault, PolicyError, TargetError
from models.local.policy import LocalPolicy
from models.opening import opened
from models.renderer import Renderer

# Decoder layers whose outputs are averaged, counted from 1, and the depth of the model that they were measured with. A
# regression tells BFCL's validation tasks without a fitting function from others with an AUC of 0.93 on 3 to 8, 0.97 on
# 9 to 16, 0.97 on 14 to 22 and 0.87 on 22 to 28; on the shop the first two route alike
# (benchmarks/findings/router.md). The pass ends after the last, and a decision's time is in proportion to it.
LAYERS = (9, 16)
MEASURED_DEPTH = 30
# Tokens of own per forward pass; bounds the memory of one pass.
TOKENS_PER_PASS = 1024


@dataclass(frozen=True)
class Opening:
    """A task as it begins: ids up to the end of the first observation, how many of them all tasks share (turn marker
    included), and the first observation's text (for the label prompt)."""

    prompt: tuple[int, ...]
    shared: int
    text: str


def opening_of(prompt: Prompt, renderer: Renderer, first: Sequence[Message]) -> Opening:
    """The opening that begins with the messages `first`, without the turn markers around them: those are equal for
    all tasks, and half of the tokens of a short request."""
    start = renderer.start(prompt, first)
    before = prompt.examples[-1].role if prompt.examples else "system"
    shared = start.shared + len(renderer.separator(before, first[0].role))
    end = len(start.ids) - len(renderer.opening(first[-1].role))
    if shared >= end:  # nothing was said: the markers are all there is
        shared, end = start.shared, len(start.ids)
    return Opening(tuple(start.ids[:end]), shared, "\n".join(m.content for m in first))


def openings(
    make: Callable[[], Environment], renderer: Renderer, tasks: Sequence[TargetTask], prompt: Prompt | None = None
) -> list[Opening]:
    """The openings of `tasks`, each from an environment of its own, behind `prompt`: one for all, as a router is fitted
    and served behind one, also where tools differ by task. None: that of the first task."""
    found = []
    for task in tasks:
        opening, prompt = _opened(make, renderer, task, prompt)
        found.append(opening)
    return found


def openings_by_task(
    make: Callable[[], Environment], renderer: Renderer, tasks: Sequence[TargetTask], prompt: Prompt
) -> dict[str, Opening]:
    """The openings of `tasks` by id, without those on which the environment faults: nothing can be routed there, and
    their episodes will tell."""
    found = {}
    for task in tasks:
        with suppress(EnvironmentFault, TargetError):
            found[task.id] = _opened(make, renderer, task, prompt)[0]
    return found


def _opened(
    make: Callable[[], Environment], renderer: Renderer, task: TargetTask, prompt: Prompt | None
) -> tuple[Opening, Prompt]:
    shown, first = opened(make, task)
    prompt = prompt or shown
    return opening_of(prompt, renderer, first), prompt


def layer_range(depth: int, layers: tuple[int, int] = LAYERS) -> tuple[int, int]:
    """First and last decoder layer (from 1, both included) to average for a model of `depth` layers.

    A model shallower than the measured one gives the same share of its own depth.
    """
    first, last = layers
    if not 1 <= first <= last:
        raise ConfigurationError(f"layers {layers} are no range; give first and last layer, 1 <= first <= last")
    scale = min(1.0, depth / max(MEASURED_DEPTH, last))
    first, last = max(1, round(first * scale)), max(1, round(last * scale))
    return first, last


def embed(
    policy: LocalPolicy, prompts: Sequence[Sequence[int]], shared: int, layers: tuple[int, int] = LAYERS
) -> np.ndarray:
    """Vectors (n, hidden), float32, of `prompts`, whose first `shared` ids are equal.

    Hidden states of the base model without any adapter, averaged over the ids after the shared ones and over decoder
    layers `layers` (adapted by `layer_range`). Raises `PolicyError` if the prompts differ within the shared ids.
    """
    if not prompts:
        return np.zeros((0, int(policy.model.config.hidden_size)), dtype=np.float32)
    prefix = tuple(prompts[0][:shared])
    odd = next((i for i, prompt in enumerate(prompts) if tuple(prompt[:shared]) != prefix), None)
    if odd is not None:
        raise PolicyError(
            f"prompt {odd} differs from prompt 0 within the {shared} shared ids; embed one target at a time"
        )
    own = [list(prompt[shared:]) for prompt in prompts]
    used = layer_range(int(policy.model.config.num_hidden_layers), layers)
    # Rows of like length together: a pass is as wide as its longest row.
    order = sorted(range(len(own)), key=lambda i: len(own[i]))
    vectors: dict[int, np.ndarray] = {}
    for batch in _batches(order, own):
        states = policy.forward_rows([own[i] for i in batch], prefix, used)
        parts = states.split([len(own[i]) for i in batch])
        vectors |= {i: part.mean(dim=0).cpu().numpy() for i, part in zip(batch, parts, strict=True)}
    return np.stack([vectors[i] for i in range(len(own))])


def embed_openings(policy: LocalPolicy, given: Sequence[Opening], layers: tuple[int, int] = LAYERS) -> np.ndarray:
    """Vectors (n, hidden) of openings; those with different shared prefixes are embedded apart."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(given):
        groups.setdefault(one.prompt[: one.shared], []).append(index)
    shape: Any = policy.model.config
    vectors = np.zeros((len(given), int(shape.hidden_size)), dtype=np.float32)
    for prefix, members in groups.items():
        vectors[members] = embed(policy, [given[i].prompt for i in members], len(prefix), layers)
    return vectors


def _batches(order: Sequence[int], rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices in `order`, cut where padding to the longest row would pass `TOKENS_PER_PASS`."""
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * len(rows[index]) <= TOKENS_PER_PASS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
