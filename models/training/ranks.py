"""The processes that make one training together (`models/training/job.py`). Rank 0 leads: it plays the rollouts, has
the store and says what is next; the others follow. One process alone is the same code with nothing to tell.

What they tell one another is JSON over a group of its own that waits for days, because rollouts take as long as they
take; gradients and figures go over the devices' group, once a step.

A base that is larger than one GPU is in parts (`devices.shard`): each process holds one of its frozen weights, and the
adapter is whole everywhere. A layer is gathered from all processes where a pass reaches it, so they make the same
passes in the same order: also who has no row for one (`EpisodeGRPO`), and the followers make those by which rank 0
knows what a server has to answer (`fingerprint_of`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from models.adapters.fingerprint import Fingerprint
from models.local.decoder import PartedDecoder
from models.local.parts import held_bytes, is_parted, part_weights
from models.training.forward import probed
from models.training.trl_trainer import NO_ADVANTAGE, StepSource

if TYPE_CHECKING:
    from models.local.base import BaseModel

logger = logging.getLogger("trace.models")

# How long followers wait for the next word: a collection of long episodes may take hours.
PATIENCE = timedelta(days=7)
OVER = {"over": True}
# Rank 0 parts its base: who follows loads and parts its own (`follow_part`).
PART = {"part": True}


class LeaderOver(Exception):
    """Rank 0 has ended this training, well or not; what it was says rank 0."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among `count`; `group` is what they talk over."""

    index: int = 0
    count: int = 1
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.index == 0

    def same_start(self, weights: Iterable[torch.Tensor]) -> None:
        """Give every process rank 0's weights."""
        if self.count > 1:
            for weight in weights:
                torch.distributed.broadcast(weight, 0)

    def tell(self, word: Any) -> None:
        """Tell the followers (rank 0)."""
        if self.count > 1:
            said = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)
            torch.distributed.broadcast(torch.tensor([len(said)]), 0, self.group)
            torch.distributed.broadcast(said, 0, self.group)

    def hear(self) -> Any:
        """What rank 0 tells next (followers). Raises `LeaderOver` when the training is over for rank 0."""
        length = torch.zeros(1, dtype=torch.long)
        torch.distributed.broadcast(length, 0, self.group)
        said = torch.empty(int(length), dtype=torch.uint8)
        torch.distributed.broadcast(said, 0, self.group)
        word = json.loads(said.numpy().tobytes())
        if word == OVER:
            raise LeaderOver
        return word


ALONE = Ranks()
_HERE = [ALONE]


def ranks() -> Ranks:
    """This process's place; `ALONE` unless `open_ranks` found others."""
    return _HERE[0]


def open_ranks() -> Ranks:
    """Meet the other processes that `accelerate launch` has started, if any, and take a device of its own."""
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    if state.num_processes > 1:
        group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        _HERE[0] = Ranks(state.process_index, state.num_processes, group)
    return _HERE[0]


def close_ranks() -> None:
    """Part from the others."""
    if ranks().count > 1:
        _HERE[0] = ALONE
        torch.distributed.destroy_process_group()


