"""Seconds of a recall's step whose rows are new, and of one whose rows were learnt from before.

    python -m benchmarks.recall_step --threads 1 --turns 3

The rows are as long as the shop's conversations, behind a prefix as long as its prompt; their ids are random, which no
product's time depends on. Both steps have forward and backward pass, no optimizer; they take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch

from benchmarks.floor import CLOCKS, Clock
from models.local.base import load_base
from models.training.forward import KeptRows, StepPrefix, token_logprobs
from models.training.learner import FusedLearner, make_learner
from models.training.lora import adapted
from models.training.records import TrainingSettings

PROMPT, OWN, ROWS, BATCH = 761, (40, 92), 32, 8


def made_rows(count: int) -> list[list[int]]:
    """Rows of ids behind one prefix, a third of what is their own before the first that is learnt."""
    draw = random.Random(0)
    prefix = draw.choices(range(1_000, 20_000), k=PROMPT)
    return [prefix + draw.choices(range(1_000, 20_000), k=draw.randrange(*OWN)) for _ in range(count)]


def pass_through(learner: FusedLearner, rows: list[list[int]]) -> None:
    """Forward and backward pass of a step, in micro-batches."""
    shared = StepPrefix(learner, rows[0][:PROMPT])
    for first in range(0, len(rows), BATCH):
        part = rows[first : first + BATCH]
        wanted = [range(PROMPT + (len(row) - PROMPT) // 3, len(row)) for row in part]
        scored = token_logprobs(learner, part, PROMPT, wanted, 1.0, shared)
        (-torch.cat([logprobs for logprobs, _ in scored]).sum()).backward()  # type: ignore[no-untyped-call]
    shared.backward()


def seconds(turns: int, dtype: str, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each turn's step by what its rows are: "new" or "seen"."""
    base, rows = load_base(dtype=dtype), made_rows(ROWS)
    spent: dict[str, list[float]] = {"new": [], "seen": []}
    with adapted(base.policy.model, TrainingSettings()) as (peft, _):
        learner = make_learner(peft.get_base_model(), base.policy.decoder)
        assert isinstance(learner, FusedLearner)
        kept = KeptRows()
        for turn in range(turns + 1):
            for kind, found in spent.items():
                learner.recalled = kept if kind == "seen" else None
                began = clock()
                pass_through(learner, rows)
                if turn:  # the first turn warms up, and fills what is kept
                    found.append(clock() - began)
    return spent


def ratio(spent: dict[str, list[float]]) -> float:
    return statistics.median(spent["seen"]) / statistics.median(spent["new"])


def figures() -> dict[str, float]:
    torch.set_num_threads(1)
    return {"a recall's step, rows seen / new": ratio(seconds(1, "auto", CLOCKS["processor"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    spent = seconds(given.turns, given.dtype, CLOCKS[given.clock])
    for name, found in spent.items():
        print(f"{name} rows: {', '.join(f'{s:.2f}' for s in found)} s")
    print(f"seen / new: {ratio(spent):.2f}")


if __name__ == "__main__":
    main()
