"""What customers say, by what they want: the ordinary lines, which training and evaluation are drawn with, and how a
line is signed.

A round draws tasks that no round drew before (`draws.py`), so each family needs thousands of contents. Every line is
drawn with the same chance, so that the later rounds of a home, whose lines are what was left, are no harder.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Said = tuple[str, ...]


@dataclass(frozen=True)
class Lines:
    """Ways to say a want. `{n}` is an order's number, `{a}` an amount or a town, `{i}` an item, `{o}` an option, `{c}`
    a coupon's code, `{e}` an e-mail address, `{w}` the number of the order that was not meant."""

    status: Said
    cancel: Said
    cancel_without_number: Said
    number: Said
    cancel_other: Said
    also_cancel: Said
    refund: Said
    refund_all: Said
    price: Said
    options: Said
    payment: Said
    move: Said
    swap: Said
    coupon: Said
    person: Said
    complaints: Said
    greetings: Said
    names: Said

    def signed(self, rng: random.Random, text: str) -> str:
        """`text`, perhaps after a greeting, with the customer's name at its end."""
        # At its end: with the name in front ("Hello, this is Ann.") the base answered a third as many of the questions.
        return f"{rng.choice(self.greetings)}{text} {rng.choice(self.names)}"


ORDINARY = Lines(
    status=(
        "What is the status of order {n}?",
        "Where is order {n}?",
        "Status of order {n}?",
        "Where is my order {n}?",
    ),
    cancel=(
        "Please cancel order {n}.",
        "Cancel order {n} please.",
        "I want to cancel order {n}.",
        "Can you cancel order {n}?",
        "Could you cancel order {n}?",
        "I need to cancel order {n}.",
        "I would like to cancel order {n}.",
        "Please cancel my order {n}.",
    ),
    cancel_without_number=(
        "Please cancel my order.",
        "I want to cancel my order.",
        "Cancel my order please.",
        "Can you cancel my order?",
        "Could you cancel my order?",
        "I need to cancel my order.",
        "I would like to cancel my order.",
        "Can you cancel an order for me?",
    ),
    number=("Order {n}.", "It is order {n}.", "The number is {n}."),
    cancel_other=(
        "Cancel order {w}, no wait, order {n}.",
        "Please cancel order {w}. Sorry, I mean order {n}.",
        "I want to cancel order {w}, sorry, {n}.",
    ),
    also_cancel=("And cancel order {n}.", "Also cancel order {n} please.", "Please cancel order {n} too."),
    refund=(
        "Refund {a} of order {n}.",
        "Please refund {a} of order {n}.",
        "Can you refund {a} of order {n}?",
        "Refund me {a} for order {n}.",
    ),
    refund_all=(
        "Refund all of order {n}.",
        "Refund order {n} in full.",
        "Please refund all of order {n}.",
        "Can you refund all of order {n}?",
    ),
    price=(
        "How much is the {i}?",
        "How much is a {i}?",
        "Price of the {i}?",
        "What is the price of the {i}?",
        "How much does the {i} cost?",
        "Can you tell me the price of the {i}?",
    ),
    options=(
        "Which options does the {i} have?",
        "What kinds of {i} do you have?",
        "Which {i} can I choose?",
        "What options are there for the {i}?",
    ),
    payment=(
        "How do I pay? My account is {e}.",
        "What is the payment of account {e}?",
        "Payment of account {e}?",
        "My account is {e}, how do I pay?",
    ),
    move=(
        "Move order {n} to {a}.",
        "Please move order {n} to {a}.",
        "Can you move order {n} to {a}?",
        "I want to move order {n} to {a}.",
    ),
    swap=(
        "Swap order {n} for {o}.",
        "Please swap order {n} for {o}.",
        "Can you swap order {n} for {o}?",
        "I want to swap order {n} for {o}.",
    ),
    coupon=(
        "Use coupon {c} on order {n}.",
        "Coupon {c} for order {n}.",
        "Please put coupon {c} on order {n}.",
        "I have coupon {c} for order {n}.",
    ),
    person=(
        "I want to talk to a person.",
        "Let me talk to a person.",
        "Give me a person please.",
        "Get me a person.",
        "Can I talk to a person?",
        "I need a person.",
    ),
    complaints=(
        "came broken",
        "came late",
        "does not work",
        "has a scratch",
        "has a part missing",
        "is too small",
        "is not what I wanted",
        "never came",
    ),
    greetings=("", "Hello. ", "Hi. "),
    names=(
        *("Adam", "Alex", "Alice", "Amy", "Ann", "Anton", "Bella", "Ben", "Bob", "Carl", "Carla", "Clara", "Dan"),
        *("David", "Ella", "Emma", "Eva", "Finn", "Frank", "George", "Gina", "Grace", "Harry", "Helen", "Hugo"),
        *("Ida", "Ivan", "Jack", "Jane", "Jon", "Julia", "Karl", "Kate", "Kim", "Laura", "Lea", "Leo", "Lily"),
        *("Lucas", "Mark", "Mary", "Max", "Mia", "Nick", "Nina", "Nora", "Oscar", "Otto", "Paul", "Peter", "Pia"),
        *("Rita", "Rosa", "Ruth", "Sam", "Sara", "Simon", "Sofia", "Tina", "Tom", "Vera", "Victor", "Walter"),
        *("Zoe"),
    ),
)
