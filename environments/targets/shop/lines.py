"""Customers' lines of the families that hardly need a number: who signs, what is wrong, how they ask.

A round draws tasks that no round drew before (`draws.py`), so each family needs thousands of contents. Every line is
drawn with the same chance, so that the later rounds of a home, whose lines are what was left, are no harder.
"""

from __future__ import annotations

import random

CANCEL = (
    "Please cancel order {n}.",
    "Cancel order {n} please.",
    "I want to cancel order {n}.",
    "Can you cancel order {n}?",
    "Could you cancel order {n}?",
    "I need to cancel order {n}.",
    "I would like to cancel order {n}.",
    "Please cancel my order {n}.",
)
CANCEL_WITHOUT_NUMBER = (
    "Please cancel my order.",
    "I want to cancel my order.",
    "Cancel my order please.",
    "Can you cancel my order?",
    "Could you cancel my order?",
    "I need to cancel my order.",
    "I would like to cancel my order.",
    "Can you cancel an order for me?",
)
PRICE = (
    "How much is the {i}?",
    "How much is a {i}?",
    "Price of the {i}?",
    "What is the price of the {i}?",
    "How much does the {i} cost?",
    "Can you tell me the price of the {i}?",
)
OPTIONS = (
    "Which options does the {i} have?",
    "What kinds of {i} do you have?",
    "Which {i} can I choose?",
    "What options are there for the {i}?",
)
PERSON = (
    "I want to talk to a person.",
    "Let me talk to a person.",
    "Give me a person please.",
    "Get me a person.",
    "Can I talk to a person?",
    "I need a person.",
)
COMPLAINTS = (
    "came broken",
    "came late",
    "does not work",
    "has a scratch",
    "has a part missing",
    "is too small",
    "is not what I wanted",
    "never came",
)
GREETINGS = ("", "Hello. ", "Hi. ")
NAMES = (
    *("Adam", "Alex", "Alice", "Amy", "Ann", "Anton", "Bella", "Ben", "Bob", "Carl", "Carla", "Clara", "Dan"),
    *("David", "Ella", "Emma", "Eva", "Finn", "Frank", "George", "Gina", "Grace", "Harry", "Helen", "Hugo"),
    *("Ida", "Ivan", "Jack", "Jane", "Jon", "Julia", "Karl", "Kate", "Kim", "Laura", "Lea", "Leo", "Lily"),
    *("Lucas", "Mark", "Mary", "Max", "Mia", "Nick", "Nina", "Nora", "Oscar", "Otto", "Paul", "Peter", "Pia"),
    *("Rita", "Rosa", "Ruth", "Sam", "Sara", "Simon", "Sofia", "Tina", "Tom", "Vera", "Victor", "Walter"),
    *("Zoe"),
)


def signed(rng: random.Random, text: str) -> str:
    """`text`, perhaps after a greeting, with the customer's name at its end."""
    # At its end: with the name in front ("Hello, this is Ann.") the base answered a third as many of the questions.
    return f"{rng.choice(GREETINGS)}{text} {rng.choice(NAMES)}"
