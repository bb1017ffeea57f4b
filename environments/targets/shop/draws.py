"""Which scenario goes where: training, the fixed splits and the rounds' draws never share a content.

A content is what the customer opens with and what solves it, whatever the seed and the rest of the database. Half of
all openings, by their hash, are for training and the other half for evaluation, so that no record of what was trained
on is needed. An opening of the test split occurs in no other; two rounds' draws may open alike where what solves the
one does not solve the other. What solves a question about one of sixteen items does come back: only its opening is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from environments.contract import DRAWN_SPLITS, Draw, TargetTask, content_hash
from environments.picking import for_training
from environments.targets.shop.families import FAMILIES, Scenario, draw, every_family
from environments.targets.shop.shifted import SHIFTED
from errors import TargetError

# Tasks of every family in every split: the same of each, so that no family counts more than another. Where each split's
# seeds begin: fresh scenarios begin above all of them, and the rounds' draws above those.
PER_FAMILY = 8
FIRST_SEED: Mapping[str, int] = {"diagnosis": 0, "validation": 100_000, "test": 200_000}
SEEDS_OF_A_SPLIT = 100_000
SHIFTED_SEED = 300_000
FRESH_SEED = 1_000_000
FRESH_SEEDS = 10**12
DRAWN_SEED = FRESH_SEED + FRESH_SEEDS
# Each round looks for its tasks among as many seeds of its own: enough to meet the last unused one of 4,000 contents.
SEEDS_OF_A_ROUND = 2**16
ROUNDS = 2**32
# A draw's own test tasks lie where no round of its home looks, and are unlike so many further tasks of each family.
TEST_NUMBER = ROUNDS // 2
MOST_FURTHER = 64
DRAWN_SHIFTED_SEED = DRAWN_SEED + ROUNDS * SEEDS_OF_A_ROUND


def opening_of(content: str) -> str:
    """The opening's part of a content."""
    return content[:8]


def content_of(opening: str, reference: Sequence[Mapping[str, Any]]) -> str:
    """The content of a scenario: 8 hex digits of the opening's hash and 8 of the reference's. So the opening alone
    decides whether it may be trained on (`for_training`)."""
    return content_hash(opening, 8) + content_hash(reference, 8)


def _task(family: str, seed: int, split: str, scenario: Scenario, name: str = "") -> TargetTask:
    # `vars`, not `asdict`: the scenario was made for this task, and a copy of it takes longer than all else here.
    needs = every_family()[family].capabilities
    return TargetTask(name or f"{family}-{seed}", split, family, seed, dict(vars(scenario)), needs)


def fresh(family: str, seed: int) -> TargetTask:
    """A scenario to train on: the first with such a content among the attempts of its seed."""
    for attempt in count():
        scenario = draw(family, FRESH_SEED + seed, attempt)
        if for_training(content_of(scenario.opening, scenario.reference)):
            return _task(family, FRESH_SEED + seed, "generated", scenario)
    raise AssertionError("unreachable: `count` does not end")


@dataclass
class Taken:
    """What no further task may be: a content met before, or an opening of another split."""

    contents: set[str]
    openings: frozenset[str] = frozenset()


def _take(family: str, seeds: Iterator[int], split: str, taken: Taken, wanted: int = PER_FAMILY) -> list[TargetTask]:
    """Tasks of a family for a split, on the first of `seeds` whose contents are for evaluation and not taken; what is
    taken grows by them. Raises TargetError when the seeds run out."""
    tasks: list[TargetTask] = []
    met: set[str] = set()
    while len(tasks) < wanted:
        seed = next(seeds, None)
        if seed is None:
            raise TargetError(
                f"family {family!r} has {len(tasks)} contents left for the {split} split, which needs {wanted}: all "
                f"others of the {len(met)} found for evaluation are in earlier rounds or in another split. Begin a new "
                "home, or give the family's customers more to say (environments/targets/shop/lines.py)"
            )
        scenario = draw(family, seed)
        content = content_of(scenario.opening, scenario.reference)
        if for_training(content):
            continue
        met.add(content)
        if content not in taken.contents and opening_of(content) not in taken.openings:
            taken.contents.add(content)
            tasks.append(_task(family, seed, split, scenario))
    return tasks


def _contents(tasks: Iterable[TargetTask]) -> set[str]:
    return {content_of(task.payload["opening"], task.payload["reference"]) for task in tasks}


