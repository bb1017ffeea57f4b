"""Flawed on purpose: the goal asks for a zone that no tool sets."""

import random

CAPABILITY = "copy_exact_address"
TRANSFER = (
    "The target checks arguments character by character; addresses here vary in length and order as they do there."
)
INSTRUCTIONS = "Change the address exactly as the customer writes it."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "set_address", "argument": "address"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_address",
            "description": "Set the address of an order.",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}, "address": {"type": "string"}},
                "required": ["order_id", "address"],
            },
        },
    }
]
_STREETS = ["Oak Lane", "Mill Road", "St. John's Walk", "Harbour View", "Rue de l'Eau"]


def scenario(seed, level):
    rng = random.Random(seed)
    order_id = f"A-{rng.randint(100, 999)}"
    address = f"{rng.randint(1, 250)} {rng.choice(_STREETS)}, {rng.randint(10000, 99999)}"
    call = {"name": "set_address", "arguments": {"order_id": order_id, "address": address}}
    return {
        "request": "Please. " * level + f"Order {order_id} should go to {address} please.",
        "state": {"orders": {order_id: {"address": ""}}},
        "goal": {"calls": [call], "state": {f"orders.{order_id}.zone": rng.randint(1, 9)}},
    }


def transition(state, call):
    order = state["orders"].get(call["arguments"]["order_id"])
    if order is None:
        return {"state": state, "result": "no such order"}
    order["address"] = call["arguments"]["address"]
    return {"state": state, "result": "ok"}


def reward(scenario, state, log):
    made = [e for e in log if "name" in e and "error" not in e]
    if len(made) != 1:
        return 0.0
    wanted = scenario["goal"]["calls"][0]["arguments"]
    right = sum(made[0]["arguments"].get(k) == v for k, v in wanted.items())
    return (0.0, 0.2, 1.0)[right]


def oracle(scenario, state, log):
    return {"calls": [scenario["goal"]["calls"][0]]} if not log else None


def _changed(change):
    def policy(scenario, state, log):
        if log:
            return None
        arguments = scenario["goal"]["calls"][0]["arguments"]
        return {"calls": [{"name": "set_address", "arguments": {**arguments, "address": change(arguments["address"])}}]}

    return policy


WRONG = {
    "lower": _changed(str.lower),
    "cut": _changed(lambda a: a.split(",")[0]),
    "spaced": _changed(lambda a: a + " "),
}
