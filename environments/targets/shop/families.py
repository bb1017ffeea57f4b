"""The task families of the shop: what a customer wants, how they say it, and the reference solution.

A family draws a scenario from a seed: the database, the customer's lines, the reference steps, the facts that the
customer must be told. Customers state what they want in one of several ways, give a missing fact when asked, change
their mind within a sentence, ask for what the policy forbids, or want a second thing once the first is done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from environments.targets.shop import lines
from environments.targets.shop.world import ITEMS, STATUSES, TOWNS, Database, new_database

# Capabilities, in the words of the checks.
LOOK_UP_ORDER = "look_up_order"
LOOK_UP_ITEM = "look_up_item"
LOOK_UP_CUSTOMER = "look_up_customer"
CANCEL_ORDER = "cancel_order"
CHANGE_ADDRESS = "change_address"
REFUND_PAYMENT = "refund_payment"
EXCHANGE_ITEM = "exchange_item"
APPLY_COUPON = "apply_coupon"
HAND_OVER = "hand_over_customer"
REPORT_FACT = "report_fact"
ASK_MISSING = "ask_missing_fact"

# The capability that a call of each tool shows.
CAPABILITY_OF_TOOL: Mapping[str, str] = {
    "find": LOOK_UP_ORDER,
    "price": LOOK_UP_ITEM,
    "account": LOOK_UP_CUSTOMER,
    "cancel": CANCEL_ORDER,
    "move": CHANGE_ADDRESS,
    "refund": REFUND_PAYMENT,
    "swap": EXCHANGE_ITEM,
    "coupon": APPLY_COUPON,
    "person": HAND_OVER,
}


@dataclass
class Scenario:
    """A drawn task.

    `opening` is the customer's first line, `replies` the later ones: [{"when": "any" | "asked", "line": text}].
    `reference` are steps: {"call": name, "arguments": {...}, "optional"?} or {"say": text, "why": capability}.
    `facts` have to be told: [{"text", "why", "instead_of"}].
    """

    database: Database
    opening: str
    reference: list[dict[str, Any]]
    replies: list[dict[str, str]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"call": tool, "arguments": arguments}


def _find(number: str) -> dict[str, Any]:
    """A look-up that the reference solution makes but that an attempt would do as well: it is no check."""
    return {"call": "find", "arguments": {"order": int(number)}, "optional": True}


def _say(text: str, why: str = "") -> dict[str, Any]:
    return {"say": text, "why": why}


def _fact(text: object, why: str = REPORT_FACT) -> dict[str, Any]:
    """A fact that must be told. A status excludes the other statuses: naming them all tells nothing."""
    others = [status for status in STATUSES if status != text] if text in STATUSES else []
    return {"text": str(text), "why": why, "instead_of": others}


def _pick(rng: random.Random, db: Database, status: str | None = None) -> str:
    """An order number; its status is set to `status`."""
    number: str = rng.choice(sorted(db["orders"]))
    if status is not None:
        db["orders"][number]["status"] = status
    return number


def _other_option(rng: random.Random, order: Mapping[str, Any]) -> str:
    options: list[str] = [o for o in ITEMS[order["item"]]["options"] if o != order["option"]]
    return rng.choice(options)


def order_status(rng: random.Random, db: Database) -> Scenario:
    """Where an order is."""
    n = _pick(rng, db, rng.choice(["pending", "shipped", "delivered"]))
    status = db["orders"][n]["status"]
    ask = rng.choice(
        ["What is the status of order {n}?", "Where is order {n}?", "Status of order {n}?", "Where is my order {n}?"]
    )
    return Scenario(
        db, ask.format(n=n), [_call("find", order=int(n)), _say(f"Order {n} is {status}.")], facts=[_fact(status)]
    )


def cancel_pending(rng: random.Random, db: Database) -> Scenario:
    """Cancel what may be cancelled."""
    n = _pick(rng, db, "pending")
    ask = rng.choice(lines.CANCEL)
    steps = [_call("cancel", order=int(n)), _say(f"Order {n} is cancelled.")]
    return Scenario(db, ask.format(n=n), steps)


def cancel_too_late(rng: random.Random, db: Database) -> Scenario:
    """Cancel what may not be cancelled any more: refuse and say why."""
    scenario = cancel_pending(rng, db)
    n = str(scenario.reference[0]["arguments"]["order"])
    status = rng.choice(["shipped", "delivered"])
    db["orders"][n]["status"] = status
    say = _say(f"Sorry, order {n} is {status}.")
    return Scenario(db, scenario.opening, [_find(n), say], facts=[_fact(status, CANCEL_ORDER)])


def refund_part(rng: random.Random, db: Database) -> Scenario:
    """Refund no more than what was paid."""
    n = _pick(rng, db, rng.choice(["shipped", "delivered"]))
    amount = rng.randint(3, db["orders"][n]["paid"] - 1)
    ask = rng.choice(
        [
            "Refund {a} of order {n}.",
            "Please refund {a} of order {n}.",
            "Can you refund {a} of order {n}?",
            "Refund me {a} for order {n}.",
        ]
    )
    steps = [_call("refund", order=int(n), amount=amount), _say(f"{amount} of order {n} is refunded.")]
    return Scenario(db, ask.format(n=n, a=amount), steps)


def refund_all(rng: random.Random, db: Database) -> Scenario:
    """All of what was paid, which has to be looked up."""
    n = _pick(rng, db, rng.choice(["shipped", "delivered"]))
    paid = db["orders"][n]["paid"]
    ask = rng.choice(
        [
            "Refund all of order {n}.",
            "Refund order {n} in full.",
            "Please refund all of order {n}.",
            "Can you refund all of order {n}?",
        ]
    )
    steps = [
        _call("find", order=int(n)),
        _call("refund", order=int(n), amount=paid),
        _say(f"{paid} of order {n} is refunded."),
    ]
    return Scenario(db, ask.format(n=n), steps)


def refund_too_much(rng: random.Random, db: Database) -> Scenario:
    """More than what was paid: refuse and name what was paid."""
    scenario = refund_part(rng, db)
    n, amount = str(scenario.reference[0]["arguments"]["order"]), scenario.reference[0]["arguments"]["amount"]
    paid = db["orders"][n]["paid"]
    more = paid + rng.randint(5, 90)
    opening = scenario.opening.replace(f"efund {amount} ", f"efund {more} ").replace(f"me {amount} ", f"me {more} ")
    say = _say(f"Sorry, order {n} paid {paid}, I cannot refund more.")
    return Scenario(db, opening, [_find(n), say], facts=[_fact(paid, REFUND_PAYMENT)])


def item_price(rng: random.Random, db: Database) -> Scenario:
    """What an item costs."""
    item = rng.choice(sorted(ITEMS))
    ask = lines.signed(rng, rng.choice(lines.PRICE))
    price = ITEMS[item]["price"]
    return Scenario(
        db,
        ask.format(i=item),
        [_call("price", item=item), _say(f"The {item} is {price} dollars.")],
        facts=[_fact(price)],
    )


def item_options(rng: random.Random, db: Database) -> Scenario:
    """Which options an item comes in."""
    item = rng.choice(sorted(ITEMS))
    ask = lines.signed(rng, rng.choice(lines.OPTIONS))
    options = list(ITEMS[item]["options"])
    say = _say(f"The {item} comes in {', '.join(options)}.")
    return Scenario(db, ask.format(i=item), [_call("price", item=item), say], facts=[_fact(o) for o in options])


def payment_method(rng: random.Random, db: Database) -> Scenario:
    """How a customer pays."""
    email = rng.choice(sorted(db["customers"]))
    method = db["customers"][email]["payment"]
    ask = rng.choice(
        [
            "How do I pay? My account is {e}.",
            "What is the payment of account {e}?",
            "Payment of account {e}?",
            "My account is {e}, how do I pay?",
        ]
    )
    return Scenario(
        db, ask.format(e=email), [_call("account", email=email), _say(f"You pay by {method}.")], facts=[_fact(method)]
    )


def move_pending(rng: random.Random, db: Database) -> Scenario:
    """Send a pending order to another address."""
    n = _pick(rng, db, "pending")
    to = rng.choice([town for town in TOWNS if town != db["orders"][n]["address"]])
    ask = rng.choice(
        [
            "Move order {n} to {a}.",
            "Please move order {n} to {a}.",
            "Can you move order {n} to {a}?",
            "I want to move order {n} to {a}.",
        ]
    )
    steps = [_call("move", order=int(n), address=to), _say(f"Order {n} goes to {to}.")]
    return Scenario(db, ask.format(n=n, a=to), steps)


def move_too_late(rng: random.Random, db: Database) -> Scenario:
    """A new address for an order that left: refuse and say why."""
    scenario = move_pending(rng, db)
    n, status = str(scenario.reference[0]["arguments"]["order"]), rng.choice(["shipped", "delivered"])
    db["orders"][n]["status"] = status
    say = _say(f"Sorry, order {n} is {status}.")
    return Scenario(db, scenario.opening, [_find(n), say], facts=[_fact(status, CHANGE_ADDRESS)])


def swap_delivered(rng: random.Random, db: Database) -> Scenario:
    """Another option of a delivered item."""
    n = _pick(rng, db, "delivered")
    option, item = _other_option(rng, db["orders"][n]), db["orders"][n]["item"]
    ask = rng.choice(
        [
            "Swap order {n} for {o}.",
            "Please swap order {n} for {o}.",
            "Can you swap order {n} for {o}?",
            "I want to swap order {n} for {o}.",
        ]
    )
    steps = [_call("swap", order=int(n), option=option), _say(f"Order {n} is exchanged for {option}.")]
    return Scenario(db, ask.format(n=n, o=option, i=item), steps)


def swap_too_early(rng: random.Random, db: Database) -> Scenario:
    """An exchange of what has not arrived: refuse and say why."""
    scenario = swap_delivered(rng, db)
    n, status = str(scenario.reference[0]["arguments"]["order"]), rng.choice(["shipped", "pending"])
    db["orders"][n]["status"] = status
    say = _say(f"Sorry, order {n} is {status}.")
    return Scenario(db, scenario.opening, [_find(n), say], facts=[_fact(status, EXCHANGE_ITEM)])


def use_coupon(rng: random.Random, db: Database) -> Scenario:
    """A coupon on an order."""
    n, code = _pick(rng, db, "pending"), rng.choice(sorted(db["coupons"]))
    ask = rng.choice(
        [
            "Use coupon {c} on order {n}.",
            "Coupon {c} for order {n}.",
            "Please put coupon {c} on order {n}.",
            "I have coupon {c} for order {n}.",
        ]
    )
    return Scenario(
        db, ask.format(n=n, c=code), [_call("coupon", order=int(n), code=code), _say(f"Coupon {code} is on order {n}.")]
    )


def wants_person(rng: random.Random, db: Database) -> Scenario:
    """A person is asked for, and why."""
    complaint = f"My {rng.choice(sorted(ITEMS))} {rng.choice(lines.COMPLAINTS)}."
    ask = lines.signed(rng, f"{complaint} {rng.choice(lines.PERSON)}")
    return Scenario(db, ask, [_call("person"), _say("A person takes over now.")])


def cancel_without_number(rng: random.Random, db: Database) -> Scenario:
    """The order number is missing; the customer gives it when asked."""
    scenario = cancel_pending(rng, db)
    n = str(scenario.reference[0]["arguments"]["order"])
    opening = rng.choice(lines.CANCEL_WITHOUT_NUMBER)
    answer = rng.choice([f"Order {n}.", f"It is order {n}.", f"The number is {n}."])
    steps = [_say("What is your order number?", ASK_MISSING), *scenario.reference]
    return Scenario(db, opening, steps, replies=[{"when": "asked", "line": answer}])


def cancel_other(rng: random.Random, db: Database) -> Scenario:
    """The customer corrects the order number within the sentence."""
    scenario = cancel_pending(rng, db)
    n = str(scenario.reference[0]["arguments"]["order"])
    wrong = rng.choice([o for o in sorted(db["orders"]) if o != n])
    ask = rng.choice(
        [
            "Cancel order {w}, no wait, order {n}.",
            "Please cancel order {w}. Sorry, I mean order {n}.",
            "I want to cancel order {w}, sorry, {n}.",
        ]
    )
    return Scenario(db, ask.format(w=wrong, n=n), scenario.reference)


def _then_cancel(rng: random.Random, first: Scenario) -> Scenario:
    """A second want, brought up when the first is answered: cancel another order."""
    db = first.database
    taken = {str(step["arguments"].get("order")) for step in first.reference if "call" in step}
    n = rng.choice([o for o in sorted(db["orders"]) if o not in taken])
    db["orders"][n]["status"] = "pending"
    line = rng.choice(
        ["And cancel order {n}.", "Also cancel order {n} please.", "Please cancel order {n} too."]
    ).format(n=n)
    steps = [*first.reference, _call("cancel", order=int(n)), _say(f"Order {n} is cancelled.")]
    return Scenario(db, first.opening, steps, replies=[{"when": "any", "line": line}], facts=first.facts)


def cancel_two(rng: random.Random, db: Database) -> Scenario:
    """Two orders to cancel, one after the other."""
    return _then_cancel(rng, cancel_pending(rng, db))


def price_then_cancel(rng: random.Random, db: Database) -> Scenario:
    """A question first, then a cancellation."""
    return _then_cancel(rng, item_price(rng, db))


def refund_then_cancel(rng: random.Random, db: Database) -> Scenario:
    """A refund first, then a cancellation of another order."""
    return _then_cancel(rng, refund_part(rng, db))


@dataclass(frozen=True)
class Family:
    """A family: how to draw it, what it needs, and its share of the tasks (relative)."""

    draw: Callable[[random.Random, Database], Scenario]
    capabilities: tuple[str, ...]
    share: int = 2


FAMILIES: Mapping[str, Family] = {
    "cancel_pending": Family(cancel_pending, (CANCEL_ORDER,), 2),
    "cancel_too_late": Family(cancel_too_late, (CANCEL_ORDER,), 2),
    "cancel_other": Family(cancel_other, (CANCEL_ORDER,), 1),
    "cancel_two": Family(cancel_two, (CANCEL_ORDER,), 1),
    "item_price": Family(item_price, (LOOK_UP_ITEM, REPORT_FACT), 1),
    "price_then_cancel": Family(price_then_cancel, (LOOK_UP_ITEM, REPORT_FACT, CANCEL_ORDER), 1),
    "refund_part": Family(refund_part, (REFUND_PAYMENT,), 3),
    "refund_too_much": Family(refund_too_much, (REFUND_PAYMENT,), 2),
    "refund_then_cancel": Family(refund_then_cancel, (REFUND_PAYMENT, CANCEL_ORDER), 2),
    "refund_all": Family(refund_all, (LOOK_UP_ORDER, REFUND_PAYMENT), 1),
    "move_pending": Family(move_pending, (CHANGE_ADDRESS,), 5),
    "move_too_late": Family(move_too_late, (CHANGE_ADDRESS,), 2),
    "swap_delivered": Family(swap_delivered, (EXCHANGE_ITEM,), 5),
    "swap_too_early": Family(swap_too_early, (EXCHANGE_ITEM,), 2),
    "order_status": Family(order_status, (LOOK_UP_ORDER, REPORT_FACT), 1),
    "item_options": Family(item_options, (LOOK_UP_ITEM, REPORT_FACT), 1),
    "payment_method": Family(payment_method, (LOOK_UP_CUSTOMER, REPORT_FACT), 1),
    "use_coupon": Family(use_coupon, (APPLY_COUPON,), 1),
    "wants_person": Family(wants_person, (HAND_OVER,), 1),
    "cancel_without_number": Family(cancel_without_number, (ASK_MISSING, CANCEL_ORDER), 1),
}


def draw(family: str, seed: int, attempt: int = 0) -> Scenario:
    """The scenario of `family` for `seed`; further attempts give others."""
    rng = random.Random(f"{family}:{seed}:{attempt}" if attempt else f"{family}:{seed}")
    return FAMILIES[family].draw(rng, new_database(rng))
