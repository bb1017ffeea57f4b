"""Trains refund_half_of_price: find what was paid for an order, and pay half of it back."""

import random

CAPABILITY = "refund_half_of_price"
TRANSFER = (
    "The shop's refunds depend on what an order cost, which only find tells; here the share is asked for as well."
)
INSTRUCTIONS = "Look an order up before you pay anything back."
MAX_STEPS = 4
LEVELS = 3
STEP = {"tool": "find"}
_LOOK = "find"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Status, item and payment of an order.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}},
                "required": ["order"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "refund",
            "description": "Pay money back, at most what was paid.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}, "amount": {"type": "number"}},
                "required": ["order", "amount"],
            },
        },
    },
]


_BEFORE = ("", "It came with a scratch. ", "I bought 2 of them last year, and this one has a scratch. ")


def scenario(seed, level):
    rng = random.Random(seed)
    number, half = rng.randint(101, 998), rng.randint(11, 80)
    look = {"order": number}
    item = rng.choice(["mug", "lamp", "clock", "chair", "kettle"])
    parcels = f", {rng.randint(81, 99)} points" if level else ""
    return {
        "request": f"{_BEFORE[level]}I keep the {item} of order {number} if you give me half of its price back.",
        "state": {"look": look, "shown": f"delivered, {item}, paid {2 * half}{parcels}", "done": []},
        "goal": {
            "calls": [
                {"name": "find", "arguments": look},
                {"name": "refund", "arguments": {"order": number, "amount": half}},
            ],
            "allowed": ["find"],
        },
    }


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else f"error: no order {call['arguments']['order']}"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": "ok"}


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
    "all_of_it": _with(lambda given, state: {"amount": 2 * given["amount"]}),
    "one_less": _with(lambda given, state: {"amount": given["amount"] - 1}),
}
