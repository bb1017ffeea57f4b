"""Trains look_up_customer_by_name: find a customer by name and zip code, and tell the id that was found."""

import random

CAPABILITY = "look_up_customer_by_name"
TRANSFER = (
    "The target's customers must be found before anything is done for them; many only know their name and zip code."
)
INSTRUCTIONS = "Find the customer by name and zip code."
MAX_STEPS = 4
LEVELS = 2
STEP = {"say": "answer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_user_id_by_name_zip",
            "description": "Find a user id.",
            "parameters": {
                "type": "object",
                "properties": {
                    "first_name": {"type": "string"},
                    "last_name": {"type": "string"},
                    "zip": {"type": "string"},
                },
                "required": ["first_name", "last_name", "zip"],
            },
        },
    },
]


_FIRST = ["Anna", "Bo", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jo"]
_LAST = ["Abel", "Brand", "Cole", "Doyle", "Evans", "Frey", "Gray", "Hart", "Iversen", "Jung"]


def scenario(seed, level):
    rng = random.Random(seed)
    first, last, code = rng.choice(_FIRST), rng.choice(_LAST), f"{rng.randint(10000, 99999)}"
    found = f"{first}_{last}_{rng.randint(1000, 9999)}".lower()
    look = {"first_name": first, "last_name": last, "zip": code}
    plain = f"I am {first} {last} from {code}. What is my user id?"
    longer = (
        f"My friend in {rng.randint(10000, 99999)} told me about you. I live in {code}; {last} is my name, {first} "
    )
    return {
        "request": f"{longer}{last}. Which user id have I got?" if level else plain,
        "state": {"look": look, "shown": found},
        "goal": {
            "calls": [{"name": "find_user_id_by_name_zip", "arguments": look}],
            "allowed": ["find_user_id_by_name_zip"],
            "says": [found],
        },
    }


def transition(state, call):
    found = call["arguments"] == state["look"]
    return {"state": state, "result": state["shown"] if found else "Error: User not found"}


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
    "zip": _telling(lambda state: state["look"]["zip"]),
    "name": _telling(lambda state: state["look"]["last_name"]),
}
