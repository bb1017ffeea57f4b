"""The tasks that a round plays: the target's own, and those that are drawn for this round and no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from db import DrawnTaskRow, Round, Store
from environments.contract import (
    DRAWN_SPLITS,
    Draw,
    Drawable,
    DrawsTests,
    HoldsBack,
    ShiftTested,
    Target,
    TargetTask,
)
from environments.picking import spread
from environments.task_ids import given, refuse_others, refuse_repeats
from errors import TargetError
from tasks.targets.draws import drawn_for, refuse_unlike

logger = logging.getLogger("trace")


@dataclass
class RoundTasks:
    """The tasks of one round. A target that can draw gives every round new diagnosis and validation tasks; *test* is
    sealed, the same for all. `seed` is the settings'; a split has at most `most` tasks (None: all that it has)."""

    store: Store
    round: Round
    target: Target
    seed: int
    most: int | None
    _met: dict[str, list[TargetTask]] = field(default_factory=dict)

    def played(self, split: str) -> list[TargetTask]:
        """The split's tasks that this round plays: all, or as many as it may, taken at equal distances."""
        return self._spread(self.whole(split))

    def whole(self, split: str) -> list[TargetTask]:
        """All tasks that the split has in this round, also those that it does not play."""
        if not self.draws(split):
            return list(self.target.tasks(split))
        if not self._met:  # both at once: what is wrong with either is told before anything is played
            self._met = drawn_for(self.target, self._draw)
            for each, tasks in self._met.items():
                self._record(tasks, each)
        return self._met[split]

    def draws(self, split: str) -> bool:
        """Whether the split's tasks are new in every round."""
        return split != "test" and isinstance(self.target, Drawable)

    def further(self, families: Mapping[str, int]) -> list[TargetTask]:
        """So many more validation tasks of each family, drawn for this round; none of a target that cannot draw, and of
        a family that has fewer left."""
        if not self.draws("validation"):
            return []
        drawn = [task for family, count in sorted(families.items()) for task in self._more(family, count)]
        refuse_unlike(self.target, drawn, "validation", self._met)
        self._record(drawn, "validation")
        return drawn

    def _more(self, family: str, count: int) -> Sequence[TargetTask]:
        assert isinstance(self.target, Drawable)
        try:
            return list(given(self.target, "further(...)", partial(self.target.further, self._draw, family, count)))
        except TargetError as problem:  # the round has trained by now, and the tasks that are there can judge it
            logger.warning("no %d further validation tasks of %s are drawn: %s", count, family, problem)
            return []

    @cached_property
    def compared_on(self) -> tuple[list[TargetTask], list[TargetTask]]:
        """Test and shift tasks on which methods are compared. A target that holds tasks back gives these, because its
        others were looked at when settings were chosen; one that draws tests gives this seed's own; any other gives its
        test split, and its shift tasks where it has some. Raises TargetError where one of either is of another split
        than "test", as whose episodes no method pays for, or has the id of another task."""
        test, shift = self._measured_on()
        refuse_others(test, "test")
        refuse_others(shift, "test", "the shift test")
        fixed = {split: self.whole(split) for split in DRAWN_SPLITS if not self.draws(split)}
        refuse_repeats({**fixed, "test": test, "the shift test": shift})
        return list(test), list(shift)

    def _measured_on(self) -> tuple[Sequence[TargetTask], Sequence[TargetTask]]:
        """Test and shift tasks as the target gives them."""
        target = self.target
        if isinstance(target, HoldsBack):
            test = given(target, "held_back_test()", target.held_back_test)
            return test, given(target, "held_back_shift()", target.held_back_shift)
        if isinstance(target, DrawsTests):
            test = given(target, "drawn_test(...)", partial(target.drawn_test, self._draw))
            return self._spread(test), given(target, "drawn_shift(...)", partial(target.drawn_shift, self._draw))
        shift = given(target, "shift_test()", target.shift_test) if isinstance(target, ShiftTested) else []
        return self.played("test"), shift

    def _spread(self, found: Sequence[TargetTask]) -> list[TargetTask]:
        return spread(list(found), self.most or len(found))

    @cached_property
    def _draw(self) -> Draw:
        """What decides the round's draws, with the contents that earlier rounds of the target drew. Not what this one
        has drawn itself: an earlier round that went on since may have drawn it, too, and this one's tasks stay."""
        this = self.round
        numbers = {r.id: r.number for r in self.store.rows(Round, target=this.target)}
        drawn = self.store.rows(DrawnTaskRow, target=this.target, data_hash=this.data_hash)
        own = {r.content for r in drawn if r.round_id == this.id}
        used = frozenset(r.content for r in drawn if numbers[r.round_id] < this.number) - own
        return Draw(self.seed, this.number, used)

    def _record(self, tasks: Sequence[TargetTask], split: str) -> None:
        """Store the contents of the tasks drawn for a split: no later round draws them."""
        assert isinstance(self.target, Drawable)
        self.store.put([self._drawn_row(self.target.content(t), t) for t in tasks])

    def _drawn_row(self, content: str, task: TargetTask) -> DrawnTaskRow:
        this = self.round
        return DrawnTaskRow(
            round_id=this.id,
            split=task.split,
            task_id=task.id,
            target=this.target,
            data_hash=this.data_hash,
            family=task.family,
            content=content,
        )
