"""Trains return_named_item: find the id of an item in an order, and return that item alone."""

import random

CAPABILITY = "return_named_item"
TRANSFER = "The target's customers name items by words, and tools take ids that only the order shows."
INSTRUCTIONS = "Return what the customer names, and nothing else."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "get_order_details"}
_LOOK = "get_order_details"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_order_details",
            "description": "Show an order.",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}},
                "required": ["order_id"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "return_delivered_order_items",
            "description": "Return items of a delivered order.",
            "parameters": {
                "type": "object",
                "properties": {
                    "order_id": {"type": "string"},
                    "item_ids": {"type": "array", "items": {"type": "string"}},
                    "payment_method_id": {"type": "string"},
                },
                "required": ["order_id", "item_ids", "payment_method_id"],
            },
        },
    },
]


_THINGS = [
    *("lamp", "kettle", "jacket", "tablet", "puzzle", "skateboard", "backpack", "speaker", "mouse", "desk", "bottle"),
    *("tent", "vase", "clock", "helmet", "wallet", "grill", "camera", "blanket", "shirt", "boots", "watch"),
]


def scenario(seed, level):
    rng = random.Random(seed)
    order, card = f"#W{rng.randint(1000000, 9999999)}", f"credit_card_{rng.randint(1000000, 9999999)}"
    wanted = rng.choice(_THINGS)
    names = [wanted, *rng.sample([name for name in _THINGS if name != wanted], 13 + 6 * level)]
    ids = {name: f"{rng.randint(1000000000, 9999999999)}" for name in names}
    rng.shuffle(names)
    look = {"order_id": order}
    act = {"order_id": order, "item_ids": [ids[wanted]], "payment_method_id": card}
    return {
        "request": f"I want to send the {wanted} of order {order} back, to {card}. I keep the rest.",
        "state": {
            "look": look,
            "shown": {"status": "delivered", "items": [{"name": name, "item_id": ids[name]} for name in names]},
            "done": [],
        },
        "goal": {
            "calls": [
                {"name": "get_order_details", "arguments": look},
                {"name": "return_delivered_order_items", "arguments": act},
            ],
            "allowed": ["get_order_details"],
        },
    }


def _everything(given, state):
    return {"item_ids": [item["item_id"] for item in state["shown"]["items"]]}


def _another(given, state):
    return {"item_ids": [i["item_id"] for i in state["shown"]["items"] if i["item_id"] not in given["item_ids"]][:1]}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "Error: Order not found"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": {"status": "return requested"}}


def _made(log):
    return [{"name": e["name"], "arguments": e["arguments"]} for e in log if "name" in e and "error" not in e]


def reward(scenario, state, log):
    """All for the look and then the one right act; a little for the look alone, nothing for any other act."""
    look, act = scenario["goal"]["calls"]
    made = _made(log)
    acts = [call for call in made if call["name"] != _LOOK]
    if not acts:
        return 0.15 if look in made else 0.0
    return 1.0 if acts == [act] and look in made[: made.index(act)] else 0.0


def oracle(scenario, state, log):
    calls = scenario["goal"]["calls"]
    return {"calls": [calls[len(log)]]} if len(log) < len(calls) else None


def _blindly(scenario, state, log):
    return None if log else {"calls": scenario["goal"]["calls"][1:]}


def _only_look(scenario, state, log):
    return None if log else {"calls": scenario["goal"]["calls"][:1]}


def _with(change):
    def policy(scenario, state, log):
        look, act = scenario["goal"]["calls"]
        other = {"name": act["name"], "arguments": {**act["arguments"], **change(act["arguments"], state)}}
        return {"calls": [(look, other)[len(log)]]} if len(log) < 2 else None

    return policy


WRONG = {
    "blindly": _blindly,
    "only_look": _only_look,
    "everything": _with(_everything),
    "another": _with(_another),
}
