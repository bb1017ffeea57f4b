"""Flawed on purpose: saying done is all that is asked."""

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
    return {
        "request": "Please. " * level + f"Order {order_id} should go to {address} please.",
        "state": {"orders": {order_id: {"address": ""}}},
        "goal": {"says": ["done"]},
    }


def transition(state, call):
    order = state["orders"].get(call["arguments"]["order_id"])
    if order is None:
        return {"state": state, "result": "no such order"}
    order["address"] = call["arguments"]["address"]
    return {"state": state, "result": "ok"}


def reward(scenario, state, log):
    return 1.0 if any("done" in e["say"].lower() for e in log if "say" in e) else 0.0


def oracle(scenario, state, log):
    return {"say": "Done."} if not log else None


def _wrong(text):
    return lambda scenario, state, log: {"say": text} if not log else None


WRONG = {"no": _wrong("No."), "later": _wrong("Later."), "sorry": _wrong("Sorry.")}
