"""Trains look_up_item: read an item's price or options from the shop's list, and tell what was asked.

Each seed is a customer who asks what an item costs or which kinds there are. Nothing of it stands in the question, so
the list has to be asked first, and the part of its answer that was asked for has to be told.
"""

import random

CAPABILITY = "look_up_item"
TRANSFER = (
    "The shop's customers ask for prices and options, which only its list tells; asking it first and telling the part "
    "that was asked for is the same here as there."
)
INSTRUCTIONS = "Tell customers what items cost and which options they have."
MAX_STEPS = 6
LEVELS = 2
STEP = {"tool": "price"}
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
            "name": "cancel",
            "description": "Cancel a pending order.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}},
                "required": ["order"],
            },
        },
    },
]
_ITEMS = [
    *("teapot", "scarf", "shelf", "pillow", "mirror", "rug", "stool", "tray", "bowl", "jug", "hammock", "lantern"),
    *("curtain", "bench", "cushion", "bottle", "wallet", "notebook", "toaster", "fan", "drill", "rake", "tent", "bell"),
]
_OPTIONS = [
    *("yellow", "purple", "orange", "beige", "golden", "copper", "glass", "leather", "paper", "thick", "thin", "soft"),
    *("plain", "striped", "dotted", "folding", "heavy", "light", "matt", "glossy", "woven", "bamboo"),
]
_PRICE = [
    "How much is the {i}?",
    "What is the price of the {i}?",
    "What does the {i} cost?",
    "How much is a {i}, please?",
    "Price of the {i} please?",
]
_KINDS = [
    "Which options does the {i} have?",
    "What kinds of {i} are there?",
    "Which options are there for the {i}?",
    "What can I choose for the {i}?",
]
_SECOND = ["And cancel order {n}.", "Please cancel order {n} as well.", "Also cancel order {n}, thank you."]
_BEFORE, _NAMES = ["", "Good day. ", "Hello. "], ["Greta", "Louis", "Ines", "Victor", "Yara", "Hugh", "Olga", "Pablo"]


def scenario(seed, level):
    """Initial state, the customer's words, and the goal, which transition never sees."""
    rng = random.Random(seed)
    kind = rng.choice(["price", "price", "options", "then cancel"])
    item, price = rng.choice(_ITEMS), rng.randint(11, 290)
    options, order = rng.sample(_OPTIONS, 3), rng.randint(101, 998)
    calls = [{"name": "price", "arguments": {"item": item}}]
    line, goal = "", {"calls": calls, "says": options if kind == "options" else [str(price)]}
    if kind == "then cancel":
        calls.append({"name": "cancel", "arguments": {"order": order}})
        line = rng.choice(_SECOND).format(n=order)
        goal = {"calls": calls}
    ask = rng.choice(_KINDS if kind == "options" else _PRICE).format(i=item)
    signed = f"{rng.choice(_BEFORE)}{ask} {rng.choice(_NAMES)}"
    return {
        "request": signed if level else ask,
        "state": {
            "items": {item: f"{price} dollars, {', '.join(options)}"},
            "price": str(price),
            "orders": {str(order): "pending"},
            "line": line,
        },
        "goal": goal,
    }


def transition(state, call):
    """The next state and what the tool answers, in the shop's words."""
    if call["name"] == "price":
        item = call["arguments"]["item"]
        return {"state": state, "result": state["items"].get(item.lower(), f"error: no item {item}")}
    number = call["arguments"]["order"]
    if state["orders"].get(str(number)) != "pending":
        return {"state": state, "result": f"error: no order {number}"}
    state["orders"][str(number)] = "cancelled"
    return {"state": state, "result": "ok"}


def _words(text):
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def reply(state, text):
    """The second wish of a customer who was told the price."""
    line = state["line"] if state["price"] in _words(text) else ""
    state["line"] = ""
    return {"state": state, "message": line or None}


def _made(log):
    return [{"name": e["name"], "arguments": e["arguments"]} for e in log if "name" in e and "error" not in e]


def reward(scenario, state, log):
    """1 for all that the goal asks; a fifth for the look alone, somewhat more for each option told."""
    goal, made = scenario["goal"], _made(log)
    if not made or made != goal["calls"][: len(made)]:
        return 0.0
    said = [e["say"] for e in log if "say" in e]
    last = _words(said[-1]) if said else []
    wanted = goal.get("says", [])
    told = sum(word in last for word in wanted) if len(last) <= 60 else 0
    if made == goal["calls"] and told == len(wanted):
        return 1.0
    return 0.2 + (0.1 * told if len(wanted) > 1 else 0.0)


def oracle(scenario, state, log):
    """The reference solution's next action, or None when there is nothing left to do."""
    calls, done = scenario["goal"]["calls"], len(_made(log))
    said = sum("say" in e for e in log)
    if said < done:
        if said:
            return {"say": "It is cancelled."}
        return {"say": " ".join(["It is", *scenario["goal"].get("says", [state["price"]])]) + "."}
    return {"calls": [calls[done]]} if done < len(calls) else None


def _say(text):
    def policy(scenario, state, log):
        return None if log else {"say": text}

    return policy


def _only_look(scenario, state, log):
    return None if log else {"calls": scenario["goal"]["calls"][:1]}


def _wrong_number(scenario, state, log):
    if not log:
        return {"calls": scenario["goal"]["calls"][:1]}
    return {"say": f"It is {int(state['price']) + 1} dollars."} if len(log) == 1 else None


WRONG = {"guess": _say("It is 20 dollars."), "only_look": _only_look, "wrong_number": _wrong_number}
