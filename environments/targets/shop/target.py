"""The shop as a target: fixed splits, rounds' draws, fresh scenarios by family, instructions with worked examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property

from environments.contract import SPLITS, Draw, Message, TargetTask, ToolCall, content_hash
from environments.targets.shop.draws import (
    DRAWN_SPLITS,
    FRESH_SEEDS,
    content_of,
    drawn_splits,
    fixed_splits,
    fresh,
    further_tasks,
)
from environments.targets.shop.episode import MAX_STEPS, ShopEnvironment
from environments.targets.shop.families import FAMILIES
from errors import TargetError

INSTRUCTIONS = (
    "You work at the desk of a shop. Answer with one call or one short sentence.\n"
    "Calls: find(order) price(item) account(email) cancel(order) move(order, address) refund(order, amount) "
    "swap(order, option) coupon(order, code) person()\n"
    "Cancel or move only pending orders, swap only delivered ones."
)


def _example(*turns: str | tuple[str, dict[str, object]]) -> list[Message]:
    """Turns alternate user, then calls with results, then a sentence."""
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        if isinstance(turn, tuple):
            messages.append(Message("assistant", "", (ToolCall(turn[0], turn[1]),)))
        elif messages and messages[-1].tool_calls:
            messages.append(Message("tool", turn))
        else:
            messages.append(Message("user" if index == 0 else "assistant", turn))
    return messages


EXAMPLES = (
    *_example("Please cancel order 512.", ("cancel", {"order": 512}), "ok", "Order 512 is cancelled."),
    *_example(
        "Cancel order 731 please.",
        ("cancel", {"order": 731}),
        "error: order is shipped",
        "Sorry, order 731 is shipped.",
    ),
    *_example(
        "How much is the clock?",
        ("price", {"item": "clock"}),
        "22 dollars, round, square, oval",
        "The clock is 22 dollars.",
    ),
    *_example("Refund 7 of order 264.", ("refund", {"order": 264, "amount": 7}), "ok", "7 of order 264 is refunded."),
    *_example("Where is order 648?", ("find", {"order": 648}), "pending, red lamp, paid 40", "Order 648 is pending."),
)


class ShopTarget:
    """The target `shop`."""

    name = "shop"
    licence = "Apache-2.0"
    instructions = INSTRUCTIONS
    examples: Sequence[Message] = EXAMPLES

    def __init__(self) -> None:
        # The latest round's draw: its two splits are drawn together and asked for one after the other.
        self._latest: tuple[Draw, Mapping[str, tuple[TargetTask, ...]]] | None = None

    def environment(self) -> ShopEnvironment:
        return ShopEnvironment(self.instructions, self.examples)

    @cached_property
    def _fixed(self) -> Mapping[str, tuple[TargetTask, ...]]:
        return fixed_splits()

    @cached_property
    def _reserved(self) -> set[str]:
        """Contents of the fixed splits: no round draws them."""
        return {self.content(task) for split in SPLITS for task in self.tasks(split)}

    def tasks(self, split: str) -> Sequence[TargetTask]:
        if split not in SPLITS:
            raise TargetError(f"split {split!r} does not exist; the splits are {', '.join(SPLITS)}")
        return self._fixed[split]

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        if split not in DRAWN_SPLITS:
            raise TargetError(f"split {split!r} is not drawn; {' and '.join(DRAWN_SPLITS)} are, test never changes")
        latest = self._latest
        if latest is None or latest[0] != draw:
            self._latest = latest = draw, drawn_splits(draw, self._reserved)
        return latest[1][split]

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        if family not in FAMILIES:
            raise TargetError(f"family {family!r} does not exist; the families are {', '.join(FAMILIES)}")
        own = {self.content(task) for split in DRAWN_SPLITS for task in self.drawn(split, draw)}
        return further_tasks(draw, self._reserved | own, family, count)

    def content(self, task: TargetTask) -> str:
        return content_of(task.payload["opening"], task.payload["reference"])

    @cached_property
    def data_hash(self) -> str:
        """Covers every task of every split, the instructions and the examples."""
        tasks = [[t.id, t.payload] for split in SPLITS for t in self.tasks(split)]
        return content_hash([tasks, self.instructions, [m.as_dict() for m in self.examples], MAX_STEPS])

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {name: family.capabilities for name, family in FAMILIES.items()}

    def generate(self, family: str, seed: int) -> TargetTask:
        if family not in FAMILIES:
            raise TargetError(f"family {family!r} does not exist; the families are {', '.join(FAMILIES)}")
        if not 0 <= seed < FRESH_SEEDS:
            raise TargetError(f"seed {seed} is out of range; give 0 to {FRESH_SEEDS - 1}")
        return fresh(family, seed)


@cache
def target() -> ShopTarget:
    """The shop with its standard instructions; one for all, since its tasks are drawn once."""
    return ShopTarget()
