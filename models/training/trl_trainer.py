"""TRL's GRPO trainer with our forward pass: the prefix that all rows of a step share is passed through once, forward
and back, and rows without an advantage, whose gradient is zero, not at all. Shape suffixes: `models/training/grpo.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from trl import GRPOTrainer

from errors import TrainingError
from models.training.forward import StepPrefix, token_logprobs
from models.training.learner import Learner, make_learner

# Advantages are in standard deviations: less than this is what rounding leaves of equal rewards.
NO_ADVANTAGE = 1e-4


class StepSource(Protocol):
    """What the trainer asks of the rollouts: TRL's rollout function, the number of ids that all rows of the step begin
    with, the advantage of each row of the last rollout and whether it was sampled behind another prompt (a hint), where
    the largest ratio of sampler to trainer is kept, and the sampler's decoder on the trained model (None when another
    process samples)."""

    shared: int
    advantages_R: torch.Tensor
    hinted_R: torch.Tensor
    worst_ratio: float

    @property
    def decoder(self) -> Any: ...
    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]: ...


class EpisodeGRPO(GRPOTrainer):
    """TRL's trainer with episodes as rollouts."""

    def __init__(self, *args: Any, source: StepSource, **kwargs: Any) -> None:
        self.source = source
        self._kl_step = -1
        self._prefix: StepPrefix | None = None
        self._learner: Learner | None = None
        kwargs["rollout_func"] = source.rollout
        super().__init__(*args, **kwargs)
        self.aux_loss_enabled = False  # the loss that balances experts is for their routers, which learn nothing here

    def _learner_of(self, model: Any) -> Learner:
        if self._learner is None:
            causal = self.accelerator.unwrap_model(model).get_base_model()
            self._learner = make_learner(causal, self.source.decoder)
        return self._learner

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        # TRL compares with its own detached pass; the sampler's figures make ratio and clipping mean what they say.
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        output["advantages"] = self.source.advantages_R
        output["hinted"] = self.source.hinted_R
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward pass of one micro-batch, and after a step's last one that of what they share."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self._prefix is not None and self.accelerator.sync_gradients:
            self._prefix.backward()
            self._prefix = None
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        rows = len(inputs["advantages"])
        kept_R = (~(inputs["advantages"].abs() <= NO_ADVANTAGE)).nonzero()[:, 0]  # NaN stays, to be refused below
        if not len(kept_R):  # all groups of the micro-batch have equal rewards: a zero that backward can pass
            return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0
        inputs = {
            name: value[kept_R] if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows else value
            for name, value in inputs.items()
        }
        self._mask_RT = inputs["completion_mask"] * inputs["tool_mask"]
        self._old_RT, self._hinted_R = inputs["old_per_token_logps"], inputs["hinted"]
        loss = super()._compute_loss(model, inputs)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss.item()} at step {self.state.global_step}; "
                "lower the learning rate and start this adapter again"
            )
        # What was sampled behind a hint says nothing of whether sampler and trainer agree.
        mask_RT = self._mask_RT * ~self._hinted_R[:, None]
        gap_RT = (self._logprobs_RT - inputs["sampling_per_token_logps"]) * mask_RT
        if tokens := int(mask_RT.sum()):
            self._metrics["train"]["logprob_gap"].append((gap_RT.abs().sum() / tokens).item())
            self._metrics["train"]["sampler_ratio"].append(((gap_RT.exp() * mask_RT).sum() / tokens).item())
        self.source.worst_ratio = max(self.source.worst_ratio, gap_RT.abs().max().clamp(max=20).exp().item())
        if self._kl_step != self.state.global_step:  # once a step: it costs a forward pass of the base
            self._kl_step = self.state.global_step
            self._metrics["train"]["kl"].append(self._kl_to_base(model, inputs))
        return loss

    @torch.no_grad()
    def _kl_to_base(self, model: Any, inputs: Any, rows: int = 4) -> float:
        """Mean KL(policy || base) per sampled token on the first rows: exp(d) - d - 1 with d = base - policy."""
        mask_RT = self._mask_RT
        self._mask_RT = mask_RT[:rows]
        policy_RT = self._logprobs_RT[:rows]
        ids_RT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[:rows]
        seen_RT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)[:rows]
        completion = inputs["completion_ids"].shape[1]
        with self.accelerator.unwrap_model(model).disable_adapter():
            base_RT, _, _ = self._get_per_token_logps_and_entropies(model, ids_RT, seen_RT, completion)
        gap_RT = (base_RT - policy_RT).clamp(-20, 20)
        kl = ((gap_RT.exp() - gap_RT - 1) * self._mask_RT).sum() / self._mask_RT.sum().clamp(min=1)
        self._mask_RT = mask_RT
        return float(kl)

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
        prompt = input_ids.shape[1] - logits_to_keep
        ids_RT, wanted_RS = [], []
        for ids_T, seen_T, mask_T in zip(input_ids, attention_mask, self._mask_RT, strict=True):
            start = prompt - int(seen_T[:prompt].sum())  # left padding of the prompt
            end = prompt + int(seen_T[prompt:].sum())
            ids_RT.append(ids_T[start:end].tolist())
            wanted_RS.append([prompt - start + j for j in mask_T.nonzero()[:, 0].tolist()])
        learner, shared = self._learner_of(model), self.source.shared
        # Several processes exchange gradients in hooks of the micro-batches' own passes: each then makes its prefix.
        if shared and torch.is_grad_enabled() and self._prefix is None and self.accelerator.num_processes == 1:
            self._prefix = StepPrefix(learner, ids_RT[0][:shared])
        prefix = self._prefix if torch.is_grad_enabled() else None
        scored = token_logprobs(learner, ids_RT, shared, wanted_RS, self.temperature, prefix)
        logprobs_RT = torch.zeros(self._mask_RT.shape, device=input_ids.device)
        entropies_RT = torch.zeros_like(logprobs_RT)
        for i, (logprobs_S, entropies_S) in enumerate(scored):
            at_S = self._mask_RT[i].nonzero()[:, 0]
            logprobs_RT = logprobs_RT.index_put((torch.full_like(at_S, i), at_S), logprobs_S)
            entropies_RT[i, at_S] = entropies_S
        self._logprobs_RT = logprobs_RT.detach()
        if torch.is_grad_enabled():
            # The sampler saw a hint, the trainer does not: a ratio of the two would all but remove what is to learn.
            self._old_RT.copy_(torch.where(self._hinted_R[:, None], self._logprobs_RT, self._old_RT))
        return logprobs_RT, entropies_RT, None
