"""Is the shop a target worth improving on: how often the base succeeds, by family, and what needs no model at all.

    python -m benchmarks.shop [--split test] [--trials 2]
    python -m benchmarks.shop --nights      # only: how many rounds in a row can draw tasks of their own
    python -m benchmarks.shop --orders 12   # only: the base on diagnosis behind the same examples in other orders

Required: the base succeeds on 25-60 % of the tasks, on at least 3 families under 20 % and on at least 2 over 80 %; the
oracle on all, the no-op policy on at most 5 %, the random one on at most 20 %. Exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from functools import partial

from environments.contract import SPLITS, Draw, TargetTask
from environments.targets.shop.episode import ShopEnvironment
from environments.targets.shop.prompt import WORKED
from environments.targets.shop.target import target
from errors import TargetError
from models.episodes import Episode, Player, Trajectory, play_all
from models.local.base import load_base
from models.policy import MessagePolicy, Sampling
from models.scripted import NoopPolicy, OraclePolicy, RandomPolicy
from settings import load_settings


def success(trajectories: list[Trajectory]) -> float:
    """Share of successes among the episodes that were scored."""
    scores = [t.score for t in trajectories if t.score]
    return sum(s.success for s in scores) / len(scores)


def by_family(trajectories: list[Trajectory]) -> dict[str, float]:
    """Success by family, lowest first."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.episode.task.family].append(trajectory)
    return dict(sorted(((f, success(g)) for f, g in groups.items()), key=lambda pair: pair[1]))


def play(policy: MessagePolicy, tasks: list[TargetTask]) -> float:
    """Success of a policy without a model."""
    return success(play_all(Player(target().environment, policy, None, Sampling()), [Episode(t.id, t) for t in tasks]))


def nights() -> None:
    """Draw round after round, each without what the earlier ones drew, until a family has nothing left."""
    shop, used, number, slowest = target(), set[str](), 0, 0.0
    try:
        while True:
            number += 1
            draw, began = Draw(0, number, frozenset(used)), time.perf_counter()
            tasks = [task for split in ("diagnosis", "validation") for task in shop.drawn(split, draw)]
            slowest = max(slowest, time.perf_counter() - began)
            used |= {shop.content(task) for task in tasks}
    except TargetError as error:
        print(f"{number - 1} rounds drew {len(used)} contents, the slowest in {slowest:.2f} s; then: {error}")


def orders(count: int) -> None:
    """Success of the base behind the shop's worked examples in their order, in the reverse one and in random ones."""
    shop, settings = target(), load_settings(profile="laptop")
    base = load_base(settings.base_model, settings.dtype, settings.calls, settings.rollout.rows, settings.cache)
    rollout, places = settings.rollout, list(range(len(WORKED)))
    tried = [places, places[::-1]]
    for k in range(count - len(tried)):
        tried.append(places.copy())
        random.Random(k).shuffle(tried[-1])
    for order in tried:
        examples = [message for place in order for message in WORKED[place]]
        player = Player(
            partial(ShopEnvironment, shop.instructions, examples),
            base.policy,
            base.renderer,
            Sampling(rollout.temperature, rollout.max_tokens),
            2 * rollout.rows,
        )
        played = play_all(player, [Episode(t.id, t) for t in shop.tasks("diagnosis")])
        never = sum(rate == 0 for rate in by_family(played).values())
        print(f"{100 * success(played):5.1f} %, {never:2} families never solved, order {order}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--split", choices=[*SPLITS, "all"], default="all")
    arguments.add_argument("--trials", type=int, default=1)
    arguments.add_argument("--nights", action="store_true")
    arguments.add_argument("--orders", type=int, default=0)
    given = arguments.parse_args()
    if given.orders:
        return orders(given.orders)
    if given.nights:
        return nights()
    shop, settings = target(), load_settings()
    splits = SPLITS if given.split == "all" else (given.split,)
    base = load_base(settings.base_model, settings.dtype, settings.calls, settings.rollout.rows, settings.cache)
    rollout = settings.rollout
    player = Player(
        shop.environment,
        base.policy,
        base.renderer,
        Sampling(rollout.temperature, rollout.max_tokens),
        2 * rollout.rows,
    )
    played: list[Trajectory] = []
    for split in splits:
        episodes = [Episode(f"{t.id}/{k}", t, 0, k) for t in shop.tasks(split) for k in range(given.trials)]
        mine = play_all(player, episodes)
        played += mine
        print(f"base on {split:<10} {100 * success(mine):5.1f} %  ({len(mine)} episodes, T = {rollout.temperature})")
    families = by_family(played)
    for family, rate in families.items():
        print(f"  {family:<24} {100 * rate:5.1f} %")
    tasks = [t for split in splits for t in shop.tasks(split)]
    rows = {
        name: play(policy, tasks)
        for name, policy in (("oracle", OraclePolicy()), ("no-op", NoopPolicy()), ("random", RandomPolicy()))
    }
    for name, rate in rows.items():
        print(f"{name:<18} {100 * rate:5.1f} %")
    whole = success(played)
    low, high = sum(r < 0.2 for r in families.values()), sum(r > 0.8 for r in families.values())
    met = {
        f"base {100 * whole:.1f} % within 25-60 %": 0.25 <= whole <= 0.60,
        f"{low} families under 20 %, at least 3": low >= 3,
        f"{high} families over 80 %, at least 2": high >= 2,
        "oracle 100 %": rows["oracle"] == 1.0,
        "no-op at most 5 %": rows["no-op"] <= 0.05,
        "random at most 20 %": rows["random"] <= 0.20,
    }
    for what, holds in met.items():
        print(f"{'met   ' if holds else 'MISSED'} {what}")
    raise SystemExit(0 if all(met.values()) else 1)


if __name__ == "__main__":
    main()
