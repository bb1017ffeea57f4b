"""A few tasks of the shop as a target without generators: what a language model has to write environments for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.contract import Environment, TargetTask, content_hash
from environments.targets.shop import target as whole_shop

SIZES: Mapping[str, int] = {"diagnosis": 4, "validation": 2, "test": 2}
FAMILIES = ("move_pending", "cancel_pending", "item_price", "refund_part")


class SmallShop:
    """The shop's environment, the first tasks of four families, and no way to draw more."""

    name = "small-shop"
    licence = "Apache-2.0"

    def __init__(self) -> None:
        self._shop = whole_shop()

    def environment(self) -> Environment:
        return self._shop.environment()

    def tasks(self, split: str) -> Sequence[TargetTask]:
        tasks = self._shop.tasks(split)
        return [t for f in FAMILIES for t in [t for t in tasks if t.family == f][: SIZES[split]]]

    @property
    def data_hash(self) -> str:
        return content_hash([self._shop.data_hash, dict(SIZES), list(FAMILIES)])


def target() -> SmallShop:
    """The target `tests.integration.targets.small_shop:target`."""
    return SmallShop()
