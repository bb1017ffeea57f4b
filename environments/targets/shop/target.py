"""The shop as a target: fixed splits, rounds' draws, fresh scenarios by family, instructions with worked examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property

from environments.contract import DRAWN_SPLITS, SPLITS, Draw, Message, TargetTask, content_hash
from environments.targets.shop.draws import (
    FRESH_SEEDS,
    MOST_FURTHER,
    content_of,
    drawn_splits,
    drawn_test,
    fixed_splits,
    fresh,
    further_tasks,
    shifted_test,
)
from environments.targets.shop.episode import MAX_STEPS, ShopEnvironment
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.prompt import EXAMPLES, INSTRUCTIONS
from errors import TargetError


class Shop:
    """What the shop and its shift test share: the desk, its instructions, its worked examples. `split` are the tasks by
    split."""

    licence = "Apache-2.0"
    instructions = INSTRUCTIONS
    examples: Sequence[Message] = EXAMPLES

    def __init__(self, name: str, splits: Callable[[], Mapping[str, Sequence[TargetTask]]]) -> None:
        self.name, self._draw_splits = name, splits

    def environment(self) -> ShopEnvironment:
        return ShopEnvironment(self.instructions, self.examples)

    @cached_property
    def _fixed(self) -> Mapping[str, Sequence[TargetTask]]:
        return self._draw_splits()

    def tasks(self, split: str) -> Sequence[TargetTask]:
        if split not in SPLITS:
            raise TargetError(f"split {split!r} does not exist; the splits are {', '.join(SPLITS)}")
        return self._fixed.get(split, ())

    def content(self, task: TargetTask) -> str:
        return content_of(task.payload["opening"], task.payload["reference"])

    @cached_property
    def data_hash(self) -> str:
        """Covers every task of every split, the instructions and the examples."""
        tasks = [[t.id, t.payload] for split in SPLITS for t in self.tasks(split)]
        return content_hash([tasks, self.instructions, [m.as_dict() for m in self.examples], MAX_STEPS])


class ShopTarget(Shop):
    """The target `shop`."""

    def __init__(self) -> None:
        super().__init__("shop", fixed_splits)
        # The latest round's draw: its two splits are drawn together and asked for one after the other.
        self._latest: tuple[Draw, Mapping[str, tuple[TargetTask, ...]]] | None = None
        self._latest_test: tuple[Draw, tuple[TargetTask, ...]] | None = None

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        if split not in DRAWN_SPLITS:
            raise TargetError(f"split {split!r} is not drawn; {' and '.join(DRAWN_SPLITS)} are, test never changes")
        latest = self._latest
        if latest is None or latest[0] != draw:
            self._latest = latest = draw, drawn_splits(draw, self._fixed)
        return latest[1][split]

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        _known(family)
        elsewhere = {s: [*self._fixed[s], *(self.drawn(s, draw) if s in DRAWN_SPLITS else ())] for s in SPLITS}
        if count > MOST_FURTHER:  # a draw's test tasks are unlike the first so many; those behind them give way to it
            elsewhere["test"] += self.drawn_test(draw)
        return further_tasks(draw, elsewhere, family, count)

    def drawn_test(self, draw: Draw) -> Sequence[TargetTask]:
        if self._latest_test is None or self._latest_test[0] != draw:
            self._latest_test = draw, self._drawn_test(draw)
        return self._latest_test[1]

    def _drawn_test(self, draw: Draw) -> tuple[TargetTask, ...]:
        fixed = [task for split in SPLITS for task in self._fixed[split]]
        drawn = [task for split in DRAWN_SPLITS for task in self.drawn(split, draw)]
        further = [task for family in FAMILIES for task in self.further(draw, family, MOST_FURTHER)]
        return drawn_test(draw, [*fixed, *drawn, *further])

    def shift_test(self) -> Sequence[TargetTask]:
        return shift().tasks("test")

    def drawn_shift(self, draw: Draw) -> Sequence[TargetTask]:
        return shifted_test(draw)

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {name: family.capabilities for name, family in FAMILIES.items()}

    def generate(self, family: str, seed: int) -> TargetTask:
        _known(family)
        if not 0 <= seed < FRESH_SEEDS:
            raise TargetError(f"seed {seed} is out of range; give 0 to {FRESH_SEEDS - 1}")
        return fresh(family, seed)


def _known(family: str) -> None:
    if family not in FAMILIES:
        raise TargetError(f"family {family!r} does not exist; the families are {', '.join(FAMILIES)}")


@cache
def target() -> ShopTarget:
    """The shop with its standard instructions; one for all, since its tasks are drawn once."""
    return ShopTarget()


@cache
def shift() -> Shop:
    """The shift test `shop:shift`: test tasks alone, whose words, goods and pairs of wants the shop does not have."""
    return Shop("shop:shift", lambda: {"test": shifted_test()})
