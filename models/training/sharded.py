"""A training on a base that is larger than one GPU (`devices.shard`): each process holds a part of the frozen weights.

The adapter is whole everywhere, and its gradients are exchanged as ever. A layer is gathered from all processes where a
pass reaches it, so they make the same passes in the same order: also who has no row for one (`EpisodeGRPO`), and the
followers make those by which rank 0 knows what a server has to answer (`fingerprint_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from models.adapters.fingerprint import Fingerprint
from models.local.decoder import PartedDecoder
from models.local.parts import held_bytes, is_parted, part_weights
from models.training.forward import probed
from models.training.ranks import PART, Ranks, ranks

if TYPE_CHECKING:
    from models.local.base import BaseModel

logger = logging.getLogger("trace.models")


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
