"""Trains swap_for_cheapest_option: read an item's options and their prices, and swap for the cheapest."""

import random

CAPABILITY = "swap_for_cheapest_option"
TRANSFER = (
    "Customers of the shop describe the option that they want; here, too, it has to be read from the answer of a tool."
)
INSTRUCTIONS = "Swap for the option that the customer describes."
MAX_STEPS = 4
LEVELS = 3
STEP = {"tool": "price"}
_LOOK = "price"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price and options of an item.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "swap",
            "description": "Exchange a delivered item for another option.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}, "option": {"type": "string"}},
                "required": ["order", "option"],
            },
        },
    },
]


_ITEMS = ["mug", "lamp", "clock", "chair", "kettle"]
_OPTIONS = [
    *("red", "blue", "green", "black", "white", "brown", "pink", "grey", "round", "square", "oval", "small", "large"),
    *("tall", "wide", "matt", "glossy", "plain", "striped", "dotted", "wooden", "steel"),
]


def scenario(seed, level):
    rng = random.Random(seed)
    number, item = rng.randint(101, 998), rng.choice(_ITEMS)
    cheapest = rng.choice(_OPTIONS)
    others = rng.sample([option for option in _OPTIONS if option != cheapest], 12 + 4 * level)
    prices = {cheapest: rng.randint(5, 9), **{option: rng.randint(10, 60) for option in others}}
    options = sorted(prices, key=lambda option: rng.random())
    look = {"item": item}
    return {
        "request": f"Please swap the {item} of order {number} for the cheapest option that you have.",
        "state": {
            "look": look,
            "shown": ", ".join(f"{o} {prices[o]}" for o in options),
            "options": options,
            "done": [],
        },
        "goal": {
            "calls": [
                {"name": "price", "arguments": look},
                {"name": "swap", "arguments": {"order": number, "option": cheapest}},
            ],
            "allowed": ["price"],
        },
    }


def _first_other(given, state):
    return {"option": next(option for option in state["options"] if option != given["option"])}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "error: no such item"}
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
    "another": _with(_first_other),
    "shouted": _with(lambda given, state: {"option": given["option"].upper()}),
}
