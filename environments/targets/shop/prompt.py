"""What the agent reads before the first customer: instructions, and a worked example for every tool and procedure.

What an agent lacks behind them is not what was left unsaid. Nor is it the order in which it was said: that alone makes
the bare base half as good or twice as good, so the order is the one behind which the base solves most of the diagnosis
split, of all that were tried (`python -m benchmarks.shop --orders 12`, `benchmarks/findings/shop.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from environments.contract import Message, ToolCall

INSTRUCTIONS = (
    "You work at the desk of a shop. Answer with one call or one short sentence.\n"
    "Calls: find(order) price(item) account(email) cancel(order) move(order, address) refund(order, amount) "
    "swap(order, option) coupon(order, code) person()\n"
    "Cancel or move only pending orders, swap only delivered ones."
)


Turn: TypeAlias = str | tuple[str, dict[str, object]]


def _example(*turns: Turn) -> list[Message]:
    """A conversation that the customer begins: a call is followed by its result, a sentence by the customer's next."""
    messages: list[Message] = []
    role: Literal["user", "assistant", "tool"] = "user"
    for turn in turns:
        if isinstance(turn, tuple):
            messages.append(Message("assistant", "", (ToolCall(*turn),)))
            role = "tool"
        else:
            messages.append(Message(role, turn))
            role = "user" if role == "assistant" else "assistant"
    return messages


# One for every tool, in the order of the instructions, then one for every procedure: refuse, look up and act, ask.
WORKED: Sequence[Sequence[Message]] = (
    _example("Where is order 648?", ("find", {"order": 648}), "pending, red lamp, paid 40", "Order 648 is pending."),
    _example(
        "How much is the clock?",
        ("price", {"item": "clock"}),
        "22 dollars, round, square, oval",
        "The clock is 22 dollars.",
    ),
    _example(
        "Payment of account mia30@mail.com?",
        ("account", {"email": "mia30@mail.com"}),
        "mia, pays by visa, orders 355 and 902",
        "You pay by visa.",
    ),
    _example("Please cancel order 512.", ("cancel", {"order": 512}), "ok", "Order 512 is cancelled."),
    _example("Move order 385 to Rome.", ("move", {"order": 385, "address": "Rome"}), "ok", "Order 385 goes to Rome."),
    _example("Refund 7 of order 264.", ("refund", {"order": 264, "amount": 7}), "ok", "7 of order 264 is refunded."),
    _example(
        "Swap order 927 for oak.", ("swap", {"order": 927, "option": "oak"}), "ok", "Order 927 is exchanged for oak."
    ),
    _example(
        "Use coupon SAVE55 on order 418.",
        ("coupon", {"order": 418, "code": "SAVE55"}),
        "ok",
        "Coupon SAVE55 is on order 418.",
    ),
    _example("My mug came late. I need a person. Tom", ("person", {}), "ok", "A person takes over now."),
    _example(
        "Cancel order 731 please.",
        ("cancel", {"order": 731}),
        "error: order is shipped",
        "Sorry, order 731 is shipped.",
    ),
    _example(
        "Refund all of order 853.",
        ("find", {"order": 853}),
        "delivered, wool blanket, paid 28",
        ("refund", {"order": 853, "amount": 28}),
        "ok",
        "28 of order 853 is refunded.",
    ),
    _example(
        "Please cancel my order. Ann",
        "What is your order number?",
        "It is order 196.",
        ("cancel", {"order": 196}),
        "ok",
        "Order 196 is cancelled.",
    ),
)
# Places in `WORKED`, as the agent reads them.
ORDER = (1, 7, 10, 0, 6, 11, 4, 5, 2, 8, 9, 3)
EXAMPLES = tuple(message for place in ORDER for message in WORKED[place])
