"""Trains coupon_on_newest_order: list a customer's orders, and use the coupon on the newest."""

import random

CAPABILITY = "coupon_on_newest_order"
TRANSFER = (
    "Customers of the shop name orders by what they remember; here, too, the account has to be read to find the order."
)
INSTRUCTIONS = "Find the order that the customer means before you use a coupon."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "account"}
_LOOK = "account"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "account",
            "description": "Payment method and orders of a customer.",
            "parameters": {
                "type": "object",
                "properties": {"email": {"type": "string"}},
                "required": ["email"],
            },
        },
    },
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
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    email = f"{rng.choice(['ana', 'bo', 'cy', 'di'])}{rng.randint(10, 99)}@mail.com"
    code = f"{rng.choice(['HELLO', 'SPRING', 'THANKS'])}{rng.randint(10, 99)}"
    newest = rng.randint(101, 998)
    count = 16 + 6 * level
    others = rng.sample([n for n in range(101, 999) if n != newest], count)
    days = rng.sample(range(1, 29), count) if count <= 28 else []
    orders = [(newest, f"2025-06-{rng.randint(10, 28)}")]
    orders += [(number, f"2025-0{rng.randint(1, 5)}-{day:02}") for number, day in zip(others, days, strict=True)]
    rng.shuffle(orders)
    look = {"email": email}
    return {
        "request": f"I am {email}. Use my coupon {code} on my newest order.",
        "state": {
            "look": look,
            "shown": "pays by card, orders " + ", ".join(f"{number} of {date}" for number, date in orders),
            "orders": [number for number, _ in orders],
            "done": [],
        },
        "goal": {
            "calls": [
                {"name": "account", "arguments": look},
                {"name": "coupon", "arguments": {"order": newest, "code": code}},
            ],
            "allowed": ["account"],
        },
    }


def _other_order(given, state):
    return {"order": next(number for number in state["orders"] if number != given["order"])}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "error: no such customer"}
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
    "another_order": _with(_other_order),
    "code_in_small": _with(lambda given, state: {"code": given["code"].lower()}),
}
