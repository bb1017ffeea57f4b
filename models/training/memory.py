"""The memory that a training takes at its peak, from the shape of its model: told, and held against what there is,
before anything is played.

Counted are weights (with the copies that sampling and training keep of them), adapter with gradient and optimiser, what
the backward pass needs of each layer or, where that is more, what sampling needs before it, and the head.
`benchmarks/gpu.py` prints it beside the measured peak; those that it was held against are in
`benchmarks/findings/speed.md`.
What a layer keeps for its backward pass is counted in `tests/models/training/test_memory.py`, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from errors import ConfigurationError
from models.local.shapes import experts_of
from models.training.records import TrainingSettings

GIB = 2**30
# Python and its libraries on a CPU; CUDA's context on a GPU.
LIBRARIES = {"cpu": int(0.8 * GIB), "cuda": int(0.6 * GIB)}
# Rows of the head at once, whose logits are the largest tensors of the pass, and the bytes of all of them by word:
# logits, their chances and their slopes, in fp32.
HEAD_ROWS = 64
HEAD = HEAD_ROWS * 3 * 4
# Bytes of a weight of the adapter: itself, its gradient and Adam's two moments, in fp32.
LEARNT = 16
# What a configuration has to name, beside the width of its layers' inner part.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# What the names of architectures begin with that norm queries and keys; others say so by `use_qk_norm`.
NORMED = ("qwen3", "gemma3", "olmo2", "olmo3")


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration decides memory. A token goes through `chosen` of the `experts`. `normed`: queries
    and keys have norms of their own; `fused`: its layers have a pass of their own (`learner.py`)."""

    hidden: int
    layers: int
    heads: int
    groups: int
    dim: int
    inner: int
    vocabulary: int
    tied: bool
    experts: int
    chosen: int
    normed: bool
    fused: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], base: str = "") -> Shape:
        """From what the configuration of a model (`base`) says; of one that also sees, its language model. Raises
        `ConfigurationError` for one that names its sizes otherwise, such as Falcon's or GPT-2's."""
        given = config.get("text_config") or config
        experts, chosen = experts_of(given)
        inner = given.get("moe_intermediate_size") if experts > 1 else None
        kind = str(given.get("model_type") or "")
        needed = [*SIZES, *([] if inner else ["intermediate_size"])]
        if lacking := [name for name in needed if not given.get(name)]:
            raise ConfigurationError(
                f"the memory that a training of {base or 'a model'} (type {kind or 'unknown'}) takes cannot be told: "
                f"its configuration has no {', '.join(lacking)}; give a base_model that names its sizes so"
            )
        heads = int(given["num_attention_heads"])
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
            chosen=chosen,
            normed=bool(given.get("use_qk_norm", kind.startswith(NORMED))),
            fused=kind == "llama",
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
    def adapted(self) -> int:
        """Those of them that an adapter changes: experts have none (`lora.py`)."""
        return self.linear if self.experts == 1 else self.attention

    @property
    def qkv(self) -> int:
        """Weights of queries, keys and values: a layer's own pass holds them as one matrix beside the model's three."""
        return self.hidden * self.dim * (self.heads + 2 * self.groups)

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
        return rank * (attention + (3 * (self.hidden + self.inner) if self.experts == 1 else 0))


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its rows, the tokens of all of them and of the longest, behind a prefix that they share. `stored`
    are the tokens whose keys and values the process's own sampler had room for, in all rows."""

    rows: int
    tokens: int
    longest: int
    prefix: int
    stored: int = 0


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, by what they are for. What sampling takes is given back before activations come."""

    weights: int
    adapter: int
    activations: int
    sampling: int
    libraries: int

    @property
    def gib(self) -> float:
        return (self.weights + self.adapter + max(self.activations, self.sampling) + self.libraries) / GIB

    def times(self, many: int) -> Peak:
        """That of so many processes together."""
        return Peak(*(many * size for size in astuple(self)))

    def text(self) -> str:
        parts = {"weights": self.weights, "adapter": self.adapter, "activations": self.activations}
        if self.sampling > self.activations:
            del parts["activations"]
            parts["sampling"] = self.sampling
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
    kept = tokens * _of_layer(shape, settings.rank, width, sampling)
    if device == "cuda":  # torch's kernels want the prefix before the keys and values of every row, for all heads
        kept += batch.rows * batch.prefix * 2 * shape.heads * shape.dim * width
    if settings.recompute:
        # A layer keeps the stream that it was given, and only one has more at a time, with the gradients on their way.
        activations = tokens * (shape.hidden * learning + 3 * shape.chosen * shape.inner) * width + kept
    else:
        activations = kept * learning
    logits = HEAD * shape.vocabulary + batch.tokens * shape.hidden * (4 + width)
    learnt = learning * shape.adapter(settings.rank)
    return Peak(
        weights=_weights(shape, parts) * width + _copies(shape, learning, width, device, sampling),
        adapter=LEARNT * learnt + (4 * learnt if sampling else 0),  # the sampler has its own copy in fp32
        activations=activations + logits,
        sampling=_sampling(shape, learning, batch, width) if sampling and device == "cuda" else 0,
        libraries=LIBRARIES[device],
    )


def resident(shape: Shape, width: int) -> int:
    """Bytes that a round's process holds of a GPU while other processes train: the base, and CUDA's context."""
    return width * (shape.parameters + (shape.layers * shape.qkv if shape.fused else 0)) + LIBRARIES["cuda"]


def _weights(shape: Shape, parts: int) -> int:
    """Weights that a process holds: all of them, or its part, and whole the layer that is passed through, the next one,
    which is being gathered, and the words."""
    if parts == 1:
        return shape.parameters
    return math.ceil(shape.parameters / parts) + 2 * shape.linear + shape.words


def _of_layer(shape: Shape, rank: int, width: int, sampling: bool) -> int:
    """Bytes of a token that a layer keeps for its backward pass; attention's weights are made again in it. A CPU keeps
    some less: it does not repeat keys and values for all heads."""
    queries, keys = shape.heads * shape.dim, shape.groups * shape.dim
    if shape.fused:
        # Stream and its norm, twice; q, k and v as they come, turned, and padded by row; what attention saw; the gated
        # part's four.
        return width * (4 * shape.hidden + 5 * queries + 6 * keys + 3 * shape.inner + 7 * rank)
    norms = 4 * (2 * shape.hidden + (queries + keys if shape.normed else 0))  # what they are given, in fp32
    # Attention's queries, keys, values and what it makes of them, all heads of each; the gated part's three. What
    # several experts make is weighed.
    passed = width * (4 * queries + shape.chosen * 3 * shape.inner + (shape.experts > 1) * shape.chosen * shape.hidden)
    if sampling:  # adapters read what is narrow, with their layers (`learner.py`)
        return norms + passed + width * (adapters_read(shape, 4) + 7 * rank)
    return norms + passed + 4 * (adapters_read(shape, width) + 7 * rank)


def adapters_read(shape: Shape, width: int) -> int:
    """Numbers of a token that a layer's adapters keep of what they read, in fp32 as the adapters are: of a base that is
    narrower each makes a copy of its own under PEFT. No autocast, which would have them read what is narrow, is on."""
    first, second = (3, 2) if width < 4 else (1, 1)  # q, k and v read the same, and so do gate and up
    attention = first * shape.hidden + shape.heads * shape.dim
    return attention + (second * shape.hidden + shape.inner if shape.experts == 1 else 0)


def _sampling(shape: Shape, learning: int, batch: Batch, width: int) -> int:
    """Bytes that sampling takes of a GPU: weights copied for an adapter in or beside them, and keys and values."""
    return width * (learning * shape.adapted + 2 * shape.layers * shape.groups * shape.dim * batch.stored)


def _copies(shape: Shape, learning: int, width: int, device: str, sampling: bool) -> int:
    """Bytes of weights that are held a second time: arranged for the CPU's kernels, or several as one matrix."""
    linear, sampler, learner = shape.linear, 0, 0
    if device == "cpu":
        sampler = shape.layers * linear + shape.words if sampling else 0
        learner = 2 * (learning * linear + shape.words) if shape.fused and width == 4 else 0
    elif shape.fused:
        sampler = (shape.layers - learning) * shape.qkv
    if shape.fused and not learner:  # q, k and v as one, gate and up as one
        learner = learning * (shape.qkv + 2 * shape.hidden * shape.inner)
    return width * (sampler + learner)


@dataclass(frozen=True)
class Memory:
    """GiB that a process here may take, of so many that there are. Of a GPU other processes have `others`, and the
    round's own process will hold `own`, which are not free any more."""

    free: float
    total: float
    others: float = 0.0
    own: float = 0.0


def memory_there(device: str, alone: bool = False, gpus: Sequence[int] = (0,), own: int = 0) -> Memory:
    """What a process may take: of those of these GPUs with the least, what is free now (`alone`: all of it, as whoever
    has the rest will be asleep); else of the machine or its container. Of the first GPU the process that asks will hold
    `own` bytes."""
    if device == "cuda":
        return min((_of_gpu(gpu, alone, 0 if gpu else own) for gpu in gpus), key=lambda found: found.free)
    import psutil

    sizes = [int(psutil.virtual_memory().total)]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        sizes.append(int(text))
    return Memory(min(sizes) / GIB, min(sizes) / GIB)


def _of_gpu(gpu: int, alone: bool, own: int) -> Memory:
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    # What an earlier round has left in torch's hands is taken again by the next.
    free += torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    others = total - free - torch.cuda.memory_allocated(gpu)
    if alone:
        free, others = total, 0
    return Memory(max(0, free - own) / GIB, total / GIB, others / GIB, own / GIB)