def _openings(tasks: Iterable[TargetTask]) -> frozenset[str]:
    return frozenset(map(opening_of, _contents(tasks)))


def fixed_splits() -> dict[str, tuple[TargetTask, ...]]:
    """The tasks of every split that are the same in every round. Test is drawn first: its openings are no other's."""
    splits: dict[str, tuple[TargetTask, ...]] = {}
    for split in ("test", "diagnosis", "validation"):
        before = [task for tasks in splits.values() for task in tasks]
        taken = Taken(_contents(before), _openings(before))
        seeds = range(FIRST_SEED[split], FIRST_SEED[split] + SEEDS_OF_A_SPLIT)
        splits[split] = tuple(task for family in FAMILIES for task in _take(family, iter(seeds), split, taken))
    return splits


def drawn_splits(chosen: Draw, fixed: Mapping[str, Sequence[TargetTask]]) -> dict[str, tuple[TargetTask, ...]]:
    """A round's tasks of both splits, without the contents in `chosen.used` and of the fixed splits, and without an
    opening of the test split; nor does validation open like the round's diagnosis.

    A seed always gives the same scenario, so a task's id says its content, whatever was used before.
    """
    contents = _contents(task for tasks in fixed.values() for task in tasks) | chosen.used
    sealed = _openings(fixed["test"])
    seeds = {family: _seeds(chosen) for family in FAMILIES}
    found: dict[str, tuple[TargetTask, ...]] = {}
    for split in DRAWN_SPLITS:
        taken = Taken(contents, sealed | _openings(task for tasks in found.values() for task in tasks))
        found[split] = tuple(task for family in FAMILIES for task in _take(family, seeds[family], split, taken))
    return found


def further_tasks(
    chosen: Draw, elsewhere: Mapping[str, Sequence[TargetTask]], family: str, wanted: int
) -> tuple[TargetTask, ...]:
    """`wanted` more validation tasks of a family for a round, without the contents in `chosen.used` and those of the
    tasks `elsewhere` (the fixed splits and the round's own), and without an opening of test and diagnosis."""
    contents = _contents(task for tasks in elsewhere.values() for task in tasks) | chosen.used
    taken = Taken(contents, _openings([*elsewhere["test"], *elsewhere["diagnosis"]]))
    return tuple(_take(family, _seeds(chosen), "validation", taken, wanted)) if wanted else ()


def drawn_test(chosen: Draw, elsewhere: Iterable[TargetTask]) -> tuple[TargetTask, ...]:
    """Test tasks of a draw's own, without a content or an opening of the tasks `elsewhere`."""
    others = list(elsewhere)
    taken = Taken(_contents(others) | chosen.used, _openings(others))
    apart = Draw(chosen.seed, chosen.number + TEST_NUMBER)
    return tuple(task for family in FAMILIES for task in _take(family, _seeds(apart), "test", taken))


def shifted_test(chosen: Draw | None = None) -> tuple[TargetTask, ...]:
    """The shift test: every family, and pairs of wants that no other split has, in other surroundings. With `chosen`
    that of the draw's own. A seed whose scenario has the content of one before it gets another attempt, and the task an
    id that says so: what was stored of the first is not what the other comes to."""
    first, name = SHIFTED_SEED, "shift"
    if chosen is not None:
        first = DRAWN_SHIFTED_SEED + _place(chosen) * PER_FAMILY
        name = f"shift-{_place(chosen)}"
    tasks: list[TargetTask] = []
    met: set[str] = set()
    for family in every_family():
        for seed in range(PER_FAMILY):
            for attempt in count():
                scenario = draw(family, first + seed, attempt, SHIFTED)
                content = content_of(scenario.opening, scenario.reference)
                if content not in met:
                    break
            met.add(content)
            identity = f"{name}-{family}-{seed}" + (f"-{attempt}" if attempt else "")
            tasks.append(_task(family, first + seed, "test", scenario, identity))
    return tuple(tasks)


def _seeds(chosen: Draw) -> Iterator[int]:
    """The seeds that a round looks for its tasks among, from the first."""
    first = DRAWN_SEED + _place(chosen) * SEEDS_OF_A_ROUND
    return iter(range(first, first + SEEDS_OF_A_ROUND))


def _place(chosen: Draw) -> int:
    """Where a draw lies among all: the numbers of one home never meet; two homes' may, which costs nothing."""
    return (int(content_hash(chosen.seed, 8), 16) + chosen.number) % ROUNDS
