"""Trains cancel_earliest_reservation: read a customer's reservations, and cancel the one that leaves first."""

import random

CAPABILITY = "cancel_earliest_reservation"
TRANSFER = "The target's customers describe a trip, and its reservation has to be found in their profile by its date."
INSTRUCTIONS = "Find the reservation that the customer means before you cancel anything."
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
            "name": "cancel_reservation",
            "description": "Cancel a reservation.",
            "parameters": {
                "type": "object",
                "properties": {"reservation_id": {"type": "string"}},
                "required": ["reservation_id"],
            },
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    user, count = f"bo_gray_{rng.randint(1000, 9999)}", 16 + 6 * level
    codes = ["".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(5)) + str(i % 10) for i in range(count)]
    trips = [{"code": codes[0], "leaves": f"2024-05-{rng.randint(10, 28)}"}]
    trips += [{"code": code, "leaves": f"2024-{rng.randint(6, 12):02}-{rng.randint(10, 28)}"} for code in codes[1:]]
    rng.shuffle(trips)
    look = {"user_id": user}
    return {
        "request": f"{user} here. Cancel the trip of mine that leaves first, please.",
        "state": {"look": look, "shown": {"reservations": trips, "membership": "silver"}, "done": []},
        "goal": {
            "calls": [
                {"name": "get_user_details", "arguments": look},
                {"name": "cancel_reservation", "arguments": {"reservation_id": codes[0]}},
            ],
            "allowed": ["get_user_details"],
        },
    }


def _latest(given, state):
    return {"reservation_id": max(state["shown"]["reservations"], key=lambda trip: trip["leaves"])["code"]}


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "Error: User not found"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": {"status": "cancelled"}}


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
    "latest": _with(_latest),
    "made_up": _with(lambda given, state: {"reservation_id": "ABCDEF"}),
}
