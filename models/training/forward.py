"""The forward pass of training: rows after a shared prefix that is computed once, logits where they are needed.

Shape suffixes: `models/training/grpo.py`. Here `_T` counts the tokens of a row after the prefix, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch

from errors import TrainingError
from models.adapters.fingerprint import COUNT, Fingerprint
from models.local.attention import Extras, RowBatch, attend_causal, attend_with_extras
from models.local.blocks import Piece, attend_rows, pieces_of, put_together
from models.local.kv_cache import LEAST_ALIKE, common_prefix
from models.training.learner import Frozen, Learner, PlainLearner

# Bytes: the streams of 1,700 of the shop's conversations in the embedded model (66 tokens of 576 numbers, fp32).
KEPT = 2**28


def attend_plain(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    counts_R: Sequence[int],
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    after: Sequence[tuple[Piece, ...]] | None = None,
) -> torch.Tensor:
    """Attention of rows of `counts_R` tokens, one after the other, behind a prefix, without holding a layer's weights:
    block by block on a CPU, by torch's kernels elsewhere. A row may go on from pieces of earlier ones, `after`."""
    attend = attend_rows if q_HND.device.type == "cpu" else attend_by_kernels
    return attend(q_HND, k_HND, v_HND, counts_R, prefix, after)


def attend_by_kernels(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    counts_R: Sequence[int],
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    after: Sequence[tuple[Piece, ...]] | None = None,
) -> torch.Tensor:
    """`attend_plain` by torch's kernels, a row at a time."""
    made = []
    for pieces in pieces_of(counts_R, after):
        k_HTD, v_HTD = put_together(k_HND, pieces), put_together(v_HND, pieces)
        made.append(attend_causal(put_together(q_HND, pieces[-1:]), k_HTD, v_HTD, prefix))
    return torch.cat(made, dim=1)


class Parted:
    """Rows without what they repeat of one another: where several begin alike, with `least` tokens or more (None: rows
    stay whole), the beginning stands once, and each goes on from there with what is its own, a row of `ids`.

    The rollouts of a group have their prompt in common, and often the first of what they sampled. `after` says of each
    row what it goes on from, `starts` how many tokens that is, `places` where each token of a row as given lies.
    """

    def __init__(self, rows_RT: Sequence[list[int]], least: int | None) -> None:
        self.ids: list[list[int]] = []
        self.after: list[tuple[Piece, ...]] = []
        self.starts: list[int] = []
        self.places: list[list[int]] = [[] for _ in rows_RT]
        self._total = 0
        if least is None:
            for row, ids in enumerate(rows_RT):
                self._add(ids, (), [row])
        else:
            self._cut(rows_RT, sorted(range(len(rows_RT)), key=rows_RT.__getitem__), 0, (), least)

    def _add(self, ids: list[int], after: tuple[Piece, ...], whose: Sequence[int]) -> tuple[Piece, ...]:
        """Tokens that these rows go on with; what they go on from then."""
        piece = self._total, self._total + len(ids)
        self.ids.append(ids)
        self.after.append(after)
        self.starts.append(sum(last - first for first, last in after))
        for row in whose:
            self.places[row] += range(*piece)
        self._total = piece[1]
        return (*after, piece)

    def _cut(
        self, rows_RT: Sequence[list[int]], alike: list[int], depth: int, after: tuple[Piece, ...], least: int
    ) -> None:
        """Add rows that have their first `depth` tokens in common, in their order, which puts like beside like."""

        def together(rows: list[int]) -> bool:
            one, other = rows_RT[rows[0]], rows_RT[rows[-1]]
            return one == other or common_prefix([one, other]) >= depth + least

        if together(alike):
            common = common_prefix([rows_RT[row] for row in alike])
            after = self._add(rows_RT[alike[0]][depth:common], after, alike)
            depth = common
        left = [row for row in alike if len(rows_RT[row]) > depth]
        while left:
            count = 1
            while count < len(left) and together(left[count - 1 : count + 1]):
                count += 1
            self._cut(rows_RT, left[:count], depth, after, least)
            left = left[count:]


