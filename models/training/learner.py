"""The layers of a Llama model with LoRA for the training pass: the frozen ones on the sampler's arranged weights and
without a gradient, the learning ones with a gradient for the adapter alone. Shape suffixes: `models/training/grpo.py`.

Autograd sees few operations: q, k and v as one product with their adapters, gate and up as one, and the head as
log-probabilities whose gradient is made with them, so that no logits are kept. Models that `unknown_parts` names go
through transformers and PEFT (`PlainLearner`), slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from models.local.attention import RowBatch, SharedBatch
from models.local.decoder import PROJECTIONS, FusedDecoder, Turned, unknown_parts
from models.local.packed import arrange, base_alone, can_arrange
from models.local.parts import is_parted, whole_head
from models.local.shapes import head_of
from models.training.memory import HEAD_ROWS
from models.work import Work


class PrefixBatch(SharedBatch, Protocol):
    """A batch that is a shared prefix and nothing else: it holds its keys and values, (H, P, D) of each layer."""

    k_HPD: list[torch.Tensor]
    v_HPD: list[torch.Tensor]


# What frozen layers make of N flat tokens at their positions, by their batch: (N, hidden).
Frozen = Callable[[torch.Tensor, torch.Tensor, SharedBatch], torch.Tensor]


class Learner(Protocol):
    """What the training pass asks of a model. `frozen` layers at the bottom learn nothing; `work` counts; of `parted`
    weights this process holds a part. `branches`: rows may go on from what others begin with."""

    frozen: int
    parted: bool
    branches: bool
    work: Work
    device: torch.device
    dtype: torch.dtype

    def run(self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """Last hidden states (N, hidden) of N flat tokens."""
        ...

    def run_prefix(self, ids_P: torch.Tensor, positions_P: torch.Tensor, batch: PrefixBatch) -> torch.Tensor:
        """`run` of a prefix, which may be the beginning of an earlier step's."""
        ...

    def score(
        self, hidden_SD: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of `targets_S` and entropies (no gradient), (S,) each, in nats."""
        ...


def make_learner(causal: Any, decoder: Any = None, recompute: bool = False) -> Learner:
    """The fastest learner for a model that PEFT has put its layers into; `decoder` is the sampler's on that model.

    With `recompute` what a layer computed is not kept but computed again in the backward pass (gradient checkpointing):
    a third more time for a fraction of the memory. Weights in parts are gathered where transformers calls the layers.
    """
    if is_parted(causal) or unknown_parts(causal) or not isinstance(decoder, FusedDecoder) or not _known(causal):
        if decoder is not None and not is_parted(causal):
            _round_once(causal)
        return PlainLearner(causal, recompute)
    return FusedLearner(causal, decoder, recompute)


def _known(causal: Any) -> bool:
    """Whether all adapters are plain LoRA on the projections, without dropout."""
    names = {name.rsplit(".", 1)[-1] for name, module in causal.named_modules() if hasattr(module, "lora_A")}
    return names <= {*PROJECTIONS, "o_proj", "gate_proj", "up_proj", "down_proj"}


class _Matrix:
    """A frozen weight (out, in), several stacked, for x W^T and for y W. In fp32 both are arranged, unless it is to
    stay `plain`: the plain product is up to twice as slow (`benchmarks/floor.py`); in bf16 it is as fast."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None, plain: bool = False) -> None:
        weight, self.bias = torch.cat(list(weights)) if len(weights) > 1 else weights[0], bias
        self.arranged = not plain and weight.dtype == torch.float32 and can_arrange(weight)
        self.weight = arrange(weight) if self.arranged else weight
        self._turned = arrange(weight.t()) if self.arranged else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.arranged:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """y (N, out) -> (N, in)."""
        if self._turned is None:
            return y @ self.weight
        x: torch.Tensor = torch.ops.mkldnn._linear_pointwise(y, self._turned, None, "none", [], "")
        return x

    def plus(self, x: torch.Tensor, low: torch.Tensor, b: Sequence[torch.Tensor]) -> torch.Tensor:
        """x W^T with what adapters add, B (out, rank) of each stacked part times its columns of `low` (N, ranks).

        Below fp32 the sum is rounded once, as the sampler does it: what is added to a rounded number is lost where it
        is less than half a unit in the last place. The large product adds up on the small one; a bias comes with it.
        """
        once = x.dtype.itemsize < 4
        if once and self.bias is not None:
            wide = torch.cat([self.weight, torch.block_diag(*b)], 1)
            return F.linear(torch.cat([x, low], 1), wide, self.bias)
        y = x.new_empty(len(x), len(self.weight)) if once else self(x)
        for part, h, out in zip(b, low.split([m.shape[1] for m in b], 1), y.split([len(m) for m in b], 1), strict=True):
            out.addmm_(h, part.t(), beta=0 if once else 1)
        return y.addmm_(x, self.weight.t()) if once else y


class _Product(torch.autograd.Function):
    """x W^T with the adapters of the stacked parts: `lora` is A, B of each part, `scales` one number for each."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrix: _Matrix, scales: Sequence[float], *lora: torch.Tensor
    ) -> torch.Tensor:
        ctx.matrix, ctx.scales = matrix, scales
        if not lora:
            return matrix(x)
        a = torch.cat([scale * a.to(x.dtype) for a, scale in zip(lora[::2], scales, strict=True)])
        b = [part.to(x.dtype) for part in lora[1::2]]
        low = F.linear(x, a)
        ctx.save_for_backward(x, low, a, *b)
        return matrix.plus(x, low, b)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        dy = given[0].contiguous()
        dx = ctx.matrix.back(dy) if ctx.needs_input_grad[0] else None
        if not ctx.scales:
            return dx, None, None
        x, low, a, *b = ctx.saved_tensors
        ranks, outs = [m.shape[1] for m in b], [len(m) for m in b]
        sent = torch.cat([out @ part for part, out in zip(b, dy.split(outs, 1), strict=True)], 1)
        if dx is not None:
            dx.addmm_(sent, a)
        das = (sent.t() @ x).split(ranks)
        dbs = [out.t() @ h for out, h in zip(dy.split(outs, 1), low.split(ranks, 1), strict=True)]
        gradients: list[torch.Tensor] = []
        for scale, da, db in zip(ctx.scales, das, dbs, strict=True):
            gradients += [scale * da.float(), db.float()]
        return dx, None, None, *gradients


class _Gated(torch.autograd.Function):
    """silu(gate) up, of both (N, 2 inner) side by side. What it keeps is what came in: a layer's largest tensor."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        sent = torch.empty_like(both)
        to_gate, to_up = sent.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(given[0] * up, gate, grad_input=to_gate)
        torch.mul(given[0], F.silu(gate), out=to_up)
        return sent


class _Scored(torch.autograd.Function):
    """Log-probabilities and entropies of tokens. The gradient of each log-probability by its hidden state, the
    target's word vector minus the mean of all, is made in the forward pass, where the probabilities are."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: _Matrix, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, slopes = [], [], []
        for part, target in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            logits = head(part).float().div_(temperature)
            logits -= torch.logsumexp(logits, dim=-1, keepdim=True)
            logprobs.append(logits.gather(1, target[:, None])[:, 0])
            chances = logits.exp()
            entropies.append(-torch.linalg.vecdot(chances, logits))
            if ctx.needs_input_grad[0]:
                chances.neg_()
                chances[torch.arange(len(target), device=target.device), target] += 1
                slopes.append(head.back(chances.to(hidden.dtype)))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes).float().div_(temperature))
        ctx.kind = hidden.dtype
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return (given[0][:, None] * slopes).to(ctx.kind), None, None, None


def _adapted(x: torch.Tensor, given: tuple[list[Any], _Matrix]) -> torch.Tensor:
    """The product of stacked modules, x (N, in), with the adapters that they have now."""
    modules, matrix = given
    lora: list[torch.Tensor] = []
    scales: list[float] = []
    for module in (m for m in modules if hasattr(m, "lora_A") and not m.disable_adapters):
        (name,) = module.active_adapters
        lora += [module.lora_A[name].weight, module.lora_B[name].weight]
        scales.append(float(module.scaling[name]))
    if len(scales) < len(modules):  # all of a product learn, or none: `models/training/lora.py`
        lora, scales = [], []
    y: torch.Tensor = _Product.apply(x, matrix, tuple(scales), *lora)
    return y


def _round_once(causal: Any) -> None:
    """Below fp32, pass PEFT's linear layers through `_Product`, while PEFT has them in the model: PEFT adds to what is
    rounded already, and the sampler of this process does not. vLLM adds as PEFT does."""
    for module in causal.modules():
        plain = getattr(module, "base_layer", None)
        if isinstance(plain, torch.nn.Linear) and hasattr(module, "lora_A") and plain.weight.dtype.itemsize < 4:
            bias = None if plain.bias is None else plain.bias.detach()
            module.forward = partial(_linear, ([module], _Matrix([plain.weight.detach()], bias)))


def _linear(given: tuple[list[Any], _Matrix], x: torch.Tensor) -> torch.Tensor:
    y = _adapted(x.reshape(-1, x.shape[-1]), given)
    return y.view(*x.shape[:-1], y.shape[-1])


def _count(work: Work, positions_N: torch.Tensor, layers: int, learning: int) -> None:
    """Add a pass over tokens at these positions, the last `learning` of `layers` with a gradient if one is asked."""
    seen = int(positions_N.sum()) + len(positions_N)
    work.count_trained(len(positions_N), seen, layers, learning if torch.is_grad_enabled() else 0)


class FusedLearner:
    """See the module's docstring. Weights of the base are the model's; adapters are read from it at every pass."""

    parted = False
    branches = True

    def __init__(self, causal: Any, decoder: FusedDecoder, recompute: bool = False) -> None:
        self.decoder, self.work, self.recompute = decoder, Work(), recompute
        self.device, self.dtype = decoder.embedding.device, decoder.embedding.dtype
        layers = list(causal.model.layers)
        learning = [any(hasattr(m, "lora_A") for m in layer.modules()) for layer in layers]
        self.frozen = learning.index(True) if any(learning) else len(layers)
        self.layers = layers[self.frozen :]
        self._matrices = [self._of(layer) for layer in self.layers]
        # Ids of the last prefix, the stream after the frozen layers, and what these made of keys and values.
        self._below: tuple[list[int], torch.Tensor, list[torch.Tensor], list[torch.Tensor]] | None = None
        self._head = _Matrix([causal.lm_head.weight.detach()])
        # What the frozen layers made of rows that come again (`KeptRows`); None where each row comes once.
        self.recalled: Callable[[Frozen, torch.Tensor, torch.Tensor, RowBatch], torch.Tensor] | None = None

    @staticmethod
    def _of(layer: Any) -> list[tuple[list[Any], _Matrix]]:
        """The four products of a layer: the modules whose adapters they carry, and their weight."""
        attention, gated = layer.self_attn, layer.mlp
        groups = [[getattr(attention, name) for name in PROJECTIONS], [attention.o_proj]]
        groups += [[gated.gate_proj, gated.up_proj], [gated.down_proj]]
        made = []
        for modules in groups:
            plain = [getattr(m, "base_layer", m) for m in modules]
            biases = [m.bias for m in plain if m.bias is not None]
            bias = torch.cat([b.detach() for b in biases]) if biases else None
            made.append((modules, _Matrix([m.weight.detach() for m in plain], bias)))
        return made

    def run(self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        if self.recalled:
            x = self.recalled(self._frozen, ids_N, positions_N, batch)
        else:
            x = self._frozen(ids_N, positions_N, batch)
        return self._learning(x, positions_N, batch)

    def run_prefix(self, ids_P: torch.Tensor, positions_P: torch.Tensor, batch: PrefixBatch) -> torch.Tensor:
        """What lies below the learning layers is the same in every step: it is made once and kept."""
        ids = ids_P.tolist()
        if self._below is None or self._below[0][: len(ids)] != ids:
            x = self._frozen(ids_P, positions_P, batch)
            self._below = ids, x, list(batch.k_HPD), list(batch.v_HPD)
        else:  # no token sees a later one
            batch.k_HPD += [k_HPD[:, : len(ids)] for k_HPD in self._below[2]]
            batch.v_HPD += [v_HPD[:, : len(ids)] for v_HPD in self._below[3]]
        return self._learning(self._below[1][: len(ids)], positions_P, batch)

    @torch.no_grad()
    def _frozen(self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch) -> torch.Tensor:
        """The stream (N, hidden) before the learning layers, by the base: an adapter that the sampler has merged may
        reach into them, and this training's does not."""
        _count(self.work, positions_N, self.frozen, 0)
        x, layers = F.embedding(ids_N, self.decoder.embedding), self.decoder.layers
        with base_alone(layers, [name for name, part in layers.items() if part.packed.deltas]):
            return self.decoder.through(range(self.frozen), x, self.decoder.rotation(positions_N), batch)

    def _learning(self, x: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch) -> torch.Tensor:
        """Last hidden states, from the stream before the learning layers."""
        d, layers, rotation = self.decoder, len(self.layers), self.decoder.rotation(positions_N)
        _count(self.work, positions_N, layers, layers)
        for index in range(layers):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(self._layer, index, x, rotation, batch, use_reentrant=False)
            else:
                x = self._layer(index, x, rotation, batch)
        return F.rms_norm(x, x.shape[-1:], d.norm, d.epsilon)

    def _layer(
        self, index: int, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: SharedBatch
    ) -> torch.Tensor:
        """The stream (N, hidden) after a learning layer, from that before it."""
        d, layer, (qkv_of, o_of, both_of, down_of) = self.decoder, self.layers[index], self._matrices[index]
        tokens, turned, shape = len(x), d.heads + d.groups, x.shape[-1:]
        normed = F.rms_norm(x, shape, layer.input_layernorm.weight, d.epsilon)
        qkv = _adapted(normed, qkv_of).view(tokens, -1, d.dim)
        qk = Turned.apply(qkv[:, :turned], *rotation)
        seen = batch.attend(self.frozen + index, qk[:, : d.heads], qk[:, d.heads :], qkv[:, turned:])
        x = x + _adapted(seen.reshape(tokens, -1), o_of)
        normed = F.rms_norm(x, shape, layer.post_attention_layernorm.weight, d.epsilon)
        gated = _Gated.apply(_adapted(normed, both_of))
        return x + _adapted(gated, down_of)

    def score(
        self, hidden_SD: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.work.trained_heads += len(hidden_SD)
        logprobs_S, entropies_S = _Scored.apply(hidden_SD, self._head, targets_S, temperature)
        return logprobs_S, entropies_S


class PlainLearner:
    """Any model, through transformers and PEFT. What its attention has beyond the plain one counts places in a row."""

    frozen = 0
    branches = False

    def __init__(self, causal: Any, recompute: bool = False) -> None:
        self.causal, self.work = causal, Work()
        if recompute:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
            for module in causal.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True  # else it keeps all; what it leaves to chance are modules within it
        weight = next(causal.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.parted = is_parted(causal)
        self.factor, self.cap = head_of(causal.config)

    def run(self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: SharedBatch) -> torch.Tensor:
        layers = self.causal.config.num_hidden_layers
        _count(self.work, positions_N, layers, layers)
        call = {"input_ids": ids_N[None], "position_ids": positions_N[None], "use_cache": False, "shared": batch}
        hidden: torch.Tensor = self.causal.model(**call).last_hidden_state[0]
        return hidden

    def run_prefix(self, ids_P: torch.Tensor, positions_P: torch.Tensor, batch: PrefixBatch) -> torch.Tensor:
        return self.run(ids_P, positions_P, batch)

    def score(
        self, hidden_SD: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.work.trained_heads += len(hidden_SD)
        with whole_head(self.causal) as (weight, bias):
            return self._scored(_Matrix([weight], bias, plain=True), hidden_SD, targets_S, temperature)

    def _scored(
        self, head: _Matrix, hidden_SD: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_SD = hidden_SD * self.factor  # one of the logits is one of these, whose gradient comes by itself
        if self.cap is not None:
            return self._capped(head, hidden_SD, targets_S, temperature, self.cap)
        logprobs_S, entropies_S = _Scored.apply(hidden_SD, head, targets_S, temperature)
        return logprobs_S, entropies_S

    def _capped(
        self, head: _Matrix, hidden_SD: torch.Tensor, targets_S: torch.Tensor, temperature: float, cap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`score` through a cap of the logits: these are kept for the backward pass."""
        logits_SV = head(hidden_SD).float()
        logits_SV = torch.tanh(logits_SV / cap) * cap / temperature
        all_SV = torch.log_softmax(logits_SV, dim=-1)
        entropies_S = -(all_SV.exp() * all_SV).sum(-1).detach()
        return all_SV.gather(1, targets_S[:, None])[:, 0], entropies_S
