"""The forward pass of sampling, in as few operations as the machine has kernels for.

transformers' own pass of the embedded model spends three quarters of a decoding step outside matrix products
(benchmarks/findings/speed.md): masks, copies, concatenations, the norm in six operations and the rotation in ten. For
the Llama family, whose layers are known exactly, `FusedDecoder` computes the same numbers with q, k and v as one
matrix, the gate, its product and the residual sums inside the matrix products, and the head apart. Every other model
runs through transformers (`PlainDecoder`), slower, and the log says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from errors import PolicyError
from models.local.attention import SharedBatch
from models.local.packed import Packed, Part, packed_twin
from models.local.shapes import head_of

logger = logging.getLogger("trace.models")

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Decoder(Protocol):
    """`layers` are the linear layers by the model's names for them: adapters are merged there. `divisible` says whether
    parts of a batch can be run side by side."""

    divisible: bool
    layers: dict[str, Part]

    def run(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch, mean: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Last hidden states (N, hidden) of N flat tokens, or the mean over the outputs of decoder layers `mean`
        (first and last, from 1), after which the pass ends."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (N, vocabulary) of hidden states (N, hidden)."""
        ...


class Turned(torch.autograd.Function):
    """The rotation of queries and keys with a gradient: x cos + swapped x sin, all (N, heads, D)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half])
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        (dy,), (cos, sin) = given, ctx.saved_tensors
        half = dy.shape[-1] // 2
        dx = dy * cos
        dx[..., half:].addcmul_(dy[..., :half], sin[..., :half])
        dx[..., :half].addcmul_(dy[..., half:], sin[..., half:])
        return dx, None, None


def unknown_parts(model: Any) -> str:
    """Why `FusedDecoder` cannot run this model; "" when it can."""
    config = model.config
    if config.model_type != "llama":
        return f"a model of type {config.model_type}"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    return ""


def make_decoder(model: Any) -> Decoder:
    """The fastest decoder for `model`."""
    if reason := unknown_parts(model):
        logger.warning("%s is sampled through transformers, about three times slower than llama models", reason)
        return PlainDecoder(model)
    return FusedDecoder(model)


@dataclass(frozen=True)
class _Layer:
    """The parts of a decoder layer; `norms` are those before attention and before the gated part."""

    norms: tuple[torch.Tensor, torch.Tensor]
    qkv: Packed
    o: Packed
    gate: Packed
    up: Packed
    down: Packed


class FusedDecoder:
    """The layers of a Llama model on arranged weights; the parameters are the model's."""

    divisible = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.epsilon = config.rms_norm_eps
        self.rotary = model.model.rotary_emb
        self.embedding, self.norm = model.model.embed_tokens.weight.detach(), model.model.norm.weight.detach()
        self._head = Packed([model.lm_head])
        self.layers: dict[str, Part] = {"lm_head": Part(self._head, 0)}
        self._stack = [self._layer(i, layer) for i, layer in enumerate(model.model.layers)]

    def _layer(self, index: int, layer: Any) -> _Layer:
        where = f"model.layers.{index}"
        attention, gated = layer.self_attn, layer.mlp
        qkv = Packed([getattr(attention, name) for name in PROJECTIONS])
        self.layers |= {f"{where}.self_attn.{name}": Part(qkv, i) for i, name in enumerate(PROJECTIONS)}
        found = []
        for parent, name in ((attention, "o_proj"), (gated, "gate_proj"), (gated, "up_proj"), (gated, "down_proj")):
            found.append(Packed([getattr(parent, name)]))
            self.layers[f"{where}.{'mlp' if parent is gated else 'self_attn'}.{name}"] = Part(found[-1], 0)
        norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
        return _Layer(norms, qkv, *found)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def rotation(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (N, heads + groups, dim) of the queries and keys; those of queries carry attention's scale."""
        # Of its first argument transformers takes device and dtype alone.
        cos, sin = (table[0, :, None, :] for table in self.rotary(self.embedding, positions_N[None]))
        count, scale, half = len(positions_N), self.dim**-0.5, self.dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        many = (count, self.heads, self.dim), (count, self.groups, self.dim)
        both = [torch.cat([(t * scale).expand(many[0]), t.expand(many[1])], dim=1) for t in (cos, sin)]
        return both[0], both[1]

    def run(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch, mean: tuple[int, int] | None = None
    ) -> torch.Tensor:
        x = F.embedding(ids_N, self.embedding)
        rotation = self.rotation(positions_N)
        if mean is None:
            x = self.through(range(len(self._stack)), x, rotation, batch)
            return F.rms_norm(x, x.shape[-1:], self.norm, self.epsilon)
        first, last = mean
        x = self.through(range(first), x, rotation, batch)
        total = x.float()
        for index in range(first, last):
            x = self.through(range(index, index + 1), x, rotation, batch)
            total += x
        return total / (last - first + 1)

    def through(
        self, layers: range, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: SharedBatch
    ) -> torch.Tensor:
        """The stream (N, hidden) after some layers in a row, from that before them. Not differentiable."""
        cos, (low, high) = rotation[0], rotation[1].chunk(2, dim=-1)
        half, turned, shape = self.dim // 2, self.heads + self.groups, x.shape[-1:]
        for index in layers:
            layer = self._stack[index]
            normed = F.rms_norm(x, shape, layer.norms[0], self.epsilon)
            qkv = layer.qkv(normed).view(len(x), -1, self.dim)
            plain = qkv[:, :turned]
            qk = plain * cos
            qk[..., :half].addcmul_(plain[..., half:], low)
            qk[..., half:].addcmul_(plain[..., :half], high)
            seen = batch.attend(index, qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:])
            x = layer.o.plus(seen.reshape(len(x), -1), x)
            normed = F.rms_norm(x, shape, layer.norms[1], self.epsilon)
            x = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)
        return x


