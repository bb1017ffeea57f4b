"""What it is worth to play more of families that seem to fall: simulated nights of a small split, by what truly fell.

    python -m benchmarks.settling [--nights 300] [--seed 0]

A night has the shop's 20 families with 8 tasks each and one episode a task. Four families that the base fails gain 60
points. All others are answered by another adapter than before, which solves each family as often as the base does (its
rates on seeds 20 and 21, `results/night`), so that nothing changes but which episodes succeed; one family that the base
solves half of the time or more truly falls by the points of the row. Promoted by the gate's rules, without settling,
with further tasks of the families that seem to fall, and with further trials of the tasks that there are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.measuring.gate_plan import AGAIN, GateRules, Look
from tasks.measuring.gate_rules import judge_release, unclear_families

TASKS, FURTHER = 8, 20
LEARNT = 4
GAIN = 0.6
FALLS = (0.0, 0.1, 0.25, 0.4)
RESULTS = Path(__file__).parent / "results" / "night"


def family_rates() -> dict[str, float]:
    """The bare base's success on each family of the test split, those that it fails first."""
    solved: dict[str, list[float]] = {}
    for path in sorted(RESULTS.glob("shop-seed-2[01].json")):
        for task, trials in json.loads(path.read_text())["methods"]["base"]["outcomes"].items():
            solved.setdefault(task.rsplit("-", 1)[0], []).append(trials[0])
    rates = {family: float(np.mean(found)) for family, found in solved.items()}
    return dict(sorted(rates.items(), key=lambda item: (item[1], item[0])))


RATES = family_rates()
OWN = tuple(RATES)[:LEARNT]


def episodes(
    family: str, hurt: tuple[str, float], count: int, draws: np.random.Generator, name: str = "", trials: int = 1
) -> pd.DataFrame:
    """Episodes of both sides on `count` tasks of a family; `hurt` is the family that falls, and by how much."""
    before = after = RATES[family]
    if family in OWN:
        after = before + GAIN
    elif family == hurt[0]:
        after = before - hurt[1]
    return pd.DataFrame(
        {
            "task": [f"{family} {name}{i}" for i in range(count) for _ in range(trials)],
            "family": family,
            "base": (draws.random(count * trials) < before).astype(float),
            "other": (draws.random(count * trials) < after).astype(float),
        }
    )


def promoted(rules: GateRules, more: tuple[str, int, int], fall: float, draws: np.random.Generator) -> bool:
    """Whether one night's candidate is promoted; `more` are name, number and trials of the tasks that settle a fall."""
    hurt = str(draws.choice([family for family, rate in RATES.items() if rate >= 0.5])), fall
    pair = pd.concat([episodes(family, hurt, TASKS, draws) for family in RATES])
    unclear = unclear_families(pair, rules) if rules.settling else []
    settled = None
    if unclear and len(unclear) <= rules.settled:
        name, count, trials = more
        settled = pd.concat([episodes(family, hurt, count, draws, name, trials) for family in unclear])
    return judge_release(pair, rules, Look(rules.alpha), 1, {"learnt": OWN}, settled=settled).promoted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    plain = GateRules()
    settling = replace(plain, settling=FURTHER)
    drawn, again = ("further ", FURTHER, 1), ("", TASKS, AGAIN * FURTHER // TASKS)
    print("| one family truly falls by | promoted without settling | with further tasks | with further trials |")
    print("|---|---|---|---|")
    for fall in FALLS:
        shares = [
            np.mean(
                [
                    promoted(rules, more, fall, np.random.default_rng([given.seed, night]))
                    for night in range(given.nights)
                ]
            )
            for rules, more in ((plain, drawn), (settling, drawn), (settling, again))
        ]
        print(f"| {100 * fall:.0f} points | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
