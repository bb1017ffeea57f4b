"""Trains ask_for_missing_detail: ask the customer for what the request leaves out instead of inventing it."""

import random

CAPABILITY = "ask_for_missing_detail"
TRANSFER = (
    "Requests of the target leave out ids that only the customer knows; the simulated customer here behaves the same."
)
INSTRUCTIONS = "If the order number is missing, ask for it. Never guess. Then file the claim."
MAX_STEPS = 5
LEVELS = 3
STEP = {"say": "ask"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "file_claim",
            "description": "File a claim for an order.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer"}, "about": {"type": "string", "enum": ["late", "broken"]}},
                "required": ["number", "about"],
            },
        },
    }
]

# What stands in the way of the wish, by level.
_BESIDES = (
    ("", "Hello. ", "Good day. "),
    ("I wrote to you last week already. ", "Your shop was said to be good. ", "I am at work, so please be quick. "),
    (
        "My sister ordered 2 things with you and both came in time. ",
        "I paid 40 for it and have waited for 9 days. ",
        "The parcel before this one, in May, came after 3 days. ",
    ),
)


def scenario(seed, level):
    rng = random.Random(seed)
    number, about = rng.randint(10000, 99999), rng.choice(["late", "broken"])
    words = {"late": "has not come yet", "broken": "came in pieces"}[about]
    name = rng.choice(["Kim", "Lou", "Max", "Noa", "Pat"]) + f" {rng.choice('ABCDEFGH')}."
    return {
        "request": f"{name} here. {_BESIDES[level][rng.randrange(3)]}My order {words}, I want to file a claim.",
        "state": {"number": number, "asked": 0, "claims": []},
        "goal": {"calls": [{"name": "file_claim", "arguments": {"number": number, "about": about}}]},
    }


def transition(state, call):
    state["claims"].append(call["arguments"])
    return {"state": state, "result": {"claim": len(state["claims"])}}


def reply(state, text):
    if state["claims"] or state["asked"] >= 2 or "?" not in text:
        return {"state": state, "message": None}
    state["asked"] += 1
    if "number" in text.lower():
        return {"state": state, "message": f"It is {state['number']}."}
    return {"state": state, "message": "What do you need to know?"}


def reward(scenario, state, log):
    wanted = scenario["goal"]["calls"][0]["arguments"]
    if state["claims"] == [wanted]:
        return 1.0
    return 0.2 if state["asked"] and not state["claims"] else 0.0


def oracle(scenario, state, log):
    if not log:
        return {"say": "What is the number of your order?"}
    return {"calls": scenario["goal"]["calls"]} if len(log) == 1 else None


def _guess(scenario, state, log):
    return None if log else {"calls": [{"name": "file_claim", "arguments": {"number": 12345, "about": "late"}}]}


def _ask_only(scenario, state, log):
    return {"say": "What is the number of your order?"} if len(log) < 2 else None


def _give_up(scenario, state, log):
    return None if log else {"say": "Please call our hotline."}


WRONG = {"guess": _guess, "ask_only": _ask_only, "give_up": _give_up}
