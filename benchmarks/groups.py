"""What it saves that rollouts of a group compute their prompt once: the same episodes, with it and without, in turns.

    python -m benchmarks.groups [--target shop] [--adapter FOLDER] [--groups 12] [--group-size 8] [--turns 2]
        [--temperature 0.7] [--tokens 24] [--dtype auto] [--clock wall|processor]

Diagnosis tasks of the target are played `--group-size` times each by the base or with an adapter, 48 episodes in
flight, as the collection of a training plays its scenarios. Prints seconds, tokens that were computed, and how many
episodes sampled the same tokens either way: rows that share a pass add up in another order.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.floor import CLOCKS
from environments.targets.catalogue import load_target
from models.adapters.files import adapter_digest
from models.episodes import Episode, Player
from models.local import kv_cache
from models.local.base import BaseModel, load_base
from models.policy import Sampling

ROWS = 48
# More tokens than any two rows have in common: then each row computes its own.
NEVER = 10**9


def grouped(target: Any, base: BaseModel, groups: int, size: int, adapter: Path | None) -> list[Episode]:
    """Groups of episodes of diagnosis tasks that lie far apart, with the adapter of a folder, which is loaded."""
    name = None if adapter is None else "one"
    if adapter is not None:
        base.policy.load_adapter("one", adapter_digest(adapter), adapter)
    tasks = list(target.tasks("diagnosis"))
    tasks = tasks[:: max(1, len(tasks) // groups)][:groups]
    return [Episode(f"{g}/{k}", task, 7, k, name) for g, task in enumerate(tasks) for k in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="shop")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    given = parser.parse_args()
    target: Any = load_target(given.target)
    base, clock = load_base(rows=ROWS, dtype=given.dtype), CLOCKS[given.clock]
    todo = grouped(target, base, given.groups, given.group_size, given.adapter)
    ways: dict[str, list[float]] = {"each row": [], "once": []}
    computed, sampled = dict[str, tuple[int, int]](), dict[str, dict[str, tuple[int, ...]]]()
    least = kv_cache.LEAST_ALIKE
    for turn in range(given.turns + 1):  # the first warms up, and its time does not count
        for way, seconds in ways.items():
            kv_cache.LEAST_ALIKE = least if way == "once" else NEVER
            base.policy.free_buffers()
            work = base.policy.work
            before = work.prefilled, work.decoded
            player = Player(
                target.environment, base.policy, base.renderer, Sampling(given.temperature, given.tokens), ROWS
            )
            began = clock()
            played = list(player.play(todo))
            if turn:
                seconds.append(clock() - began)
            computed[way] = work.prefilled - before[0], work.decoded - before[1]
            sampled[way] = {t.episode.key: tuple(t.conversation.ids) for t in played}
    for way, seconds in ways.items():
        prefilled, decoded = computed[way]
        print(f"{way:8} {min(seconds):8.2f} s, {prefilled} tokens in prompts and answers, {decoded} one by one")
    same = sum(sampled["once"][key] == ids for key, ids in sampled["each row"].items())
    print(f"{min(ways['each row']) / min(ways['once']):.2f} times as fast; {same} of {len(todo)} episodes are the same")


if __name__ == "__main__":
    main()
