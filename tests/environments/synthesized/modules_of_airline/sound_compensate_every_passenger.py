"""Trains compensate_every_passenger: count the people of a reservation, and send a certificate for all of them."""

import random

CAPABILITY = "compensate_every_passenger"
TRANSFER = (
    "The target's compensation is an amount for each passenger of a reservation, whom the customer does not count."
)
INSTRUCTIONS = "Count the passengers of the reservation."
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
            "name": "send_certificate",
            "description": "Send a certificate to a user.",
            "parameters": {
                "type": "object",
                "properties": {"user_id": {"type": "string"}, "amount": {"type": "integer"}},
                "required": ["user_id", "amount"],
            },
        },
    },
]


_NAMES = ["Ana", "Bo", "Cy", "Di", "Ed", "Flo", "Gil", "Hal", "Ida", "Jan", "Kai", "Lea", "Mia", "Ned", "Ola", "Pia"]


def scenario(seed, level):
    rng = random.Random(seed)
    code = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(6))
    user, each, people = f"ana_frey_{rng.randint(1000, 9999)}", rng.choice([50, 70, 100]), rng.randint(2, 10)
    look = {"reservation_id": code}
    shown = {"passengers": [{"name": name} for name in rng.sample(_NAMES, people)], "cabin": "business"}
    before = "We sat at the gate for 5 hours, and nobody told us anything. " if level else ""
    return {
        "request": f"{before}I am {user}. You promised {each} for each of us on {code}, as our flight was cancelled.",
        "state": {"look": look, "shown": shown, "each": each, "done": []},
        "goal": {
            "calls": [
                {"name": "get_reservation_details", "arguments": look},
                {"name": "send_certificate", "arguments": {"user_id": user, "amount": each * people}},
            ],
            "allowed": ["get_reservation_details"],
        },
    }


def transition(state, call):
    if call["name"] == _LOOK:
        found = call["arguments"] == state["look"]
        return {"state": state, "result": state["shown"] if found else "Error: Reservation not found"}
    state["done"].append(call["arguments"])
    return {"state": state, "result": "Certificate added"}


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
    "for_one": _with(lambda given, state: {"amount": state["each"]}),
    "for_one_more": _with(lambda given, state: {"amount": given["amount"] + state["each"]}),
}