def dealt_rows(costs_R: Sequence[float], count: int) -> list[list[int]]:
    """The rows of a step for each of `count` processes: as many for each, and about as much work. The number of rows is
    a multiple of `count`."""
    order = sorted(range(len(costs_R)), key=lambda row: -costs_R[row])
    hands: list[list[int]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for first in range(0, len(order), count):  # the heaviest of each handful to who has the least so far
        for row, hand in zip(order[first : first + count], sorted(range(count), key=sums.__getitem__), strict=True):
            hands[hand].append(row)
            sums[hand] += costs_R[row]
    return hands


class DealtRollouts:
    """What this process learns from of a step's rollouts. Rank 0's `source` plays them all; followers have none.

    `decoder` is the sampler's on this process's model, as `StepSource` says.
    """

    def __init__(self, here: Ranks, source: StepSource | None, decoder: Any) -> None:
        self.here, self.source, self.decoder = here, source, decoder
        self.shared, self.repeats = 0, False
        self.advantages_R = torch.zeros(0)
        self.hinted_R = torch.zeros(0, dtype=torch.bool)
        self.played = 0
        self._worst = 1.0

    @property
    def worst_ratio(self) -> float:
        return self._worst if self.source is None else self.source.worst_ratio

    @worst_ratio.setter
    def worst_ratio(self, value: float) -> None:
        self._worst = value
        if self.source is not None:
            self.source.worst_ratio = value

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: this process's share of the rows. Whatever rank 0 raises ends it for all."""
        self.worst_ratio = 1.0
        word = self._heard(trainer) if self.source is None else self._played(prompts, trainer)
        mine = word["dealt"][self.here.index]
        device = trainer.accelerator.device
        self.shared, self.played = word["shared"], word["played"]
        self.advantages_R = torch.tensor([word["advantages"][row] for row in mine], device=device)
        self.hinted_R = torch.tensor([word["hinted"][row] for row in mine], dtype=torch.bool, device=device)
        return {name: [column[row] for row in mine] for name, column in word["rows"].items()}

    def _heard(self, trainer: Any) -> Any:
        """Rank 0's rows. A text that it looks at before goes through the parts of the base here, too."""
        while "probe" in (word := self.here.hear()):
            probed(trainer.accelerator.unwrap_model(trainer.model), word["probe"])
        return word

    def _played(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play all rows, and tell the others."""
        assert self.source is not None
        try:
            rows = self.source.rollout(prompts * self.here.count, trainer)
        except BaseException:
            self.here.tell(OVER)
            raise
        advantages_R = self.source.advantages_R.tolist()
        lengths_R = [len(ids) for ids in rows["completion_ids"]]
        costs_R = [n if abs(a) > NO_ADVANTAGE else 0 for n, a in zip(lengths_R, advantages_R, strict=True)]
        word = {
            "rows": rows,
            "advantages": advantages_R,
            "hinted": self.source.hinted_R.tolist(),
            "shared": self.source.shared,
            "played": self.source.played,  # the rate may fall with it, and is the same in every process
            "dealt": dealt_rows(costs_R, self.here.count),
        }
        self.here.tell(word)
        return word


def part_base(base: BaseModel) -> list[int]:
    """Part the base of rank 0, and have the followers load and part theirs (`follow_part`), one process after another:
    the machine's memory holds one whole base at a time. The policy on it samples and scores no more.
    Returns the bytes that each process holds of the weights."""
    ranks().tell(PART)
    held = _in_turn(ranks(), lambda: _part(base))
    told = ", ".join(f"{size / 2**30:.2f}" for size in held)
    logger.info("the base's weights are in parts, one for each process: %s GiB", told)
    return held


def part_in_job(base: BaseModel) -> None:
    """Part the base if this process leads others; in the round's own it stays whole."""
    if ranks().count > 1:
        part_base(base)


def follow_part(load: Callable[[], BaseModel]) -> BaseModel:
    """What a follower does that hears `PART`: the base that it loads, in parts."""
    loaded: list[BaseModel] = []

    def turn() -> int:
        loaded.append(load())
        return _part(loaded[0])

    _in_turn(ranks(), turn)
    return loaded[0]


def _in_turn(here: Ranks, work: Callable[[], int]) -> list[int]:
    """Do it in one process after another; what each made of it."""
    made = torch.zeros(here.count, dtype=torch.long)
    for turn in range(here.count):
        if turn == here.index:
            made[turn] = work()
        torch.distributed.broadcast(made[turn], turn, here.group)
    found: list[int] = made.tolist()
    return found


def _part(base: BaseModel) -> int:
    base.policy.decoder = PartedDecoder()  # the one before holds the whole weights
    part_weights(base.policy.model, ranks().count)
    return held_bytes(base.policy.model)


def fingerprint_of(peft: Any, probe: Sequence[int]) -> Fingerprint:
    """What the trained model says of the end of a text, with its adapter and without. Where the base is in parts rank 0
    calls it while the followers wait for rollouts: they pass the text through with it."""
    if is_parted(peft.get_base_model()):
        ranks().tell({"probe": list(probe)})
    return probed(peft, probe)