class _Suffixes:
    """Forward pass with gradient of several rows after a shared prefix, which may go on from earlier ones (`Parted`).
    Keys and values stay in the graph."""

    def __init__(
        self,
        counts: Sequence[int],
        prefix: Prefix | None,
        device: torch.device,
        dtype: torch.dtype,
        after: Sequence[tuple[Piece, ...]] | None = None,
    ) -> None:
        counts_R = torch.tensor(counts)
        self.prefix, self.counts, self.dtype, self.device = prefix, list(counts), dtype, device
        self.after = after
        self.rows, self.width = len(counts), int(counts_R.max())
        row_N = torch.repeat_interleave(torch.arange(self.rows), counts_R)
        first_R = torch.cumsum(counts_R, 0) - counts_R
        within_N = torch.arange(int(counts_R.sum())) - torch.repeat_interleave(first_R, counts_R)
        self.place_N = (row_N * self.width + within_N).to(device)  # where a token lies in the padded rows

    def part(self, rows: Sequence[int]) -> _Suffixes:
        """Some of the rows by themselves."""
        return _Suffixes([self.counts[row] for row in rows], self.prefix, self.device, self.dtype)

    @cached_property
    def hidden_RTT(self) -> torch.Tensor:
        """-inf where a key is later than the query; made where it is needed, as it may be large."""
        later_TT = torch.full((self.width, self.width), float("-inf"), device=self.device).triu(1)
        return later_TT.to(self.dtype).expand(self.rows, -1, -1)

    def _padded(self, x_NHD: torch.Tensor) -> torch.Tensor:
        """(N, H, D) -> (R, H, T, D), zeros behind the end of a row."""
        _, heads, dim = x_NHD.shape
        out = x_NHD.new_zeros(self.rows * self.width, heads, dim).index_copy(0, self.place_N, x_NHD)
        return out.view(self.rows, self.width, heads, dim).transpose(1, 2)

    def attend(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NHD: torch.Tensor,
        v_NHD: torch.Tensor,
        extras: Extras | None = None,
    ) -> torch.Tensor:
        prefix = (self.prefix.k_HPD[layer], self.prefix.v_HPD[layer]) if self.prefix else None
        if extras is None:
            q_HND, k_HND, v_HND = (x_NHD.transpose(0, 1) for x_NHD in (q_NHD, k_NHD, v_NHD))
            return attend_plain(q_HND, k_HND, v_HND, self.counts, prefix, self.after).transpose(0, 1)
        q_RHTD, k_RHTD, v_RHTD = (self._padded(x_NHD) for x_NHD in (q_NHD, k_NHD, v_NHD))
        places_1T = torch.arange(self.width, device=q_NHD.device)[None]
        out_RHTD = attend_with_extras(q_RHTD, k_RHTD, v_RHTD, self.hidden_RTT, prefix, places_1T, extras)
        _, heads, dim = q_NHD.shape
        return out_RHTD.transpose(1, 2).reshape(self.rows * self.width, heads, dim)[self.place_N]


class Prefix:
    """Forward pass with gradient of a shared prefix: keys and values, one (H, P, D) tensor per layer."""

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        learner = as_learner(model)
        self.k_HPD: list[torch.Tensor] = []
        self.v_HPD: list[torch.Tensor] = []
        places = torch.arange(len(ids), device=learner.device)
        end_PD = learner.run_prefix(torch.tensor(list(ids), device=learner.device), places, self)
        self.end_PD = end_PD if learner.parted else None

    def first(self, count: int) -> Prefix:
        """The pass over its first `count` tokens: no token sees a later one."""
        part = copy(self)
        part.k_HPD, part.v_HPD = ([x_HPD[:, :count] for x_HPD in made] for made in (self.k_HPD, self.v_HPD))
        return part

    def attend(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NHD: torch.Tensor,
        v_NHD: torch.Tensor,
        extras: Extras | None = None,
    ) -> torch.Tensor:
        q_HPD, k_HPD, v_HPD = (x_NHD.transpose(0, 1) for x_NHD in (q_NHD, k_NHD, v_NHD))
        if layer == len(self.k_HPD):  # a layer that is computed again for its gradient comes a second time
            self.k_HPD.append(k_HPD)
            self.v_HPD.append(v_HPD)
        count = q_HPD.shape[1]
        if extras is None:
            return attend_plain(q_HPD, k_HPD, v_HPD, [count], None).transpose(0, 1)
        hidden_1PP = q_HPD.new_full((1, count, count), float("-inf")).triu(1)
        whole = q_HPD[None], k_HPD[None], v_HPD[None], hidden_1PP, None
        return attend_with_extras(*whole, torch.arange(count, device=q_HPD.device)[None], extras)[0].transpose(0, 1)


