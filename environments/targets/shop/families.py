"""The task families of the shop: what a customer wants, how they say it, and the reference solution.

A family draws a scenario from a seed: the database, the customer's lines, the reference steps, the facts that the
customer must be told. Customers state what they want in one of several ways, give a missing fact when asked, change
their mind within a sentence, ask for what the policy forbids, or want a second thing once the first is done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from environments.targets.shop import lines, world
from environments.targets.shop.world import STATUSES, Database, new_database

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


@dataclass(frozen=True)
class Surroundings:
    """What a family is drawn with: the shop's stock and what its customers say."""

    stock: world.Stock
    lines: lines.Lines


ORDINARY = Surroundings(world.ORDINARY, lines.ORDINARY)
Draw: TypeAlias = Callable[[random.Random, Database, Surroundings], Scenario]


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


def _other_option(rng: random.Random, db: Database, number: str) -> str:
    """An option of the order's item that it does not have."""
    order = db["orders"][number]
    options: list[str] = [o for o in db["items"][order["item"]]["options"] if o != order["option"]]
    return rng.choice(options)


def order_status(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Where an order is."""
    n = _pick(rng, db, rng.choice(["pending", "shipped", "delivered"]))
    status, ask = db["orders"][n]["status"], rng.choice(at.lines.status)
    steps = [_call("find", order=int(n)), _say(f"Order {n} is {status}.")]
    return Scenario(db, ask.format(n=n), steps, facts=[_fact(status)])


def cancel_pending(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Cancel what may be cancelled."""
    n = _pick(rng, db, "pending")
    steps = [_call("cancel", order=int(n)), _say(f"Order {n} is cancelled.")]
    return Scenario(db, rng.choice(at.lines.cancel).format(n=n), steps)


def _refused(rng: random.Random, asked: Scenario, statuses: Sequence[str], why: str) -> Scenario:
    """The want on an order whose status forbids it: refuse and say why."""
    db, n = asked.database, str(asked.reference[0]["arguments"]["order"])
    status = db["orders"][n]["status"] = rng.choice(statuses)
    return Scenario(db, asked.opening, [_find(n), _say(f"Sorry, order {n} is {status}.")], facts=[_fact(status, why)])


def cancel_too_late(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Cancel what may not be cancelled any more: refuse and say why."""
    return _refused(rng, cancel_pending(rng, db, at), ["shipped", "delivered"], CANCEL_ORDER)


def refund_part(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Refund no more than what was paid."""
    n = _pick(rng, db, rng.choice(["shipped", "delivered"]))
    amount = rng.randint(3, db["orders"][n]["paid"] - 1)
    steps = [_call("refund", order=int(n), amount=amount), _say(f"{amount} of order {n} is refunded.")]
    return Scenario(db, rng.choice(at.lines.refund).format(n=n, a=amount), steps)


def refund_all(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """All of what was paid, which has to be looked up."""
    n = _pick(rng, db, rng.choice(["shipped", "delivered"]))
    paid = db["orders"][n]["paid"]
    steps = [
        _call("find", order=int(n)),
        _call("refund", order=int(n), amount=paid),
        _say(f"{paid} of order {n} is refunded."),
    ]
    return Scenario(db, rng.choice(at.lines.refund_all).format(n=n), steps)


def refund_too_much(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """More than what was paid: refuse and name what was paid."""
    n = _pick(rng, db, rng.choice(["shipped", "delivered"]))
    paid = db["orders"][n]["paid"]
    ask = rng.choice(at.lines.refund).format(n=n, a=paid + rng.randint(5, 90))
    say = _say(f"Sorry, order {n} paid {paid}, I cannot refund more.")
    return Scenario(db, ask, [_find(n), say], facts=[_fact(paid, REFUND_PAYMENT)])


def item_price(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """What an item costs."""
    item = rng.choice(sorted(db["items"]))
    ask, price = at.lines.signed(rng, rng.choice(at.lines.price)), db["items"][item]["price"]
    steps = [_call("price", item=item), _say(f"The {item} is {price} dollars.")]
    return Scenario(db, ask.format(i=item), steps, facts=[_fact(price)])


def item_options(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Which options an item comes in."""
    item = rng.choice(sorted(db["items"]))
    ask, options = at.lines.signed(rng, rng.choice(at.lines.options)), db["items"][item]["options"]
    steps = [_call("price", item=item), _say(f"The {item} comes in {', '.join(options)}.")]
    return Scenario(db, ask.format(i=item), steps, facts=[_fact(o) for o in options])


def payment_method(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """How a customer pays."""
    email = rng.choice(sorted(db["customers"]))
    method = db["customers"][email]["payment"]
    steps = [_call("account", email=email), _say(f"You pay by {method}.")]
    return Scenario(db, rng.choice(at.lines.payment).format(e=email), steps, facts=[_fact(method)])


def move_pending(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Send a pending order to another address."""
    n = _pick(rng, db, "pending")
    to = rng.choice([town for town in at.stock.towns if town != db["orders"][n]["address"]])
    steps = [_call("move", order=int(n), address=to), _say(f"Order {n} goes to {to}.")]
    return Scenario(db, rng.choice(at.lines.move).format(n=n, a=to), steps)


def move_too_late(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """A new address for an order that left: refuse and say why."""
    return _refused(rng, move_pending(rng, db, at), ["shipped", "delivered"], CHANGE_ADDRESS)


def swap_delivered(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """Another option of a delivered item."""
    n = _pick(rng, db, "delivered")
    option = _other_option(rng, db, n)
    steps = [_call("swap", order=int(n), option=option), _say(f"Order {n} is exchanged for {option}.")]
    return Scenario(db, rng.choice(at.lines.swap).format(n=n, o=option), steps)


def swap_too_early(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """An exchange of what has not arrived: refuse and say why."""
    return _refused(rng, swap_delivered(rng, db, at), ["shipped", "pending"], EXCHANGE_ITEM)


def use_coupon(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """A coupon on an order."""
    n, code = _pick(rng, db, "pending"), rng.choice(sorted(db["coupons"]))
    steps = [_call("coupon", order=int(n), code=code), _say(f"Coupon {code} is on order {n}.")]
    return Scenario(db, rng.choice(at.lines.coupon).format(n=n, c=code), steps)


def wants_person(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """A person is asked for, and why."""
    complaint = f"My {rng.choice(sorted(db['items']))} {rng.choice(at.lines.complaints)}."
    ask = at.lines.signed(rng, f"{complaint} {rng.choice(at.lines.person)}")
    return Scenario(db, ask, [_call("person"), _say("A person takes over now.")])


def cancel_without_number(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """The order number is missing; the customer gives it when asked."""
    n = _pick(rng, db, "pending")
    opening = at.lines.signed(rng, rng.choice(at.lines.cancel_without_number))
    steps = [
        _say("What is your order number?", ASK_MISSING),
        _call("cancel", order=int(n)),
        _say(f"Order {n} is cancelled."),
    ]
    return Scenario(db, opening, steps, replies=[{"when": "asked", "line": rng.choice(at.lines.number).format(n=n)}])


def cancel_other(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
    """The customer corrects the order number within the sentence."""
    scenario = cancel_pending(rng, db, at)
    n = str(scenario.reference[0]["arguments"]["order"])
    wrong = rng.choice([o for o in sorted(db["orders"]) if o != n])
    return Scenario(db, rng.choice(at.lines.cancel_other).format(w=wrong, n=n), scenario.reference)


def _then_cancel(first: Draw) -> Draw:
    """A family with a second want, brought up when the first is answered: cancel another order."""

    def both(rng: random.Random, db: Database, at: Surroundings) -> Scenario:
        asked = first(rng, db, at)
        taken = {str(step["arguments"].get("order")) for step in asked.reference if "call" in step}
        n = rng.choice([o for o in sorted(db["orders"]) if o not in taken])
        db["orders"][n]["status"] = "pending"
        line = rng.choice(at.lines.also_cancel).format(n=n)
        steps = [*asked.reference, _call("cancel", order=int(n)), _say(f"Order {n} is cancelled.")]
        return Scenario(db, asked.opening, steps, replies=[{"when": "any", "line": line}], facts=asked.facts)

    return both


@dataclass(frozen=True)
class Family:
    """A family: how to draw it and what it needs. Each has as many tasks as every other (`draws.PER_FAMILY`)."""

    draw: Draw
    capabilities: tuple[str, ...]


FAMILIES: Mapping[str, Family] = {
    "cancel_pending": Family(cancel_pending, (CANCEL_ORDER,)),
    "cancel_too_late": Family(cancel_too_late, (CANCEL_ORDER,)),
    "cancel_other": Family(cancel_other, (CANCEL_ORDER,)),
    "cancel_two": Family(_then_cancel(cancel_pending), (CANCEL_ORDER,)),
    "item_price": Family(item_price, (LOOK_UP_ITEM, REPORT_FACT)),
    "price_then_cancel": Family(_then_cancel(item_price), (LOOK_UP_ITEM, REPORT_FACT, CANCEL_ORDER)),
    "refund_part": Family(refund_part, (REFUND_PAYMENT,)),
    "refund_too_much": Family(refund_too_much, (REFUND_PAYMENT,)),
    "refund_then_cancel": Family(_then_cancel(refund_part), (REFUND_PAYMENT, CANCEL_ORDER)),
    "refund_all": Family(refund_all, (LOOK_UP_ORDER, REFUND_PAYMENT)),
    "move_pending": Family(move_pending, (CHANGE_ADDRESS,)),
    "move_too_late": Family(move_too_late, (CHANGE_ADDRESS,)),
    "swap_delivered": Family(swap_delivered, (EXCHANGE_ITEM,)),
    "swap_too_early": Family(swap_too_early, (EXCHANGE_ITEM,)),
    "order_status": Family(order_status, (LOOK_UP_ORDER, REPORT_FACT)),
    "item_options": Family(item_options, (LOOK_UP_ITEM, REPORT_FACT)),
    "payment_method": Family(payment_method, (LOOK_UP_CUSTOMER, REPORT_FACT)),
    "use_coupon": Family(use_coupon, (APPLY_COUPON,)),
    "wants_person": Family(wants_person, (HAND_OVER,)),
    "cancel_without_number": Family(cancel_without_number, (ASK_MISSING, CANCEL_ORDER)),
}
# Pairs of wants that only the shift test has.
COMPOSED: Mapping[str, Family] = {
    "status_then_cancel": Family(_then_cancel(order_status), (LOOK_UP_ORDER, REPORT_FACT, CANCEL_ORDER)),
    "coupon_then_cancel": Family(_then_cancel(use_coupon), (APPLY_COUPON, CANCEL_ORDER)),
    "move_then_cancel": Family(_then_cancel(move_pending), (CHANGE_ADDRESS, CANCEL_ORDER)),
    "swap_then_cancel": Family(_then_cancel(swap_delivered), (EXCHANGE_ITEM, CANCEL_ORDER)),
}


def every_family() -> Mapping[str, Family]:
    """All families by name, those of the shift test among them."""
    return {**FAMILIES, **COMPOSED}


def draw(family: str, seed: int, attempt: int = 0, at: Surroundings = ORDINARY) -> Scenario:
    """The scenario of `family` for `seed`; further attempts give others."""
    rng = random.Random(f"{family}:{seed}:{attempt}" if attempt else f"{family}:{seed}")
    return every_family()[family].draw(rng, new_database(rng, at.stock), at)
