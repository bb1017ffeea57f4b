"""The memory that a training takes at its peak, from the shape of its model: told, and held against what there is,
before anything is played.

Counted are weights (with the copies that sampling and training keep of them), adapter with gradient and optimiser, what
the backward pass needs of each layer, and the head. `benchmarks/gpu.py` prints it beside the measured peak; those
that it was held against are in `benchmarks/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.training.records import TrainingSettings

GIB = 2**30
# Python and its libraries on a CPU; CUDA's context on a GPU.
LIBRARIES = {"cpu": int(0.8 * GIB), "cuda": int(0.6 * GIB)}
# Rows of the head at once (`learner.HEAD_ROWS`), each a row of logits, their chances and their slopes in fp32.
HEAD_ROWS, HEAD = 64, 64 * 3 * 4
# Bytes of a weight of the adapter: itself, its gradient and Adam's two moments, in fp32.
LEARNT = 16


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration decides memory. `fused`: its layers have a pass of their own (`learner.py`)."""

    hidden: int
    layers: int
    heads: int
    groups: int
    dim: int
    inner: int
    vocabulary: int
    tied: bool
    experts: int
    fused: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From what `config.json` says; of a model that also sees, its language model."""
        given = config.get("text_config") or config
        heads = int(given["num_attention_heads"])
        experts = int(given.get("num_experts") or given.get("num_local_experts") or 1)
        inner = given.get("moe_intermediate_size") if experts > 1 else None
        return cls(
            hidden=int(given["hidden_size"]),
            layers=int(given["num_hidden_layers"]),
            heads=heads,
            groups=int(given.get("num_key_value_heads") or heads),
            dim=int(given.get("head_dim") or given["hidden_size"] // heads),
            inner=int(inner or given["intermediate_size"]),
            vocabulary=int(given["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", given.get("tie_word_embeddings", False))),
            experts=experts,
            fused=given.get("model_type") == "llama",
        )

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return self.hidden * self.dim * (2 * self.heads + 2 * self.groups)

    @property
    def linear(self) -> int:
        """Weights of a layer that multiply."""
        return self.attention + 3 * self.hidden * self.inner * self.experts

    @property
    def words(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.linear + self.words * (1 if self.tied else 2)

    def adapter(self, rank: int) -> int:
        """Weights of the adapter of one layer."""
        attention = 2 * self.hidden + 2 * self.heads * self.dim + 2 * (self.hidden + self.groups * self.dim)
        return rank * (attention + 3 * (self.hidden + self.inner) * self.experts)


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its rows, the tokens of all of them and of the longest, behind a prefix that they share."""

    rows: int
    tokens: int
    longest: int
    prefix: int


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, by what they are for."""

    weights: int
    adapter: int
    activations: int
    libraries: int

    @property
    def gib(self) -> float:
        return (self.weights + self.adapter + self.activations + self.libraries) / GIB

    def text(self) -> str:
        parts = {"weights": self.weights, "adapter": self.adapter, "activations": self.activations}
        return f"{self.gib:.1f} GiB ({', '.join(f'{name} {size / GIB:.1f}' for name, size in parts.items())})"


def expected_peak(
    shape: Shape,
    settings: TrainingSettings,
    batch: Batch,
    width: int,
    device: str,
    sampling: bool = True,
    parts: int = 1,
) -> Peak:
    """The peak of a training process. `width` is bytes of a number, `device` "cpu" or "cuda"; `sampling`: the process
    samples, too. It holds one of so many `parts` of the weights."""
    if parts > 1:
        shape, sampling = replace(shape, fused=False), False  # such a model goes through transformers
    learning = shape.layers if settings.upper_layers is None else min(shape.layers, settings.upper_layers)
    tokens = batch.tokens + batch.prefix
    kept = _of_layer(shape, settings.rank, width, tokens, device)
    # Recomputed, a layer keeps the stream that it was given, and only one has more at a time.
    activations = tokens * shape.hidden * width * learning + kept if settings.recompute else kept * learning
    logits = HEAD * shape.vocabulary + batch.tokens * shape.hidden * (4 + width)
    learnt = learning * shape.adapter(settings.rank)
    return Peak(
        weights=_weights(shape, parts) * width + _copies(shape, learning, width, device, sampling),
        adapter=LEARNT * learnt + (4 * learning * shape.linear if sampling else 0),  # sampling adds whole matrices
        activations=activations + logits,
        libraries=LIBRARIES[device],
    )


def _weights(shape: Shape, parts: int) -> int:
    """Weights that a process holds: all of them, or its part, and whole the layer that is passed through, the next one,
    which is being gathered, and the words."""
    if parts == 1:
        return shape.parameters
    return math.ceil(shape.parameters / parts) + 2 * shape.linear + shape.words


def _of_layer(shape: Shape, rank: int, width: int, tokens: int, device: str) -> int:
    """Bytes that a layer keeps for its backward pass; attention's weights are made again in it."""
    queries, keys = shape.heads * shape.dim, shape.groups * shape.dim
    if shape.fused:
        # Stream and its norm, twice; q, k and v as they come, turned, and padded by row; what attention saw; the gated
        # part's four.
        numbers = 4 * shape.hidden + 5 * queries + 6 * keys + 4 * shape.inner + 7 * rank
        return tokens * numbers * width
    if width == 4:
        copies = 0
    elif device == "cuda":  # norms in fp32; autocast has the adapters read what is narrow
        copies = 2 * 4 * shape.hidden
    else:  # norms in fp32, and an fp32 copy of what each of the seven adapters reads
        copies = 4 * (5 * shape.hidden + queries + shape.inner) + 4 * 4 * shape.hidden
    numbers = 8 * shape.hidden + 7 * queries + 8 * keys + 5 * shape.inner + 7 * rank
    return tokens * (numbers * width + copies)


def _copies(shape: Shape, learning: int, width: int, device: str, sampling: bool) -> int:
    """Bytes of weights that are held a second time: arranged for the CPU's kernels, or several as one matrix."""
    linear, sampler, learner = shape.linear, 0, 0
    if device == "cpu":
        sampler = shape.layers * linear + shape.words if sampling else 0
        learner = 2 * (learning * linear + shape.words) if shape.fused and width == 4 else 0
    if shape.fused and not learner:  # q, k and v as one, gate and up as one
        stacked = shape.hidden * (shape.dim * (shape.heads + 2 * shape.groups) + 2 * shape.inner)
        learner = learning * stacked
    return width * (sampler + learner)


def memory_there(device: str, alone: bool = False) -> float:
    """GiB that a process here may take: of the GPU with the least, what is free now (`alone`: all of it, as whoever has
    the rest will be asleep); else of the machine or its container."""
    if device == "cuda":
        import torch

        return min(torch.cuda.mem_get_info(i)[alone] for i in range(torch.cuda.device_count())) / GIB
    import psutil

    found = [int(psutil.virtual_memory().total)]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found) / GIB