class StepPrefix(Prefix):
    """A prefix computed once for all micro-batches of an optimizer step, the weights being the same.

    Its keys and values are leaves: what micro-batches send back stays in them until `backward` sends the sum through
    the prefix, once. The gradient is that of computing the prefix in every micro-batch.
    """

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        super().__init__(model, ids)
        self._made = [*self.k_HPD, *self.v_HPD]
        self.k_HPD, self.v_HPD = (
            [x_HPD.detach().requires_grad_() if x_HPD.requires_grad else x_HPD for x_HPD in made]
            for made in (self.k_HPD, self.v_HPD)
        )

    def backward(self) -> None:
        """To be called after the last micro-batch's own backward pass, before the optimizer's step."""
        leaves = zip(self._made, [*self.k_HPD, *self.v_HPD], strict=True)
        sent = [(made, leaf.grad) for made, leaf in leaves if made.requires_grad and leaf.grad is not None]
        if sent and self.end_PD is not None:
            # The last layer is gathered for its backward pass when a gradient, here of zero, comes to what it gave.
            sent.insert(0, (self.end_PD, torch.zeros_like(self.end_PD)))
        if sent:
            torch.autograd.backward([made for made, _ in sent], [gradient for _, gradient in sent])
        self.end_PD = None
        self._made.clear()


class KeptRows:
    """What frozen layers made of rows that come again, as those of a recall do: they learn nothing, so it stays the
    same behind the one prefix that all have. Up to `most` bytes are kept; rows beyond that are passed through anew."""

    def __init__(self, most: int = KEPT) -> None:
        self._left = most
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, frozen: Frozen, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """What `frozen` would return of all rows of the batch, (N, hidden)."""
        counts = list(batch.counts)
        ids_R, positions_R = ids_N.split(counts), positions_N.split(counts)
        keys_R = [(int(positions[0]), *ids.tolist()) for ids, positions in zip(ids_R, positions_R, strict=True)]
        made = {key: self._kept[key] for key in keys_R if key in self._kept}
        # A row may be twice in a batch, too.
        if missing := list({key: row for row, key in enumerate(keys_R) if key not in made}.values()):
            ids_M, positions_M = (torch.cat([x_R[row] for row in missing]) for x_R in (ids_R, positions_R))
            new_MD = frozen(ids_M, positions_M, batch.part(missing))
            for row, new_TD in zip(missing, new_MD.split([counts[row] for row in missing]), strict=True):
                made[keys_R[row]] = new_TD
                if new_TD.nbytes <= self._left:
                    self._left -= new_TD.nbytes
                    self._kept[keys_R[row]] = new_TD.clone()  # a part would keep the whole of its batch
        return torch.cat([made[key] for key in keys_R])


def as_learner(model: Any) -> Learner:
    """`model` if it is a learner; a transformers model through its own code."""
    learner: Learner = model if hasattr(model, "score") else PlainLearner(model)
    return learner


def by_tokens(counts_R: Sequence[int], most: int) -> list[list[int]]:
    """Rows of `counts_R` tokens in micro-batches of at most `most` tokens each; a longer row has one of its own.

    Rows of like length are together, longest first, so that little is padded.
    """
    batches: list[list[int]] = []
    room = 0
    for row in sorted(range(len(counts_R)), key=lambda r: -counts_R[r]):
        if not batches or counts_R[row] > room:
            batches.append([])
            room = most
        batches[-1].append(row)
        room -= counts_R[row]
    return batches


