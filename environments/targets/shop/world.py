"""The shop's database and its tools: plain data, deterministic, one copy per episode.

A database is a JSON object: `orders` by number, `customers` by e-mail, `items` by name, `coupons` by code and
`handed_over`. A tool either returns one line of text or changes the database and returns "ok"; whatever the agent
did wrong comes back as a line that begins with "error:".
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Database = dict[str, Any]


@dataclass(frozen=True)
class Stock:
    """What a shop deals in, and with whom. Orders go to the shop's branch in a town."""

    items: Mapping[str, Mapping[str, Any]]
    customers: tuple[str, ...]
    towns: tuple[str, ...]
    coupon_words: tuple[str, ...]


ORDINARY = Stock(
    items={
        "lamp": {"price": 40, "options": ["red", "white", "black"]},
        "mug": {"price": 12, "options": ["blue", "green", "white"]},
        "chair": {"price": 85, "options": ["oak", "black", "grey"]},
        "backpack": {"price": 60, "options": ["small", "large", "medium"]},
        "kettle": {"price": 35, "options": ["steel", "black", "white"]},
        "blanket": {"price": 28, "options": ["wool", "cotton", "linen"]},
        "clock": {"price": 22, "options": ["round", "square", "oval"]},
        "radio": {"price": 55, "options": ["silver", "brown", "black"]},
        "towel": {"price": 14, "options": ["blue", "pink", "white"]},
        "vase": {"price": 26, "options": ["tall", "short", "wide"]},
        "desk": {"price": 190, "options": ["oak", "pine", "steel"]},
        "pan": {"price": 45, "options": ["iron", "steel", "small"]},
        "umbrella": {"price": 18, "options": ["red", "green", "black"]},
        "basket": {"price": 16, "options": ["round", "square", "large"]},
        "candle": {"price": 9, "options": ["vanilla", "rose", "lemon"]},
        "ladder": {"price": 98, "options": ["tall", "short", "steel"]},
    },
    customers=(
        *("ann", "bob", "carla", "dan", "eva", "finn", "gina", "hugo"),
        *("ida", "jon", "kim", "lea", "max", "nora", "otto", "pia"),
    ),
    towns=("Paris", "Berlin", "Madrid", "London", "Rome", "Dublin", "Vienna", "Athens", "Oslo", "Lisbon"),
    coupon_words=("SAVE", "GIFT", "SPRING", "HELLO", "THANKS", "WINTER"),
)
STATUSES = ("pending", "shipped", "delivered", "cancelled")
CARDS = ("visa", "paypal", "mastercard", "giro")


def new_database(rng: random.Random, stock: Stock = ORDINARY) -> Database:
    """Three customers with two orders each, all coupons unused. Order numbers have three digits."""
    names = rng.sample(stock.customers, 3)
    numbers = rng.sample(range(101, 999), 6)
    codes = [f"{word}{rng.randint(10, 99)}" for word in rng.sample(stock.coupon_words, 2)]
    customers, orders = {}, {}
    for index, name in enumerate(names):
        email = f"{name}{rng.randint(10, 99)}@mail.com"
        mine = numbers[2 * index : 2 * index + 2]
        town, card = rng.choice(stock.towns), rng.choice(CARDS)
        customers[email] = {"name": name, "address": town, "payment": card, "orders": mine}
        for number in mine:
            item = rng.choice(sorted(stock.items))
            orders[str(number)] = {
                "customer": email,
                "status": rng.choice(STATUSES[:3]),
                "item": item,
                "option": rng.choice(stock.items[item]["options"]),
                "paid": stock.items[item]["price"],
                "refunded": 0,
                "address": town,
                "coupon": "",
            }
    return {
        "customers": customers,
        "orders": orders,
        "items": {k: {**v, "options": list(v["options"])} for k, v in stock.items.items()},
        "coupons": dict.fromkeys(codes, "unused"),
        "handed_over": "",
    }


@dataclass(frozen=True)
class Tool:
    """A tool of the desk: its parameters in order, and whether it changes the database."""

    name: str
    description: str
    parameters: Mapping[str, str]
    writes: bool
    run: Callable[..., str]

    def schema(self) -> dict[str, Any]:
        """OpenAI function schema."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(self.parameters)},
            },
        }


class ToolError(Exception):
    """What the agent did wrong; becomes an "error:" line."""


def _order(db: Database, number: Any) -> Any:
    order = db["orders"].get(str(number))
    if order is None:
        raise ToolError(f"no order {number}")
    return order


def plain_arguments(db: Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as a reference states them. `_order` finds an order by its number and by that number as text,
    so both are one call."""
    order = arguments.get("order")
    if isinstance(order, str) and order in db["orders"]:
        return {**arguments, "order": int(order)}
    return dict(arguments)


