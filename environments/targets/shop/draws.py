"""Which scenario goes where: training, the fixed splits and the rounds' draws never share a content.

A content is what the customer opens with and what solves it, whatever the seed and the rest of the database. Half of
all contents, by their hash, are for training and the other half for evaluation, so that no record of what was trained
on is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from environments.contract import SPLITS, Draw, TargetTask, content_hash
from environments.targets.shop.families import FAMILIES, Scenario, draw
from errors import TargetError

# Tasks per unit of a family's share, and where each split's seeds begin. Fresh scenarios begin above all of them, and
# the rounds' draws above those.
PER_SHARE: Mapping[str, int] = {"diagnosis": 4, "validation": 4, "test": 4}
FIRST_SEED: Mapping[str, int] = {"diagnosis": 0, "validation": 100_000, "test": 200_000}
SEEDS_OF_A_SPLIT = 100_000
FRESH_SEED = 1_000_000
FRESH_SEEDS = 10**12
DRAWN_SEED = FRESH_SEED + FRESH_SEEDS
# Each round looks for its tasks among as many seeds of its own: enough to meet the last unused one of 4,000 contents.
SEEDS_OF_A_ROUND = 2**16
ROUNDS = 2**32
DRAWN_SPLITS = ("diagnosis", "validation")


def content_of(opening: str, reference: Sequence[Mapping[str, Any]]) -> str:
    """The content of a scenario, as a hash of 16 hex digits."""
    return content_hash([opening, reference])


def for_training(content: str) -> bool:
    """Whether a content may be trained on; it is for evaluation otherwise."""
    return int(content[0], 16) < 8


def _task(family: str, seed: int, split: str, scenario: Scenario) -> TargetTask:
    # `vars`, not `asdict`: the scenario was made for this task, and a copy of it takes longer than all else here.
    return TargetTask(f"{family}-{seed}", split, family, seed, dict(vars(scenario)), FAMILIES[family].capabilities)


def fresh(family: str, seed: int) -> TargetTask:
    """A scenario to train on: the first with such a content among the attempts of its seed."""
    for attempt in count():
        scenario = draw(family, FRESH_SEED + seed, attempt)
        if for_training(content_of(scenario.opening, scenario.reference)):
            return _task(family, FRESH_SEED + seed, "generated", scenario)
    raise AssertionError("unreachable: `count` does not end")


def _take(family: str, seeds: Iterator[int], split: str, taken: set[str], wanted: int = 0) -> list[TargetTask]:
    """Tasks of a family for a split (`wanted`, or its share), on the first of `seeds` whose contents are for evaluation
    and not in `taken`, which grows by them. Raises TargetError when the seeds run out."""
    wanted = wanted or FAMILIES[family].share * PER_SHARE[split]
    tasks: list[TargetTask] = []
    met: set[str] = set()
    while len(tasks) < wanted:
        seed = next(seeds, None)
        if seed is None:
            raise TargetError(
                f"family {family!r} has {len(tasks)} contents left for the {split} split, which needs {wanted}: all "
                f"others of the {len(met)} found for evaluation are in earlier rounds or in another split. Begin a new "
                "home, or give the family's customers more to say (environments/targets/shop/families.py)"
            )
        scenario = draw(family, seed)
        content = content_of(scenario.opening, scenario.reference)
        if for_training(content):
            continue
        met.add(content)
        if content not in taken:
            taken.add(content)
            tasks.append(_task(family, seed, split, scenario))
    return tasks


def fixed_splits() -> dict[str, tuple[TargetTask, ...]]:
    """The tasks of every split that are the same in every round."""
    taken: set[str] = set()
    splits: dict[str, tuple[TargetTask, ...]] = {}
    for split in SPLITS:
        first = FIRST_SEED[split]
        splits[split] = tuple(
            task
            for family in FAMILIES
            for task in _take(family, iter(range(first, first + SEEDS_OF_A_SPLIT)), split, taken)
        )
    return splits


def drawn_splits(chosen: Draw, reserved: set[str]) -> dict[str, tuple[TargetTask, ...]]:
    """A round's tasks of both splits, without the contents in `chosen.used` and those in `reserved`.

    A seed always gives the same scenario, so a task's id says its content, whatever was used before.
    """
    taken = reserved | chosen.used
    found: dict[str, list[TargetTask]] = {split: [] for split in DRAWN_SPLITS}
    for family in FAMILIES:
        seeds = _seeds(chosen)
        for split in DRAWN_SPLITS:
            found[split] += _take(family, seeds, split, taken)
    return {split: tuple(tasks) for split, tasks in found.items()}


def further_tasks(chosen: Draw, drawn: set[str], family: str, wanted: int) -> tuple[TargetTask, ...]:
    """`wanted` more validation tasks of a family for a round, without the contents in `chosen.used` and in `drawn`,
    those of the fixed splits and of the round's own."""
    return tuple(_take(family, _seeds(chosen), "validation", drawn | chosen.used, wanted)) if wanted else ()


def _seeds(chosen: Draw) -> Iterator[int]:
    """The seeds that a round looks for its tasks among, from the first."""
    # The numbers of one home never meet; two homes' seeds may, which costs nothing.
    place = (int(content_hash(chosen.seed, 8), 16) + chosen.number) % ROUNDS
    first = DRAWN_SEED + place * SEEDS_OF_A_ROUND
    return iter(range(first, first + SEEDS_OF_A_ROUND))
