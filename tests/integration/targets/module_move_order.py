"""Trains move_order_exactly: give the tool the order number and the town that the customer names, and nothing else."""

import random

CAPABILITY = "move_order_exactly"
TRANSFER = (
    "The shop's customers ask for a move in the same words; order and town are drawn anew, so only reading them helps."
)
INSTRUCTIONS = "You work at the desk of a shop. Move pending orders where the customer wants them."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "move", "argument": "address"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Change where a pending order goes.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}, "address": {"type": "string"}},
                "required": ["order", "address"],
            },
        },
    }
]
_TOWNS = ["Paris", "Berlin", "Madrid", "London", "Rome", "Dublin", "Vienna", "Athens", "Oslo", "Lisbon", "Prague"]
_ASKS = ["Move order {n} to {a}.", "Please move order {n} to {a}.", "I want to move order {n} to {a}."]
_LONGER = ["I have moved house. {ask} Thanks a lot.", "It is a present. {ask}", "Good day. {ask} It is urgent."]


def scenario(seed, level):
    rng = random.Random(seed)
    number, town = rng.randint(101, 998), rng.choice(_TOWNS)
    ask = rng.choice(_ASKS).format(n=number, a=town)
    return {
        "request": rng.choice(_LONGER).format(ask=ask) if level else ask,
        "state": {"orders": {str(number): {"address": rng.choice([t for t in _TOWNS if t != town])}}},
        "goal": {"calls": [{"name": "move", "arguments": {"order": number, "address": town}}]},
    }


def transition(state, call):
    order = state["orders"].get(str(call["arguments"]["order"]))
    if order is None:
        return {"state": state, "result": f"error: no order {call['arguments']['order']}"}
    order["address"] = call["arguments"]["address"]
    return {"state": state, "result": "ok"}


def reward(scenario, state, log):
    made = [e for e in log if "name" in e and "error" not in e]
    if len(made) != 1:
        return 0.0
    wanted = scenario["goal"]["calls"][0]["arguments"]
    right = sum(made[0]["arguments"].get(k) == v for k, v in wanted.items())
    return (0.05, 0.2, 1.0)[right]


def oracle(scenario, state, log):
    if not log:
        return {"calls": scenario["goal"]["calls"]}
    return {"say": "It is moved."} if len(log) == 1 else None


def _changed(**change):
    def policy(scenario, state, log):
        if log:
            return None
        return {"calls": [{"name": "move", "arguments": {**scenario["goal"]["calls"][0]["arguments"], **change}}]}

    return policy


def _promise(scenario, state, log):
    return None if log else {"say": "Your order is moved."}


WRONG = {"other_town": _changed(address="Atlantis"), "other_order": _changed(order=100), "promise": _promise}
