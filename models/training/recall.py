"""Recall: one adapter learns from episodes that have succeeded, whoever played them; nothing is played.

The rollouts of a round are its dearest part, and each of its adapters has learnt from its own alone. Here they are
batches of a training that samples nothing: every sampled token of a success counts alike, which is maximum likelihood
on what was done right (rejection sampling; Yuan et al., 2023, arXiv 2308.01825), from several teachers at once. It is
the trainer of `grpo.py` with an advantage of 1 in every row: the ratio is taken to the trained policy itself, as for a
rollout that was sampled behind a hint, so whose words these were makes no difference.

Shape suffixes: `models/training/grpo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from errors import TrainingError
from models.local.kv_cache import common_prefix
from models.renderer import Conversation
from models.training.actors import Actor
from models.training.records import GroupFigures, TrainingSettings
from models.training.trl_trainer import trl_rows


def recall_steps(successes: int, passes: int, settings: TrainingSettings) -> int:
    """Steps in which each of so many successes is learnt from `passes` times."""
    return math.ceil(successes * passes / (settings.groups * settings.group_size))


class Recall:
    """The batches of a recall, a `StepSource` as `Rollouts` is: `successes` in an order that the seed decides, each
    once before any comes again. A batch follows from the step alone, so a training goes on from any checkpoint.

    Raises `TrainingError` without a success that has a sampled token.
    """

    level, levels = 0, 1
    seconds = environment_seconds = 0.0
    dropped = missing = played = 0

    def __init__(self, successes: Sequence[Conversation], actor: Actor, settings: TrainingSettings) -> None:
        self.successes = [c for c in successes if any(c.sampled)]
        if not self.successes:
            raise TrainingError("there is no success to learn from; play more episodes, or set train.generalist to 0")
        self.actor, self.settings = actor, settings
        # The last token before the first sampled one is each row's own, also where all prompts are equal: what it says
        # of the next token is what is learnt from.
        self.shared = common_prefix([c.ids[: max(0, c.sampled.index(True) - 1)] for c in self.successes])
        rows = settings.groups * settings.group_size
        self.advantages_R, self.hinted_R = torch.ones(rows), torch.ones(rows, dtype=torch.bool)
        self.worst_ratio = 1.0
        self.collected: list[GroupFigures] = []
        self.repeats = settings.steps * rows > len(self.successes)
        self._rests = False

    @property
    def decoder(self) -> Any:
        """The sampler's decoder on the trained model; None when servers sample."""
        return getattr(self.actor.policy, "decoder", None)

    def turn_to(self, level: int) -> None:
        """There are no levels of difficulty."""

    def remember(self, groups: Iterable[GroupFigures]) -> None:
        """There are no groups."""

    def batch(self, step: int) -> list[Conversation]:
        """The successes that `step` (from 0) learns from, as many as a step has rows."""
        rows, count = self.settings.groups * self.settings.group_size, len(self.successes)
        places = range(step * rows, (step + 1) * rows)
        orders = {turn: self._order(turn) for turn in {place // count for place in places}}
        return [self.successes[orders[place // count][place % count]] for place in places]

    def _order(self, turn: int) -> list[int]:
        draws = torch.Generator().manual_seed(self.settings.seed * 100_003 + turn)
        order: list[int] = torch.randperm(len(self.successes), generator=draws).tolist()
        return order

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function. The prompts only say how many rows are wanted."""
        if len(prompts) != len(self.advantages_R):
            raise TrainingError(
                f"the trainer asked for {len(prompts)} rows, groups x group size is {len(self.advantages_R)}; make "
                "them equal"
            )
        if not self._rests:  # nothing is sampled from here on, and the backward pass needs the memory
            self.actor.rest()
            self._rests = True
        self.worst_ratio = 1.0
        device = trainer.accelerator.device
        self.advantages_R, self.hinted_R = self.advantages_R.to(device), self.hinted_R.to(device)
        batch = self.batch(trainer.state.global_step)
        return trl_rows(batch, [1.0] * len(batch), len(batch))
