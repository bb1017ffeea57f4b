"""What a target may have besides tasks: all that belongs to it, or it counts as having none of it."""

from __future__ import annotations

import logging

from environments.contract import Target

logger = logging.getLogger("trace")

# The members of each optional part of the contract, and what a target without one of them does without.
_PARTS = (
    (("families", "generate"), "nothing is composed to train in"),
    (("drawn", "further", "content"), "no round draws tasks of its own"),
    (("drawn_test", "drawn_shift"), "comparisons play its fixed test tasks"),
    (("held_back_test", "held_back_shift"), "comparisons play its other test tasks"),
)


def tell_of_parts(target: Target) -> None:
    """Say where a target has some members of an optional part and lacks others: it would count as one without any."""
    for names, without in _PARTS:
        lacking = [name for name in names if not hasattr(target, name)]
        has = [name for name in names if name not in lacking and name != "content"]  # it also tells fixed tasks apart
        if has and lacking:
            logger.warning(
                "target %s has %s and lacks %s, so that %s; give it what is lacking (environments/contract.py)",
                target.name, _called(has), _called(lacking), without,
            )  # fmt: skip


def _called(names: list[str]) -> str:
    return " and ".join(f"{name}()" for name in names)
