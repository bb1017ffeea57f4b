"""Trains tell_cheapest_flight: search the flights of a day, and tell the number of the cheapest."""

import random

CAPABILITY = "tell_cheapest_flight"
TRANSFER = "The target's customers want the cheapest flight between two cities, which only a search shows."
INSTRUCTIONS = "Search before you tell anything about flights."
MAX_STEPS = 4
LEVELS = 2
STEP = {"say": "answer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_direct_flight",
            "description": "Search direct flights.",
            "parameters": {
                "type": "object",
                "properties": {
                    "origin": {"type": "string"},
                    "destination": {"type": "string"},
                    "date": {"type": "string"},
                },
                "required": ["origin", "destination", "date"],
            },
        },
    },
]


_CITIES = ["SFO", "JFK", "LAX", "ORD", "DFW", "DEN", "SEA", "ATL", "MIA", "BOS", "PHX", "IAH"]


def scenario(seed, level):
    rng = random.Random(seed)
    origin, destination = rng.sample(_CITIES, 2)
    numbers = rng.sample(range(100, 1000), 14 + 6 * level)
    flights = [{"flight_number": f"HAT{numbers[0]}", "price": rng.randint(50, 99)}]
    flights += [{"flight_number": f"HAT{number}", "price": rng.randint(100, 400)} for number in numbers[1:]]
    rng.shuffle(flights)
    look = {"origin": origin, "destination": destination, "date": f"2024-05-{rng.randint(10, 28)}"}
    return {
        "request": f"Which flight from {origin} to {destination} on {look['date']} is cheapest? Its number, please.",
        "state": {"look": look, "shown": flights},
        "goal": {
            "calls": [{"name": "search_direct_flight", "arguments": look}],
            "allowed": ["search_direct_flight"],
            "says": [f"HAT{numbers[0]}"],
        },
    }


def _dearest(state):
    return max(state["shown"], key=lambda flight: flight["price"])["flight_number"]


def transition(state, call):
    found = call["arguments"] == state["look"]
    return {"state": state, "result": state["shown"] if found else []}


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
    "dearest": _telling(_dearest),
    "price": _telling(lambda state: min(flight["price"] for flight in state["shown"])),
}
