"""Trains check_before_cancel: look an order up before acting on it, and act on what was found.

Each seed is a customer who wants an order cancelled. A third of the orders are still pending and must be cancelled
after the look-up, for the customer's reason; the others must be left alone and the customer told their status and how
many items they have. Each way asks for something that a guess rarely hits, so that always taking the same way pays in
few scenarios. Higher levels show more of an order and put more words around the wish; the goal stays what it is.
"""

import random

CAPABILITY = "check_before_cancel"
TRANSFER = (
    "The target's tasks hide the fact that decides behind a read tool. Here, too, the request never tells the status, "
    "so the only way to be right on both kinds of order is to look first and let the result decide."
)
INSTRUCTIONS = (
    "Look an order up before you change it. Cancel pending orders only, for the reason that the customer gives; "
    "otherwise tell the customer the status and the number of items."
)
MAX_STEPS = 6
LEVELS = 3
STEP = {"tool": "get_order"}
_REASONS = {
    "mistake": "I ordered it by mistake",
    "too late": "it comes after I need it",
    "cheaper elsewhere": "another shop asks less for it",
    "moved": "I no longer live there",
    "wrong size": "it would not fit me",
    "other": "I have my own grounds",
}
_ORDER = {"order_id": {"type": "string"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_order",
            "description": "Show an order.",
            "parameters": {"type": "object", "properties": _ORDER, "required": ["order_id"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "cancel_order",
            "description": "Cancel a pending order.",
            "parameters": {
                "type": "object",
                "properties": {**_ORDER, "reason": {"type": "string", "enum": sorted(_REASONS)}},
                "required": ["order_id", "reason"],
            },
        },
    },
]


def scenario(seed, level):
    """Initial state, the customer's words, and the goal, which transition never sees."""
    rng = random.Random(seed)
    order_id = f"W{rng.randint(10000, 99999)}"
    status = "pending" if rng.random() < 1 / 3 else rng.choice(["shipped", "delivered", "returned"])
    reason, items = rng.choice(sorted(_REASONS)), rng.randint(2, 60)
    look = {"name": "get_order", "arguments": {"order_id": order_id}}
    cancel = {"name": "cancel_order", "arguments": {"order_id": order_id, "reason": reason}}
    if status == "pending":
        goal = {"calls": [look, cancel], "allowed": ["get_order"], "state": {f"orders.{order_id}.status": "cancelled"}}
    else:
        goal = {"calls": [look], "allowed": ["get_order"], "says": [status, str(items)]}
    order = {"status": status, "items": items}
    if level > 0:
        order = {"parcels": rng.randint(61, 99), **order, "paid": rng.choice(["card", "voucher", "bill"])}
    before = rng.choice(["Hello again. ", "I hope you can help. ", "It is about a present. "]) if level > 1 else ""
    return {
        "request": f"{before}Please cancel my order {order_id}, {_REASONS[reason]}.",
        "state": {"orders": {order_id: order}},
        "goal": goal,
    }


def transition(state, call):
    """The next state and what the tool answers, in the target's result shape."""
    arguments = call["arguments"]
    order = state["orders"].get(arguments["order_id"])
    if order is None:
        return {"state": state, "result": {"error": "order not found"}}
    if call["name"] == "get_order":
        return {"state": state, "result": {"order_id": arguments["order_id"], **order}}
    if order["status"] != "pending":
        return {"state": state, "result": {"error": f"order is {order['status']}"}}
    order["status"] = "cancelled"
    return {"state": state, "result": {"order_id": arguments["order_id"], **order}}


def reward(scenario, state, log):
    """1 for everything that the goal asks; a fifth for the look-up alone; superfluous writes cost it."""
    goal = scenario["goal"]
    made = [{"name": e["name"], "arguments": e["arguments"]} for e in log if "name" in e and "error" not in e]
    writes = [c for c in made if c["name"] != "get_order"]
    looked = bool(made) and made[0] == goal["calls"][0]
    if writes != goal["calls"][1:] or not looked:
        return 0.2 if looked and not writes else 0.0
    said = [e["say"] for e in log if "say" in e]
    last = said[-1].lower() if said else ""
    told = len(last.split()) <= 60 and all(word in last for word in goal.get("says", []))
    return 1.0 if told else 0.2


def oracle(scenario, state, log):
    """The reference solution's next action, or None when there is nothing left to do."""
    calls = [e for e in log if "name" in e]
    if len(calls) < len(scenario["goal"]["calls"]):
        return {"calls": [scenario["goal"]["calls"][len(calls)]]}
    if any("say" in e for e in log):
        return None
    if len(calls) > 1:
        return {"say": "Your order is cancelled."}
    found = calls[0]["result"]
    return {"say": f"Your order is {found['status']}, with {found['items']} items; I cannot cancel it."}


def _cancel_blindly(scenario, state, log):
    order_id = next(iter(state["orders"]))
    return (
        {"calls": [{"name": "cancel_order", "arguments": {"order_id": order_id, "reason": "other"}}]}
        if not log
        else None
    )


def _only_look(scenario, state, log):
    return {"calls": [scenario["goal"]["calls"][0]]} if len(log) < 2 else {"say": "I have looked your order up."}


def _refuse_always(scenario, state, log):
    return {"say": "I cannot cancel this order."} if not log else None


WRONG = {"cancel_blindly": _cancel_blindly, "only_look": _only_look, "refuse_always": _refuse_always}
