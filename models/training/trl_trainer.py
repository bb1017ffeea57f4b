"""TRL's GRPO trainer with our forward pass: the prefix that all rows of a step share is passed through once, forward
and back, and rows without an advantage, whose gradient is zero, not at all. Shape suffixes: `models/training/grpo.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from trl import GRPOTrainer

from errors import Untrainable
from models.local.kv_cache import common_prefix
from models.local.parts import is_parted
from models.renderer import Conversation
from models.training.checkpoints import storing
from models.training.forward import KeptRows, Prefix, StepPrefix, by_rows, by_tokens, token_logprobs
from models.training.learner import FusedLearner, Learner, make_learner

# Advantages are in standard deviations: less than this is what rounding leaves of equal rewards.
NO_ADVANTAGE = 1e-4
# Rows of a step on which the distance to the base is measured.
KL_ROWS = 4
# At most so many of a prefix's last tokens are passed through with each row, rather than the whole prefix anew.
LEFT_OVER = 64
# Figures that TRL has of each micro-batch: means over its sampled tokens.
BY_BATCH = ("entropy", "clip_ratio/region_mean")
# Figures of a step that several processes put together: means of what each of them has.
FIGURES = (*BY_BATCH, "kl", "nll", "logprob_gap", "sampler_ratio")
# Figures that are means over tokens of a step, and over which.
MEANS = {**dict.fromkeys((*BY_BATCH, "nll"), "sampled"), "logprob_gap": "compared", "sampler_ratio": "compared"}
AGAIN = "lower the learning rate and start this adapter again"


class StepSource(Protocol):
    """What the trainer asks of the rollouts: TRL's rollout function, the number of ids that all rows of the step begin
    with, the advantage of each row of the last rollout and whether it was sampled behind another prompt (a hint), where
    the largest ratio of sampler to trainer is kept, the episodes that were played so far, and the sampler's decoder on
    the trained model (None when another process samples). Whether rows come again."""

    shared: int
    repeats: bool
    advantages_R: torch.Tensor
    hinted_R: torch.Tensor
    worst_ratio: float
    played: int

    @property
    def decoder(self) -> Any: ...
    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]: ...


@dataclass
class _Asked:
    """What TRL's loss does not say when it asks for the log-probabilities of rows: which tokens were sampled, and,
    where it is not the base that is asked, the sampler's log-probabilities and which rows had advice. `logprobs_RT` is
    the answer, without a gradient."""

    mask_RT: torch.Tensor
    old_RT: torch.Tensor | None = None
    hinted_R: torch.Tensor | None = None
    logprobs_RT: Any = None


@contextmanager
def _by_itself(accelerator: Any) -> Iterator[None]:
    """Within, TRL's figures are of this process alone. It would put each micro-batch's together, and processes have
    different numbers of micro-batches; `EpisodeGRPO` puts them together once a step."""
    accelerator.gather = accelerator.reduce = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        del accelerator.gather, accelerator.reduce


class EpisodeGRPO(GRPOTrainer):
    """TRL's trainer with episodes as rollouts.

    The rows of a step come at once and are passed through in micro-batches, as large as `most_rows` may be (`by_rows`)
    or, where that is given, of `most_tokens` behind the shared prefix (a longer row alone); `recompute` is
    `make_learner`'s.
    `most_episodes` may be played in all (None: as many as the steps need): a rate that falls follows them, too. Of
    several processes each passes its own rows through; gradients, of the adapter alone, are exchanged once a step, by
    hand: the pass does not go through the wrapper that would do it. Where the base's weights are in parts, every pass
    gathers layers from all processes: they make the same passes in the same order.
    """

    def __init__(
        self,
        *args: Any,
        source: StepSource,
        most_rows: int,
        most_tokens: int | None = None,
        recompute: bool = False,
        most_episodes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.source, self.recompute, self.most_rows, self.most_tokens = source, recompute, most_rows, most_tokens
        self.most_episodes = most_episodes
        self._problem = ""
        self._asked: _Asked  # set before each pass
        self._sums: defaultdict[str, float]  # over the passes of a step
        self._prefix: StepPrefix | None = None
        self._base_prefix: tuple[list[int], Prefix] | None = None
        self._learner: Learner | None = None
        kwargs["rollout_func"] = source.rollout
        super().__init__(*args, **kwargs)
        self._parted = is_parted(self.accelerator.unwrap_model(self.model).get_base_model())
        if self._parted:  # accelerate's wrapper takes no weights in parts, and nothing here goes through it
            self.accelerator.prepare_model = lambda model, *_, **__: model
        self.aux_loss_enabled = False  # the loss that balances experts is for their routers, which learn nothing here

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """TRL's; but a rate that falls reaches 0 when the episodes are used up, where the steps are not by then: a step
        may take several collections. A checkpoint holds the rate of the next step, so a training resumes exactly."""
        most = self.most_episodes
        if most is None or self.args.lr_scheduler_type != "linear":
            return super().create_scheduler(num_training_steps, optimizer)
        chosen = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None and chosen is not None:

            def left(step: int) -> float:
                return max(0.0, 1 - max(step / num_training_steps, self.source.played / max(1, most)))

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, left)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _learner_of(self, model: Any) -> Learner:
        if self._learner is None:
            causal = self.accelerator.unwrap_model(model).get_base_model()
            self._learner = make_learner(causal, self.source.decoder, self.recompute)
            # A GPU has the memory for other things.
            if self.source.repeats and isinstance(self._learner, FusedLearner) and self._learner.device.type == "cpu":
                self._learner.recalled, self._learner.branches = KeptRows(), False  # which keeps each row whole
        return self._learner

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        # TRL compares with its own detached pass; the sampler's figures make ratio and clipping mean what they say.
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        output["advantages"] = self.source.advantages_R
        output["hinted"] = self.source.hinted_R
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward passes of a step's micro-batches, and the backward pass of what they share."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self._prefix is not None:
            self._prefix.backward()
            self._prefix = None
        if self.accelerator.num_processes > 1:
            self._exchange()
        if self._problem:
            raise Untrainable(self._problem)
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with storing(Path(self.args.output_dir or "")):
            super()._save_checkpoint(*args, **kwargs)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Give every process the mean gradient, the figures of all, and the problem that one of them met."""
        model: Any = self.model
        learnt = [p for p in model.parameters() if p.requires_grad]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in learnt]
        found = [self._metrics["train"][name] for name in FIGURES]
        figures = torch.tensor([[sum(values), len(values)] for values in found]).to(own[0])
        wrong = torch.tensor([float(bool(self._problem))]).to(own[0])
        flat = torch.cat([g.flatten() for g in [*own, figures, wrong]])
        torch.distributed.all_reduce(flat)
        sent = flat.split([*(p.numel() for p in learnt), figures.numel(), 1])
        for parameter, gradient in zip(learnt, sent, strict=False):
            parameter.grad = (gradient / self.accelerator.num_processes).view_as(parameter).clone()
        for values, (total, count) in zip(found, sent[-2].view(-1, 2).tolist(), strict=True):
            values[:] = [total / count] if count else []
        if sent[-1].item() and not self._problem:
            self._problem = f"another process's loss is not finite at step {self.state.global_step}; {AGAIN}"
        worst = torch.tensor(self.source.worst_ratio).to(own[0])
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        self.source.worst_ratio = float(worst)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """The loss of the rows with an advantage. Where they come in several micro-batches the gradient of all but the
        last is sent back here; TRL sends the last one's."""
        kept_R = (~(inputs["advantages"].abs() <= NO_ADVANTAGE)).nonzero()[:, 0]  # NaN stays, to be refused below
        passes = self._passes(kept_R, inputs)
        if not passes:  # all groups have equal rewards: a zero that backward can pass
            return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0
        done, self._sums = torch.zeros((), device=kept_R.device), defaultdict[str, float](float)
        logprobs_RT = torch.zeros(inputs["completion_mask"].shape, device=kept_R.device)
        for place, part_R in enumerate(passes):
            loss = self._pass(model, inputs, part_R)
            if part_R is not None:
                logprobs_RT[part_R] = self._asked.logprobs_RT
            if place < len(passes) - 1:
                self.accelerator.backward(loss)
                done += loss.detach()
        for name, counted in MEANS.items():
            if tokens := self._sums[counted]:
                self._metrics["train"][name].append(self._sums[name] / tokens)
        # What somebody else has said, or the policy behind advice, is no sample of it.
        own_R = kept_R[~inputs["hinted"][kept_R]]
        if compared := self._passes(own_R[:KL_ROWS], inputs):
            self._measure_kl(model, inputs, compared, logprobs_RT)
        return loss + done

    def _passes(self, rows_R: torch.Tensor, inputs: Any) -> list[torch.Tensor | None]:
        """The micro-batches of some rows; None is a pass that this process makes for the sake of others."""
        passes: list[torch.Tensor | None] = [*self._micro_batches(rows_R, inputs)] if len(rows_R) else []
        if self._parted:
            passes += [None] * (_most_of_all(len(passes), rows_R.device) - len(passes))
        return passes

    def _pass(self, model: Any, inputs: Any, part_R: torch.Tensor | None) -> torch.Tensor:
        """The loss of some rows; without any a zero, from a pass that others make with theirs."""
        if part_R is not None:
            return self._loss_of(model, _rows_of(inputs, part_R))
        given = self._any_row(model, inputs)
        ((logprobs_S, _),) = token_logprobs(*given, self._shared_pass(given[0], given[1][0]))
        return logprobs_S.sum() * 0.0

    def _any_row(self, model: Any, inputs: Any) -> tuple[Learner, list[list[int]], int, list[list[int]], float]:
        """What `token_logprobs` is given of a row that nothing is learnt from: as little of it as makes a pass."""
        shared = self.source.shared
        return self._learner_of(model), [_ids_of(inputs, 0)[: shared + 2]], shared, [[shared + 1]], self.temperature

    def _shared_pass(self, learner: Learner, ids: list[int]) -> StepPrefix | None:
        """The pass through what all rows of the step begin with, made where it is first needed; None for nothing."""
        shared = self.source.shared
        if shared and self._prefix is None:
            self._prefix = StepPrefix(learner, ids[:shared])
        return self._prefix

    def _micro_batches(self, kept_R: torch.Tensor, inputs: Any) -> list[torch.Tensor]:
        """The rows that are kept, by rows or by tokens: those that begin alike beside one another, for what they begin
        with is passed through once a micro-batch."""
        ids = {row: _ids_of(inputs, row) for row in kept_R.tolist()}
        rows = sorted(ids, key=ids.__getitem__)
        alike_R = torch.tensor(rows, device=kept_R.device)
        own_RT = [ids[row][self.source.shared :] for row in rows]
        if self.most_tokens is None:
            batches = by_rows(self._learner_of(self.model), own_RT, self.most_rows)
        else:
            batches = by_tokens([len(own_T) for own_T in own_RT], self.most_tokens)
        return [alike_R[torch.tensor(batch, device=kept_R.device)] for batch in batches]

    def _loss_of(self, model: Any, inputs: Any) -> torch.Tensor:
        """TRL's loss of one micro-batch, and our figures of it."""
        self._asked = asked = _Asked(
            inputs["completion_mask"] * inputs["tool_mask"], inputs["old_per_token_logps"], inputs["hinted"]
        )
        several = self.accelerator.num_processes > 1
        with _by_itself(self.accelerator) if several else nullcontext():
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        if not torch.isfinite(loss):
            self._problem = f"the loss is {loss.item()} at step {self.state.global_step}; {AGAIN}"
            if not several:  # of several processes each tells the others first
                raise Untrainable(self._problem)
        # What was sampled behind a hint says nothing of whether sampler and trainer agree.
        mask_RT = asked.mask_RT * ~inputs["hinted"][:, None]
        gap_RT = (asked.logprobs_RT - inputs["sampling_per_token_logps"]) * mask_RT
        self._sums["sampled"] += (tokens := int(asked.mask_RT.sum()))
        for name in BY_BATCH:  # a small micro-batch counts for its tokens, not as much as a large one
            self._sums[name] += self._metrics["train"][name].pop() * tokens
        self._sums["nll"] -= (asked.logprobs_RT * asked.mask_RT).sum().item()
        self._sums["compared"] += int(mask_RT.sum())
        self._sums["logprob_gap"] += gap_RT.abs().sum().item()
        self._sums["sampler_ratio"] += (gap_RT.exp() * mask_RT).sum().item()
        self.source.worst_ratio = max(self.source.worst_ratio, gap_RT.abs().max().clamp(max=20).exp().item())
        return loss

    @torch.no_grad()
    def _measure_kl(
        self, model: Any, inputs: Any, passes: Sequence[torch.Tensor | None], logprobs_RT: torch.Tensor
    ) -> None:
        """Mean KL(policy || base) per sampled token of some rows: exp(d) - d - 1 with d = base - policy. They are the
        first of its own samples with an advantage, however long they are: micro-batches by tokens begin with the
        longest. They come in micro-batches, too: the memory was planned for no more. `passes` as `_passes` has them."""
        total, tokens = 0.0, 0
        with self.accelerator.unwrap_model(model).disable_adapter():
            for part_R in passes:
                if part_R is None:
                    token_logprobs(*self._any_row(model, inputs))
                    continue
                given = _rows_of(inputs, part_R)
                ids_RT = torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1)
                seen_RT = torch.cat([given["prompt_mask"], given["completion_mask"]], dim=1)
                self._asked = asked = _Asked(given["completion_mask"] * given["tool_mask"])
                completion = given["completion_ids"].shape[1]
                base_RT, _, _ = self._get_per_token_logps_and_entropies(model, ids_RT, seen_RT, completion)
                gap_RT = (base_RT - logprobs_RT[part_R]).clamp(-20, 20)
                total += float(((gap_RT.exp() - gap_RT - 1) * asked.mask_RT).sum())
                tokens += int(asked.mask_RT.sum())
        if any(part_R is not None for part_R in passes):
            self._metrics["train"]["kl"].append(total / max(1, tokens))

    @torch.no_grad()
    def _prefix_of_base(self, learner: Learner, ids: list[int]) -> tuple[int, Prefix | None]:
        """How many of `ids` the bare base passed through before, and that pass: the base stays as it is, so on a CPU
        an earlier step's is kept."""
        # A GPU has the memory for other things; processes with parts of the base make each pass together.
        if not ids or learner.device.type != "cpu" or learner.parted:
            return len(ids), None
        before, prefix = self._base_prefix or ([], None)
        same = common_prefix([ids, before])
        if prefix is None or same < len(ids) - LEFT_OVER:
            same, prefix = len(ids), Prefix(learner, ids)
            self._base_prefix = ids, prefix
        return same, prefix.first(same)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Log-probabilities and entropies of the completions' tokens, (R, T) each; zeros where the policy did not
        sample (masked in the loss)."""
        asked, prompt = self._asked, input_ids.shape[1] - logits_to_keep
        ids_RT, wanted_RS = [], []
        for ids_T, seen_T, mask_T in zip(input_ids, attention_mask, asked.mask_RT, strict=True):
            start = prompt - int(seen_T[:prompt].sum())  # left padding of the prompt
            end = prompt + int(seen_T[prompt:].sum())
            ids_RT.append(ids_T[start:end].tolist())
            wanted_RS.append([prompt - start + j for j in mask_T.nonzero()[:, 0].tolist()])
        learner, shared = self._learner_of(model), self.source.shared
        if asked.old_RT is None:
            shared, prefix = self._prefix_of_base(learner, ids_RT[0][:shared])
        else:
            prefix = self._shared_pass(learner, ids_RT[0]) if torch.is_grad_enabled() else None
        scored = token_logprobs(learner, ids_RT, shared, wanted_RS, self.temperature, prefix)
        logprobs_RT = torch.zeros(asked.mask_RT.shape, device=input_ids.device)
        entropies_RT = torch.zeros_like(logprobs_RT)
        for i, (logprobs_S, entropies_S) in enumerate(scored):
            at_S = asked.mask_RT[i].nonzero()[:, 0]
            logprobs_RT = logprobs_RT.index_put((torch.full_like(at_S, i), at_S), logprobs_S)
            entropies_RT[i, at_S] = entropies_S
        asked.logprobs_RT = logprobs_RT.detach()
        if asked.old_RT is not None and asked.hinted_R is not None:
            # The sampler saw a hint, the trainer does not: a ratio of the two would all but remove what is to learn.
            asked.old_RT.copy_(torch.where(asked.hinted_R[:, None], asked.logprobs_RT, asked.old_RT))
        return logprobs_RT, entropies_RT, None


def _ids_of(inputs: Any, row: int) -> list[int]:
    """All ids of a row, which TRL pads on both sides."""
    parts = [(inputs[f"{name}_ids"][row], inputs[f"{name}_mask"][row]) for name in ("prompt", "completion")]
    return [i for ids_T, seen_T in parts for i in ids_T[seen_T.bool()].tolist()]


def _rows_of(inputs: Any, rows_R: torch.Tensor) -> dict[str, Any]:
    """Some rows of TRL's inputs; what is not by row stays."""
    count = len(inputs["advantages"])
    return {
        name: value[rows_R] if isinstance(value, torch.Tensor) and value.ndim and len(value) == count else value
        for name, value in inputs.items()
    }


def _most_of_all(own: int, device: torch.device) -> int:
    """The largest of all processes' numbers."""
    most = torch.tensor([own], device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def trl_rows(conversations: Sequence[Conversation], rewards_R: Sequence[float], rows: int) -> dict[str, Any]:
    """Conversations as TRL's rollout function returns them, filled up to `rows` with rows that hold no sampled token
    (TRL wants whole groups)."""
    out: dict[str, Any] = {
        "prompt_ids": [],
        "completion_ids": [],
        "logprobs": [],
        "env_mask": [],
        "reward": list(rewards_R),
    }
    for conversation in conversations:
        first = conversation.sampled.index(True)
        out["prompt_ids"].append(conversation.ids[:first])
        out["completion_ids"].append(conversation.ids[first:])
        out["logprobs"].append(conversation.logprobs[first:])
        out["env_mask"].append([int(s) for s in conversation.sampled[first:]])
    for _ in range(rows - len(conversations)):
        out["prompt_ids"].append(out["prompt_ids"][0])
        out["completion_ids"].append(out["completion_ids"][0][:1])
        out["logprobs"].append([0.0])
        out["env_mask"].append([0])
        out["reward"].append(0.0)
    return out