class PlainDecoder:
    """Any model that uses transformers' attention interface, with its linear layers arranged."""

    divisible = False  # what a model's own code keeps between its operations is not known

    def __init__(self, model: Any, arranged: bool = True) -> None:
        self.layers: dict[str, Part] = {}
        self.model = model
        self.factor, self.cap = head_of(model.config)
        if arranged:
            self.model, self.layers = packed_twin(model)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        # As the trainer does it: a factor behind the product would round every logit of bf16 twice, and a cap that is
        # not in fp32 twice more.
        logits: torch.Tensor = self.model.lm_head(hidden * self.factor)
        return logits if self.cap is None else torch.tanh(logits.float() / self.cap) * self.cap

    def run(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch, mean: tuple[int, int] | None = None
    ) -> torch.Tensor:
        call: dict[str, Any] = {
            "input_ids": ids_N[None],
            "position_ids": positions_N[None],
            "use_cache": False,
            "shared": batch,
        }
        if mean is None:
            states: torch.Tensor = self.model.model(**call).last_hidden_state[0]
            return states
        with _LayerMean(self.model.model, *mean) as averaged:
            self.model.model(**call)
        return averaged.mean


class _LayerMean:
    """Within `with`, `decoder` (a module with `layers`) ends after layer `last`, and `mean` is, after each pass, the
    mean (N, hidden) of the outputs of layers `first` to `last` (from 1, both included) for one batch of N tokens.

    A pass that ends early stores keys and values of its layers only: compute shared prefixes before.
    """

    def __init__(self, decoder: Any, first: int, last: int) -> None:
        self.decoder, self.first, self.last = decoder, first, last
        self.total = torch.empty(0)

    def __enter__(self) -> _LayerMean:
        self.layers = self.decoder.layers
        used = self.layers[self.first - 1 : self.last]
        self.handles = [layer.register_forward_hook(self._add if i else self._begin) for i, layer in enumerate(used)]
        self.decoder.layers = self.layers[: self.last]
        return self

    def __exit__(self, *_: object) -> None:
        self.decoder.layers = self.layers
        for handle in self.handles:
            handle.remove()

    def _begin(self, module: Any, inputs: Any, output: Any) -> None:
        self.total = _states(output).float()

    def _add(self, module: Any, inputs: Any, output: Any) -> None:
        self.total = self.total + _states(output).float()

    @property
    def mean(self) -> torch.Tensor:
        return self.total / (self.last - self.first + 1)


def _states(output: Any) -> torch.Tensor:
    """A decoder layer's output is a tensor (1, N, hidden), or a tuple that begins with one."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states[0]


class PartedDecoder:
    """In the place of a decoder whose model's weights are spread over processes (`models/local/parts.py`)."""

    divisible = False

    def __init__(self) -> None:
        self.layers: dict[str, Part] = {}

    def run(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch, mean: tuple[int, int] | None = None
    ) -> torch.Tensor:
        raise PolicyError("this process holds a part of the base's weights: nothing is sampled or scored on it")

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.run(hidden, hidden, None)  # type: ignore[arg-type]
