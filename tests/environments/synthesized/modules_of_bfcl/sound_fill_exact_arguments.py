"""Trains fill_exact_arguments: answer with one line, a call of the right function with every value as it was said.

The target has no tools: what it is answered with is a message.
"""

import random

CAPABILITY = "fill_exact_arguments"
TRANSFER = "The target's answers are lines of calls as well, and a value that differs from the question's is wrong."
INSTRUCTIONS = "Answer with one line: a call of the function with its values."
MAX_STEPS = 1
LEVELS = 2
STEP = {"say": "answer"}
TOOLS = []

_THINGS = ["parcel", "crate", "barrel", "pallet", "box", "drum", "case", "bag", "sack", "bin", "tub", "roll"]
_PLACES = ["north", "south", "east", "west", "upper", "lower", "outer", "inner", "left", "right", "front", "rear"]
_SIGNATURE = "store_goods(thing=string, place=string, weight=integer) - Put goods in a place of the store."
_OTHER = "weigh_goods(thing=string) - Weigh goods."


def scenario(seed, level):
    rng = random.Random(seed)
    thing, place, weight = rng.choice(_THINGS), rng.choice(_PLACES), rng.randint(100, 999)
    asked = f"Put the {thing} of {weight} kg in the {place} part."
    if level:
        asked = f"The {place} part is free and weighs nothing yet; the {thing} there has {weight} kg. Put it in."
    return {
        "request": "\n".join([*([_OTHER] if level else []), _SIGNATURE, f"Question: {asked}"]),
        "state": {"thing": thing, "place": place, "weight": weight},
        "goal": {"says": [_line(thing, place, weight)]},
    }


def transition(state, call):
    return {"state": state, "result": "error: there are no tools"}


def reward(scenario, state, log):
    """All for the line alone, a little for the right function with another value."""
    said = [entry["say"].strip() for entry in log if "say" in entry]
    if said and said[-1] == scenario["goal"]["says"][0]:
        return 1.0
    return 0.1 if said and said[-1].startswith("store_goods(") else 0.0


def oracle(scenario, state, log):
    return None if log else {"say": scenario["goal"]["says"][0]}


def _line(thing, place, weight):
    return f'store_goods(thing="{thing}", place="{place}", weight={weight})'


def _answering(change):
    def policy(scenario, state, log):
        return None if log else {"say": _line(**{**state, **change(state)})}

    return policy


WRONG = {
    "other_weight": _answering(lambda state: {"weight": state["weight"] + 1}),
    "swapped": _answering(lambda state: {"thing": state["place"], "place": state["thing"]}),
    "no_place": _answering(lambda state: {"place": ""}),
}
