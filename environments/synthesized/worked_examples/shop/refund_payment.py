"""Trains refund_payment: pay back exactly what is asked, and where the shop refuses, tell what was paid.

Each seed is a customer who names an amount and an order. In some the amount is more than was paid: the tool refuses and
names what was, which has to be told. In others the customer has a second wish once the first is answered.
"""

import random

CAPABILITY = "refund_payment"
TRANSFER = (
    "The shop's customers name an amount and an order in one sentence. Which number is which, and what to say when the "
    "tool refuses, has to be read from the sentence and from the answer, here as there."
)
INSTRUCTIONS = "Pay back what the customer asks for. Where that is refused, say what was paid."
MAX_STEPS = 6
LEVELS = 2
STEP = {"tool": "refund", "argument": "amount"}
TOOLS = [
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
_ASKS = [
    "Refund {a} of order {n}.",
    "Please refund {a} of order {n}.",
    "I want {a} of order {n} back.",
    "Could you refund {a} of order {n}?",
    "Pay me {a} of order {n} back, please.",
]
_SECOND = ["And cancel order {n}.", "Please cancel order {n} as well.", "Also cancel order {n}, thank you."]
# Numbers before and after those that count: who copies the first or the last ones has not read the sentence.
_BEFORE = ["{x} things had a scratch.", "I have waited {x} days.", "It came {x} days late.", "I am customer {x}."]
_AFTER = ["My flat is number {y}.", "I live at number {y}.", "I am {y} years old.", "You have until day {y}."]
_GREETINGS = ["Good day to you.", "Hello, I hope you can help me.", "I was told to ask you."]


def scenario(seed, level):
    """Initial state, the customer's words, and the goal, which transition never sees."""
    rng = random.Random(seed)
    kind = rng.choice(["within", "too much", "then cancel"])
    number, other = rng.sample(range(101, 999), 2)
    paid = rng.randint(11, 240)
    amount = paid + rng.randint(3, 95) if kind == "too much" else rng.randint(2, paid - 1)
    calls = [{"name": "refund", "arguments": {"order": number, "amount": amount}}]
    goal = {"calls": calls, "says": [str(paid)] if kind == "too much" else []}
    line = ""
    if kind == "then cancel":
        calls.append({"name": "cancel", "arguments": {"order": other}})
        line = rng.choice(_SECOND).format(n=other)
    ask = rng.choice(_ASKS).format(n=number, a=amount)
    before, after = rng.choice(_BEFORE).format(x=rng.randint(2, 9)), rng.choice(_AFTER).format(y=rng.randint(31, 99))
    greeting = f"{rng.choice(_GREETINGS)} " if level else ""
    orders = {str(number): {"paid": paid, "refunded": 0}, str(other): {"status": "pending"}}
    return {
        "request": f"{greeting}{before} {ask} {after}",
        "state": {"orders": orders, "line": line},
        "goal": {key: value for key, value in goal.items() if value},
    }


def transition(state, call):
    """The next state and what the tool answers, in the shop's words."""
    number = call["arguments"]["order"]
    order = state["orders"].get(str(number))
    if order is None:
        return {"state": state, "result": f"error: no order {number}"}
    if call["name"] == "cancel":
        if order.get("status") != "pending":
            return {"state": state, "result": "error: order is delivered"}
        order["status"] = "cancelled"
        return {"state": state, "result": "ok"}
    amount = call["arguments"]["amount"]
    if amount <= 0:
        return {"state": state, "result": f"error: amount {amount} is not a positive number"}
    left = order.get("paid", 0) - order.get("refunded", 0)
    if amount > left:
        return {"state": state, "result": f"error: paid only {left}"}
    order["refunded"] = order["refunded"] + amount
    return {"state": state, "result": "ok"}


def reply(state, text):
    """The second wish, once the first is answered."""
    line, state["line"] = state["line"], ""
    return {"state": state, "message": line or None}


def _made(log):
    return [{"name": e["name"], "arguments": e["arguments"]} for e in log if "name" in e and "error" not in e]


def reward(scenario, state, log):
    """1 for all that the goal asks; a fifth for the first call alone, a tenth for the right order in it."""
    goal, made = scenario["goal"], _made(log)
    said = [e["say"] for e in log if "say" in e]
    last = said[-1] if said else ""
    if made == goal["calls"]:
        words = last.replace(".", " ").replace(",", " ").split()
        return 1.0 if len(words) <= 60 and all(word in words for word in goal.get("says", [])) else 0.2
    if not made or made[0]["name"] != "refund" or len(made) > len(goal["calls"]):
        return 0.0
    if made[0] == goal["calls"][0]:
        return 0.2
    return 0.1 if made[0]["arguments"]["order"] == goal["calls"][0]["arguments"]["order"] else 0.0


def oracle(scenario, state, log):
    """The reference solution's next action, or None when there is nothing left to do."""
    calls, done = scenario["goal"]["calls"], len(_made(log))
    said = sum("say" in e for e in log)
    if said < done:
        if "says" in scenario["goal"]:
            return {"say": f"Sorry, that order paid {scenario['goal']['says'][0]}, I cannot refund more."}
        return {"say": "It is refunded." if said == 0 else "It is cancelled."}
    return {"calls": [calls[done]]} if done < len(calls) else None


def _first_with(change):
    def policy(scenario, state, log):
        if log:
            return None
        given = scenario["goal"]["calls"][0]["arguments"]
        return {"calls": [{"name": "refund", "arguments": {**given, **change(given)}}]}

    return policy


def _promise(scenario, state, log):
    return None if log else {"say": "Your money is on its way."}


WRONG = {
    "one_less": _first_with(lambda given: {"amount": given["amount"] - 1}),
    "swapped": _first_with(lambda given: {"order": int(given["amount"]), "amount": given["order"]}),
    "other_order": _first_with(lambda given: {"order": 100}),
    "promise": _promise,
}
