"""Trains apply_coupon: put the customer's coupon on the order that is meant, and tell why where it does not go.

Each seed is a customer with a code and an order. Some codes are used already, which the tool's answer alone tells.
"""

import random

CAPABILITY = "apply_coupon"
TRANSFER = (
    "The shop's customers give a code and an order's number in one sentence; both have to be copied exactly into the "
    "right places, here as there."
)
INSTRUCTIONS = "Put coupons on orders. Where a coupon does not go, tell the customer which one and why."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "coupon", "argument": "code"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "coupon",
            "description": "Use a coupon on an order.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "integer"}, "code": {"type": "string"}},
                "required": ["order", "code"],
            },
        },
    }
]
_WORDS = ["LUCKY", "BONUS", "WELCOME", "AUTUMN", "MAYDAY", "FRIEND", "EXTRA", "HAPPY", "BIRTHDAY", "SUNNY"]
_ASKS = [
    "Use coupon {c} on order {n}.",
    "Please use coupon {c} on order {n}.",
    "Put coupon {c} on order {n}.",
    "I have a coupon, {c}, for order {n}.",
    "Coupon {c} on order {n} please.",
]
# Numbers before and after those that count: who copies the first or the last ones has not read the sentence.
_BEFORE = ["I have ordered {x} times.", "I waited {x} days for it.", "Somebody gave me {x}.", "I am customer {x}."]
_AFTER = ["My flat is number {y}.", "I live at number {y}.", "I am {y} years old.", "It was in parcel {y}."]
_GREETINGS = ["Good day to you.", "Hello, I hope you can help me.", "I was told to ask you."]


def scenario(seed, level):
    """Initial state, the customer's words, and the goal, which transition never sees."""
    rng = random.Random(seed)
    used = rng.random() < 1 / 4
    number, code = rng.randint(101, 998), f"{rng.choice(_WORDS)}{rng.randint(10, 99)}"
    calls = [{"name": "coupon", "arguments": {"order": number, "code": code}}]
    ask = rng.choice(_ASKS).format(n=number, c=code)
    before, after = rng.choice(_BEFORE).format(x=rng.randint(2, 9)), rng.choice(_AFTER).format(y=rng.randint(31, 99))
    greeting = f"{rng.choice(_GREETINGS)} " if level else ""
    return {
        "request": f"{greeting}{before} {ask} {after}",
        "state": {"orders": {str(number): ""}, "coupons": {code: "used" if used else "unused"}},
        "goal": {"calls": calls, "says": ["used"]} if used else {"calls": calls},
    }


def transition(state, call):
    """The next state and what the tool answers, in the shop's words."""
    number, code = call["arguments"]["order"], call["arguments"]["code"]
    if str(number) not in state["orders"]:
        return {"state": state, "result": f"error: no order {number}"}
    if code not in state["coupons"]:
        return {"state": state, "result": f"error: no coupon {code}"}
    if state["coupons"][code] == "used":
        return {"state": state, "result": f"error: coupon {code} is used"}
    state["coupons"][code], state["orders"][str(number)] = "used", code
    return {"state": state, "result": "ok"}


def reward(scenario, state, log):
    """1 for all that the goal asks; a fifth for the call without the answer that it needs, less for half of a call."""
    goal = scenario["goal"]
    made = [{"name": e["name"], "arguments": e["arguments"]} for e in log if "name" in e and "error" not in e]
    if len(made) != 1:
        return 0.0
    if made == goal["calls"]:
        said = [e["say"] for e in log if "say" in e]
        last = said[-1].lower().replace(".", " ").split() if said else []
        return 1.0 if len(last) <= 60 and all(word in last for word in goal.get("says", [])) else 0.2
    wanted = goal["calls"][0]["arguments"]
    return 0.1 * sum(made[0]["arguments"].get(k) == v for k, v in wanted.items())


def oracle(scenario, state, log):
    """The reference solution's next action, or None when there is nothing left to do."""
    if not log:
        return {"calls": scenario["goal"]["calls"]}
    if len(log) > 1:
        return None
    if "says" in scenario["goal"]:
        return {"say": "Sorry, that coupon is used."}
    return {"say": "The coupon is on the order."}


def _with(change):
    def policy(scenario, state, log):
        if log:
            return None
        given = scenario["goal"]["calls"][0]["arguments"]
        return {"calls": [{"name": "coupon", "arguments": {**given, **change(given)}}]}

    return policy


def _promise(scenario, state, log):
    return None if log else {"say": "Your coupon is on the order, unless it is used."}


WRONG = {
    "lower_case": _with(lambda given: {"code": given["code"].lower()}),
    "without_number": _with(lambda given: {"code": given["code"].rstrip("0123456789")}),
    "other_order": _with(lambda given: {"order": 100}),
    "promise": _promise,
}