def _get_order(db: Database, order: Any) -> str:
    found = _order(db, order)
    return f"{found['status']}, {found['option']} {found['item']}, paid {found['paid']}"


def _get_item(db: Database, item: Any) -> str:
    found = db["items"].get(str(item).lower())
    if found is None:
        raise ToolError(f"no item {item}")
    return f"{found['price']} dollars, {', '.join(found['options'])}"


def _get_customer(db: Database, email: Any) -> str:
    found = db["customers"].get(str(email).lower())
    if found is None:
        raise ToolError(f"no customer {email}")
    return f"{found['name']}, pays by {found['payment']}, orders {found['orders'][0]} and {found['orders'][1]}"


def _cancel_order(db: Database, order: Any) -> str:
    found = _order(db, order)
    if found["status"] != "pending":
        raise ToolError(f"order is {found['status']}")
    found["status"] = "cancelled"
    return "ok"


def _set_address(db: Database, order: Any, address: Any) -> str:
    found = _order(db, order)
    if found["status"] != "pending":
        raise ToolError(f"order is {found['status']}")
    found["address"] = str(address)
    return "ok"


def _refund(db: Database, order: Any, amount: Any) -> str:
    found = _order(db, order)
    if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 < amount < math.inf:
        raise ToolError(f"amount {amount} is not a positive number")
    if found["refunded"] + amount > found["paid"]:
        raise ToolError(f"paid only {found['paid'] - found['refunded']}")
    found["refunded"] += amount
    return "ok"


def _exchange(db: Database, order: Any, option: Any) -> str:
    found = _order(db, order)
    if found["status"] != "delivered":
        raise ToolError(f"order is {found['status']}")
    if option not in db["items"][found["item"]]["options"]:
        raise ToolError(f"no {option} {found['item']}")
    found["option"] = option
    return "ok"


def _apply_coupon(db: Database, order: Any, code: Any) -> str:
    found = _order(db, order)
    if str(code) not in db["coupons"]:
        raise ToolError(f"no coupon {code}")
    if db["coupons"][str(code)] != "unused":
        raise ToolError(f"coupon {code} is used")
    if found["coupon"]:
        raise ToolError("order has a coupon")
    found["coupon"], db["coupons"][str(code)] = str(code), "used"
    return "ok"


def _hand_over(db: Database) -> str:
    db["handed_over"] = "yes"
    return "ok"


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("find", "Status, item and payment of an order.", {"order": "integer"}, False, _get_order),
        Tool("price", "Price and options of an item.", {"item": "string"}, False, _get_item),
        Tool("account", "Payment method and orders of a customer.", {"email": "string"}, False, _get_customer),
        Tool("cancel", "Cancel a pending order.", {"order": "integer"}, True, _cancel_order),
        Tool(
            "move", "Change where a pending order goes.", {"order": "integer", "address": "string"}, True, _set_address
        ),
        Tool(
            "refund", "Pay money back, at most what was paid.", {"order": "integer", "amount": "number"}, True, _refund
        ),
        Tool(
            "swap",
            "Exchange a delivered item for another option.",
            {"order": "integer", "option": "string"},
            True,
            _exchange,
        ),
        Tool("coupon", "Use a coupon on an order.", {"order": "integer", "code": "string"}, True, _apply_coupon),
        Tool("person", "Pass the customer on to a person.", {}, True, _hand_over),
    )
}


def call_tool(db: Database, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Run a tool. Returns its line and whether it worked; never raises for what the agent did."""
    tool = TOOLS.get(name)
    if tool is None:
        return f"error: no tool {name}", False
    if set(arguments) != set(tool.parameters):
        return f"error: {name} needs {' '.join(tool.parameters) or 'nothing'}", False
    if not all(isinstance(value, str | int | float) for value in arguments.values()):
        return "error: arguments are numbers or texts", False
    try:
        return tool.run(db, **arguments), True
    except ToolError as problem:
        return f"error: {problem}", False
