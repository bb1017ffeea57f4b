"""Trains tell_cheapest_available_price: read a product's variants, and tell what the cheapest in stock costs."""

import random

CAPABILITY = "tell_cheapest_available_price"
TRANSFER = (
    "The target's customers ask for prices and stock; the answer has to be worked out from a long list of variants."
)
INSTRUCTIONS = "Tell prices exactly, of variants that are available."
MAX_STEPS = 4
LEVELS = 3
STEP = {"say": "answer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_product_details",
            "description": "Show a product.",
            "parameters": {
                "type": "object",
                "properties": {"product_id": {"type": "string"}},
                "required": ["product_id"],
            },
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    product = f"{rng.randint(1000000000, 9999999999)}"
    best = rng.randint(200, 400) + rng.randint(1, 99) / 100
    variants = [{"price": f"{best:.2f}", "item_id": f"{rng.randint(1000, 9999)}", "available": True, "weight": 2}]
    for i in range(14 + 4 * level):
        cheaper = i % 3 == 0
        price = rng.randint(50, 199) if cheaper else rng.randint(401, 900)
        item = {"item_id": f"{rng.randint(1000, 9999)}", "available": not cheaper, "weight": rng.randint(1, 9)}
        variants.append({"price": f"{price}.50", **item})
    rng.shuffle(variants)
    look = {"product_id": product}
    return {
        "request": f"What does the cheapest variant of product {product} cost that I can order today?",
        "state": {"look": look, "shown": {"variants": variants, "sold": rng.randint(10, 99)}},
        "goal": {
            "calls": [{"name": "get_product_details", "arguments": look}],
            "allowed": ["get_product_details"],
            "says": [f"{best:.2f}"],
        },
    }


def _prices(state):
    return sorted(float(variant["price"]) for variant in state["shown"]["variants"])


def transition(state, call):
    found = call["arguments"] == state["look"]
    return {"state": state, "result": state["shown"] if found else "Error: Product not found"}


def reward(scenario, state, log):
    """All for the look and then the right answer; a little for the look alone."""
    goal = scenario["goal"]
    looked = any(e.get("name") and "error" not in e and e["arguments"] == state["look"] for e in log)
    said = [e["say"] for e in log if "say" in e]
    right = bool(said) and said[-1].rstrip(".").split()[-1:] == goal["says"]
    return (1.0 if right and len(said[-1].split()) <= 20 else 0.15) if looked else 0.0


def oracle(scenario, state, log):
    if not log:
        return {"calls": scenario["goal"]["calls"]}
    return {"say": f"It is {scenario['goal']['says'][0]}."} if len(log) == 1 else None


def _guess(scenario, state, log):
    return None if log else {"say": f"It is {scenario['goal']['says'][0]}."}


def _only_look(scenario, state, log):
    return None if log else {"calls": scenario["goal"]["calls"]}


def _telling(choose):
    def policy(scenario, state, log):
        if not log:
            return {"calls": scenario["goal"]["calls"]}
        return {"say": f"It is {choose(state)}."} if len(log) == 1 else None

    return policy


WRONG = {
    "guess": _guess,
    "only_look": _only_look,
    "cheapest_of_all": _telling(lambda state: f"{_prices(state)[0]:.2f}"),
    "dearest": _telling(lambda state: f"{_prices(state)[-1]:.2f}"),
}
