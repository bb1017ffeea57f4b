"""Trains pay_with_fullest_gift_card: read a customer's gift cards, and pay with the one that has most on it."""

import random

CAPABILITY = "pay_with_fullest_gift_card"
TRANSFER = "The target's customers say how they want to pay, and the id of the method stands in their profile alone."
INSTRUCTIONS = "Payment ids stand in the profile. Never invent one."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "get_user_details"}
_LOOK = "get_user_details"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_user_details",
            "description": "Show a user.",
            "parameters": {
                "type": "object",
                "properties": {"user_id": {"type": "string"}},
                "required": ["user_id"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "modify_pending_order_payment",
            "description": "Change how a pending order is paid.",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}, "payment_method_id": {"type": "string"}},
                "required": ["order_id", "payment_method_id"],
            },
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    user, order = (
        f"{rng.choice(['ana', 'bo', 'cy'])}_frey_{rng.randint(1000, 9999)}",
        f"#W{rng.randint(1000000, 9999999)}",
    )
    numbers = rng.sample(range(1000000, 9999999), 16 + 6 * level)
    fullest = f"gift_card_{numbers[0]}"
    cards = [{"id": fullest, "balance": rng.randint(80, 99)}]
    cards += [{"id": f"gift_card_{number}", "balance": rng.randint(1, 79)} for number in numbers[1:]]
    rng.shuffle(cards)
    look = {"user_id": user}
    return {
        "request": f"I am {user}. Let me pay order {order} with the gift card that has the most left on it.",
        "state": {"look": look, "shown": {"gift_cards": cards, "since": rng.randint(2001, 2024)}, "done": []},
        "goal": {
            "calls": [
                {"name": "get_user_details", "arguments": look},
                {
                    "name": "modify_pending_order_payment",
                    "arguments": {"order_id": order, "payment_method_id": fullest},
                },
            ],
            "allowed": ["get_user_details"],
        },
    }


def _emptiest(given, state):
    return {"payment_method_id": min(state["shown"]["gift_cards"], key=lambda card: card["balance"])["id"]}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "Error: User not found"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": {"status": "pending (payment changed)"}}


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
    "emptiest": _with(_emptiest),
    "made_up": _with(lambda given, state: {"payment_method_id": "gift_card_1"}),
}