def by_rows(learner: Learner, rows_RT: Sequence[list[int]], most: int) -> list[list[int]]:
    """Rows, what is their own of each, in their order in micro-batches: at most as many tokens in each as `most` rows
    of the longest have, where what rows begin with in common counts once if the learner passes it through once.

    Larger products take less time a token, and memory is planned for `most` of the longest. A model that pads its rows
    has `most` of them, and so has a GPU, whose kernels hold the prefix once for every row.
    """
    if isinstance(learner, PlainLearner) or learner.device.type != "cpu":
        return [list(range(len(rows_RT)))[first : first + most] for first in range(0, len(rows_RT), most)]
    room, least = most * max(map(len, rows_RT)), LEAST_ALIKE if learner.branches else None
    batches: list[list[int]] = [[]]
    for row in range(len(rows_RT)):
        parted = Parted([rows_RT[other] for other in (*batches[-1], row)], least)
        if sum(map(len, parted.ids)) > room:
            batches.append([])
        batches[-1].append(row)
    return batches


def token_logprobs(
    model: Any,
    ids_RT: Sequence[Sequence[int]],
    shared: int,
    wanted_RS: Sequence[Sequence[int]],
    temperature: float,
    prefix: Prefix | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probability and entropy (nats) of chosen tokens of each row.

    `model` is a `Learner` or a transformers model; `ids_RT` are whole sequences whose first `shared` ids are equal;
    `wanted_RS` are positions (> shared) of the tokens to score; `prefix` is the pass over those `shared` ids, if it was
    made. Returns per row two tensors as long as its `wanted_RS`. Raises `TrainingError` for a position that is not
    after the row's first own token: the token before it says how likely it is.
    """
    first = min((p for wanted_S in wanted_RS for p in wanted_S), default=shared + 1)
    if first <= shared:
        raise TrainingError(
            f"the token at {first} cannot be scored behind {shared} shared ids; share fewer than {first}"
        )
    learner = as_learner(model)
    device = learner.device
    if shared and prefix is None:
        prefix = Prefix(learner, ids_RT[0][:shared])
    # What comes after the last wanted token says nothing about it, and that token itself predicts nothing wanted.
    ends_R = [max([shared + 1, *wanted_S]) for wanted_S in wanted_RS]
    suffixes_RT = [list(ids_T[shared:end]) for ids_T, end in zip(ids_RT, ends_R, strict=True)]
    parted = Parted(suffixes_RT, LEAST_ALIKE if learner.branches else None)
    lengths_R = [len(ids_T) for ids_T in parted.ids]
    batch = _Suffixes(lengths_R, prefix, device, learner.dtype, parted.after)
    ids_N = torch.tensor([i for ids_T in parted.ids for i in ids_T], device=device)
    starts_R = [shared + start for start in parted.starts]
    positions = [start + j for start, length in zip(starts_R, lengths_R, strict=True) for j in range(length)]
    hidden_ND = learner.run(ids_N, torch.tensor(positions, device=device), batch)
    where_S = [places[p - shared - 1] for places, wanted in zip(parted.places, wanted_RS, strict=True) for p in wanted]
    targets_S = torch.tensor([ids_RT[i][p] for i, wanted_S in enumerate(wanted_RS) for p in wanted_S], device=device)
    chosen_SD = hidden_ND[torch.tensor(where_S, device=device)]
    logprobs_S, entropies_S = learner.score(chosen_SD, targets_S, temperature)
    lengths = [len(wanted_S) for wanted_S in wanted_RS]
    return list(zip(logprobs_S.split(lengths), entropies_S.split(lengths), strict=True))


@torch.no_grad()
def probed(peft: Any, probe: Sequence[int]) -> Fingerprint:
    """What a PEFT model says of the last tokens of a text, with its adapter and without: a pass for each."""
    count = min(COUNT, len(probe) - 1)
    wanted_RS = [range(len(probe) - count, len(probe))]

    def scores() -> tuple[float, ...]:
        ((logprobs_S, _),) = token_logprobs(peft.get_base_model(), [probe], 0, wanted_RS, 1.0)
        return tuple(logprobs_S.tolist())

    adapted = scores()
    with peft.disable_adapter():
        return Fingerprint(tuple(probe), scores(), adapted)
