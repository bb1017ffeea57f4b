"""Trains add_bags_to_reservation: read a reservation before bags are added, and count those that have to be paid."""

import random

CAPABILITY = "add_bags_to_reservation"
TRANSFER = (
    "The target's bags are counted per reservation, and how many are free depends on who flies: both are looked up."
)
INSTRUCTIONS = "In economy one bag for each person is free. Look a reservation up first."
MAX_STEPS = 4
LEVELS = 2
STEP = {"tool": "get_reservation_details"}
_LOOK = "get_reservation_details"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_reservation_details",
            "description": "Show a reservation.",
            "parameters": {
                "type": "object",
                "properties": {"reservation_id": {"type": "string"}},
                "required": ["reservation_id"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "update_reservation_baggages",
            "description": "Change the bags of a reservation.",
            "parameters": {
                "type": "object",
                "properties": {
                    "reservation_id": {"type": "string"},
                    "total_baggages": {"type": "integer"},
                    "nonfree_baggages": {"type": "integer"},
                    "payment_id": {"type": "string"},
                },
                "required": ["reservation_id", "total_baggages", "nonfree_baggages", "payment_id"],
            },
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    code = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(6))
    card, people, bags, more = (
        f"credit_card_{rng.randint(1000, 9999)}",
        rng.randint(2, 6),
        rng.randint(0, 9),
        rng.randint(1, 8),
    )
    look = {"reservation_id": code}
    shown = {"people": people, "cabin": "economy", "bags": bags}
    if level:
        shown = {"seats": [f"{rng.randint(1, 30)}{letter}" for letter in "ABCDEF"[:people]], **shown, "meals": people}
    act = {"total_baggages": bags + more, "nonfree_baggages": max(0, bags + more - people), "payment_id": card}
    return {
        "request": f"Please add {more} more bags to reservation {code}, and take what they cost from {card}.",
        "state": {"look": look, "shown": shown, "done": []},
        "goal": {
            "calls": [
                {"name": "get_reservation_details", "arguments": look},
                {"name": "update_reservation_baggages", "arguments": {**look, **act}},
            ],
            "allowed": ["get_reservation_details"],
        },
    }


def _forgetting(given, state):
    return {"total_baggages": given["total_baggages"] - state["shown"]["bags"] - 1}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "Error: Reservation not found"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": {"status": "updated"}}


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
    "all_paid": _with(lambda given, state: {"nonfree_baggages": given["total_baggages"]}),
    "forgetting": _with(_forgetting),
}
