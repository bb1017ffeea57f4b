"""Trains choose_newest_record: list what there is, compare dates, and act on the right one only."""

import datetime
import random

CAPABILITY = "choose_newest_record"
TRANSFER = (
    "Customers of the target name things by description, not by id; here, too, a list has to be read to find the one."
)
INSTRUCTIONS = "List a customer's orders, then archive the newest one."
MAX_STEPS = 5
LEVELS = 2
STEP = {"tool": "archive_order", "argument": "number"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "list_orders",
            "description": "List a customer's orders.",
            "parameters": {"type": "object", "properties": {"customer": {"type": "string"}}, "required": ["customer"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "archive_order",
            "description": "Archive an order by number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    },
]


def scenario(seed, level):
    rng = random.Random(seed)
    customer = rng.choice(["ada", "ben", "cleo", "dan"]) + str(rng.randint(10, 99))
    numbers = rng.sample(range(1000, 9999), rng.randint(12, 14) + 6 * level)
    start = datetime.date(2025, 1, 1)
    days = rng.sample(range(300), len(numbers))
    orders = [
        {"number": n, "date": str(start + datetime.timedelta(days=d))} for n, d in zip(numbers, days, strict=True)
    ]
    newest = max(orders, key=lambda order: order["date"])["number"]
    return {
        "request": f"This is {customer}. Archive my newest order.",
        "state": {"customer": customer, "orders": orders, "archived": []},
        "goal": {
            "calls": [{"name": "archive_order", "arguments": {"number": newest}}],
            "allowed": ["list_orders"],
            "state": {"archived": [newest]},
        },
    }


def transition(state, call):
    if call["name"] == "list_orders":
        mine = call["arguments"]["customer"] == state["customer"]
        return {"state": state, "result": state["orders"] if mine else []}
    number = call["arguments"]["number"]
    if number not in [order["number"] for order in state["orders"]]:
        return {"state": state, "result": {"error": "no such order"}}
    state["archived"].append(number)
    return {"state": state, "result": {"archived": number}}


def reward(scenario, state, log):
    wanted = scenario["goal"]["state"]["archived"]
    if state["archived"] == wanted:
        tries = sum(e.get("name") == "archive_order" and "error" not in e for e in log)
        return 1.0 if tries == 1 else 0.3
    listed = any(e.get("name") == "list_orders" and e.get("result") for e in log)
    return 0.2 if listed and not state["archived"] else 0.0


def oracle(scenario, state, log):
    if not log:
        return {"calls": [{"name": "list_orders", "arguments": {"customer": state["customer"]}}]}
    return {"calls": scenario["goal"]["calls"]} if len(log) == 1 else None


def _archiving(choose):
    def policy(scenario, state, log):
        call = {"name": "archive_order", "arguments": {"number": choose(state["orders"])["number"]}}
        return None if log else {"calls": [call]}

    return policy


WRONG = {
    "oldest": _archiving(lambda orders: min(orders, key=lambda order: order["date"])),
    "beyond": _archiving(lambda orders: {"number": 1}),
    "second": _archiving(lambda orders: sorted(orders, key=lambda order: order["date"])[-2]),
}
