"""The shop as a target: splits on disjoint seeds, fresh scenarios by family, instructions with worked examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property

from environments.contract import SPLITS, Message, TargetTask, ToolCall, content_hash
from environments.targets.shop.episode import MAX_STEPS, ShopEnvironment
from environments.targets.shop.families import FAMILIES, draw
from errors import TargetError

# Tasks per unit of a family's share, and where each split's seeds begin. Fresh scenarios begin above all of them.
PER_SHARE: Mapping[str, int] = {"diagnosis": 4, "validation": 4, "test": 4}
FIRST_SEED: Mapping[str, int] = {"diagnosis": 0, "validation": 100_000, "test": 200_000}
FRESH_SEED = 1_000_000

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
        self._drawn: dict[str, tuple[TargetTask, ...]] = {}

    def environment(self) -> ShopEnvironment:
        return ShopEnvironment(self.instructions, self.examples)

    def _task(self, family: str, seed: int, split: str) -> TargetTask:
        scenario = asdict(draw(family, seed))
        return TargetTask(f"{family}-{seed}", split, family, seed, scenario, FAMILIES[family].capabilities)

    def tasks(self, split: str) -> Sequence[TargetTask]:
        if split not in SPLITS:
            raise TargetError(f"split {split!r} does not exist; the splits are {', '.join(SPLITS)}")
        if split not in self._drawn:
            first = FIRST_SEED[split]
            self._drawn[split] = tuple(
                self._task(family, first + i, split)
                for family, what in FAMILIES.items()
                for i in range(what.share * PER_SHARE[split])
            )
        return self._drawn[split]

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
        if seed < 0:
            raise TargetError(f"seed {seed} is negative; give 0 or more")
        return self._task(family, FRESH_SEED + seed, "generated")


@cache
def target() -> ShopTarget:
    """The shop with its standard instructions; one for all, since its tasks are drawn once."""
    return ShopTarget()
