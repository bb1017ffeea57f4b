"""Trains compute_refund_amount: work an amount out from what the tools show, and refund exactly that."""

import random
from decimal import Decimal

CAPABILITY = "compute_refund_amount"
TRANSFER = (
    "The target asks for amounts that no tool shows directly; the same reads and the same arithmetic are needed here."
)
INSTRUCTIONS = "A refund is price times quantity, less a fee of 2.50. Look the order up first."
MAX_STEPS = 5
LEVELS = 3
STEP = {"tool": "refund_order", "argument": "amount"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_order",
            "description": "Show an order.",
            "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "refund_order",
            "description": "Refund an amount, as text with two decimals.",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}, "amount": {"type": "string"}},
                "required": ["order_id", "amount"],
            },
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    order_id = f"R{rng.randint(1000, 9999)}"
    price, quantity = Decimal(rng.randint(500, 9000)) / 100, rng.randint(2, 3) + 2 * level
    amount = str((price * quantity - Decimal("2.50")).quantize(Decimal("0.01")))
    return {
        "request": f"I sent everything of {order_id} back. Please refund me.",
        "state": {"orders": {order_id: {"price": str(price), "quantity": quantity, "refunded": None}}},
        "goal": {
            "calls": [{"name": "refund_order", "arguments": {"order_id": order_id, "amount": amount}}],
            "allowed": ["get_order"],
            "state": {f"orders.{order_id}.refunded": amount},
        },
    }


def transition(state, call):
    order = state["orders"].get(call["arguments"]["order_id"])
    if order is None:
        return {"state": state, "result": {"error": "no such order"}}
    if call["name"] == "refund_order":
        if order["refunded"]:
            return {"state": state, "result": {"error": "already refunded"}}
        order["refunded"] = call["arguments"]["amount"]
    return {"state": state, "result": order}


def reward(scenario, state, log):
    goal = scenario["goal"]["calls"][0]
    refunds = [e for e in log if e.get("name") == "refund_order" and "error" not in e]
    if len(refunds) != 1:
        return 0.0
    return 1.0 if refunds[0]["arguments"] == goal["arguments"] else 0.1


def oracle(scenario, state, log):
    calls = [{"name": "get_order", "arguments": {"order_id": next(iter(state["orders"]))}}, *scenario["goal"]["calls"]]
    return {"calls": [calls[len(log)]]} if len(log) < 2 else None


def _refunding(amount):
    def policy(scenario, state, log):
        order_id, order = next(iter(state["orders"].items()))
        call = {"name": "refund_order", "arguments": {"order_id": order_id, "amount": amount(order)}}
        return None if log else {"calls": [call]}

    return policy


WRONG = {
    "price_only": _refunding(lambda order: order["price"]),
    "no_fee": _refunding(lambda order: str(Decimal(order["price"]) * order["quantity"])),
    "zero": _refunding(lambda order: "0.00"),
}
