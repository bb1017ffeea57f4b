"""Where a GPU has no memory left: what the failed pass holds is let go, and one sentence says how much was missing."""

from __future__ import annotations

import gc
import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from errors import TrainingMemoryError

# What torch's allocator says of an allocation that failed.
ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


class Passes(Protocol):
    """What of a training's settings decides the memory of its backward passes."""

    @property
    def micro_batch(self) -> int: ...
    @property
    def micro_batch_tokens(self) -> int | None: ...
    @property
    def recompute(self) -> bool: ...


def let_go(problem: BaseException) -> None:
    """Free what the frames that a problem has left still hold, and give it back to the GPU: activations would else lie
    there for as long as somebody has the problem in hand."""
    links: list[BaseException | None] = [problem]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            links += [link.__cause__, link.__context__]
    gc.collect()  # a trainer and what it holds refer to one another
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def missing(problem: torch.OutOfMemoryError) -> str:
    """How much was asked for and how much was free, or what else torch says in its first line."""
    text = str(problem)
    asked, free = ASKED.search(text), FREE.search(text)
    if asked is None:
        return (text.splitlines() or [""])[0][:200] or "torch says no more"
    there = f", of {free[1]} {free[2]} were free" if free is not None else ""
    return f"{asked[1]} more were asked for{there}"


@contextmanager
def out_of_memory_told(settings: Passes, processes: int) -> Iterator[None]:
    """Within, a GPU without memory is a `TrainingMemoryError` that says what was missing and what to do.

    Of several processes the others wait for this one's gradients, so it can tell them nothing any more. It says the
    problem on standard output, in the line that `raise_failure` in `tasks/operations/jobs.py` reads, and ends by the
    problem as it is: its launcher then ends the others.
    """
    try:
        yield
    except torch.OutOfMemoryError as problem:
        message = f"a training ran out of the GPU's memory ({missing(problem)}); {_help(settings)}"
        if processes == 1:
            raise TrainingMemoryError(message) from problem
        print(json.dumps({"error": TrainingMemoryError.__name__, "message": message, "transient": False}), flush=True)
        raise


def _help(settings: Passes) -> str:
    """What takes less memory than these settings do."""
    if settings.micro_batch_tokens:
        less = f"lower train.micro_batch_tokens (now {settings.micro_batch_tokens})"
    else:
        less = f"lower train.micro_batch (now {settings.micro_batch}) or set train.micro_batch_tokens"
    again = "" if settings.recompute else ", set devices.recompute = true"
    return f"{less}{again}, or, where the sampler shares the GPU (policy.backend = 'local'), lower rollout.rows"
