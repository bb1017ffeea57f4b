"""A few tasks of the shop as a target without generators: what a language model has to write environments for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.contract import Environment, TargetTask, content_hash
from environments.targets.shop import target as whole_shop
from environments.targets.shop.episode import ShopEnvironment
from environments.targets.shop.prompt import INSTRUCTIONS, WORKED

SIZES: Mapping[str, int] = {"diagnosis": 4, "validation": 2, "test": 2}
# Cancelling, being refused it, a price, a refund, where an order is: what the base can do is left for retention.
EXAMPLES = tuple(message for place in (3, 9, 1, 5, 0) for message in WORKED[place])
FAMILIES = ("move_pending", "cancel_pending", "item_price", "refund_part")


class SmallShop:
    """The shop behind a prompt that says nothing of moving an order, the first tasks of four families, and no way to
    draw more."""

    name = "small-shop"
    licence = "Apache-2.0"

    def __init__(self) -> None:
        self._shop = whole_shop()

    def environment(self) -> Environment:
        return ShopEnvironment(INSTRUCTIONS, EXAMPLES)

    def tasks(self, split: str) -> Sequence[TargetTask]:
        tasks = self._shop.tasks(split)
        return [t for f in FAMILIES for t in [t for t in tasks if t.family == f][: SIZES[split]]]

    @property
    def data_hash(self) -> str:
        return content_hash([self._shop.data_hash, dict(SIZES), list(FAMILIES), [m.as_dict() for m in EXAMPLES]])


def target() -> SmallShop:
    """The target `tests.integration.targets.small_shop:target`."""
    return SmallShop()
