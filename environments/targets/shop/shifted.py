"""The shift test's surroundings: another stock, other towns and customers, other ways to say the same wants.

Nothing in it occurs in the ordinary shop, whose tools and rules stay as they are. It is only ever reported
(`shop:shift`): nothing is trained or chosen on it.
"""

from __future__ import annotations

from environments.targets.shop.families import Surroundings
from environments.targets.shop.lines import Lines
from environments.targets.shop.world import Stock

STOCK = Stock(
    items={
        "sofa": {"price": 310, "options": ["velvet", "leather", "canvas"]},
        "teapot": {"price": 31, "options": ["copper", "glass", "clay"]},
        "scarf": {"price": 19, "options": ["silk", "striped", "plain"]},
        "tent": {"price": 145, "options": ["yellow", "orange", "purple"]},
        "guitar": {"price": 230, "options": ["maple", "cedar", "walnut"]},
        "mirror": {"price": 74, "options": ["framed", "bare", "tilted"]},
        "bicycle": {"price": 420, "options": ["light", "sturdy", "folding"]},
        "pillow": {"price": 17, "options": ["soft", "firm", "cool"]},
    },
    customers=("abel", "berta", "cora", "dora", "emil", "fritz", "greta", "hans", "inga", "kurt", "lars", "moni"),
    towns=("Prague", "Warsaw", "Zurich", "Helsinki", "Brussels", "Porto", "Seville", "Krakow", "Bergen", "Turin"),
    coupon_words=("AUTUMN", "FRIEND", "BONUS", "LUCKY", "FIRST", "PARTY"),
)
LINES = Lines(
    status=(
        "Has order {n} left yet?",
        "Any news about order {n}?",
        "How far along is order {n}?",
        "I would like to know what became of order {n}.",
    ),
    cancel=(
        "I no longer need order {n}, cancel it.",
        "Order {n} was a mistake. Cancel it, please.",
        "Would you mind cancelling order {n}?",
        "Let us cancel order {n}.",
        "Drop order {n}, please.",
    ),
    cancel_without_number=(
        "I changed my mind, cancel what I ordered.",
        "I no longer need my order, cancel it.",
        "My order was a mistake. Cancel it, please.",
        "Would you mind cancelling what I ordered?",
    ),
    number=("That would be {n}.", "{n}, I believe.", "Here it is: {n}."),
    cancel_other=(
        "Drop order {w}... no, make that order {n}.",
        "I no longer need order {w}. My mistake, it is order {n}.",
        "Would you mind cancelling order {w}? I meant {n}, actually.",
    ),
    also_cancel=(
        "One more thing: drop order {n}.",
        "While you are at it, cancel order {n}.",
        "I no longer need order {n} either, cancel it.",
    ),
    refund=(
        "I should get {a} back for order {n}.",
        "Order {n} had a flaw, pay {a} back please.",
        "Would you return {a} to me for order {n}?",
        "I am owed {a} on order {n}.",
    ),
    refund_all=(
        "I want my money back for order {n}.",
        "Pay back everything for order {n}.",
        "Order {n} was useless, give me the whole sum back.",
        "Would you return the full price of order {n}?",
    ),
    price=(
        "What do you charge for the {i}?",
        "I am curious what a {i} would cost me.",
        "What must I pay for a {i}?",
        "Is the {i} expensive?",
    ),
    options=(
        "Tell me the variants of the {i}.",
        "In what versions do you sell the {i}?",
        "Is there any choice with the {i}?",
        "What sorts of {i} are in stock?",
    ),
    payment=(
        "Which way of paying do you have for {e}?",
        "I forgot how {e} is billed.",
        "Check how I am charged, my account is {e}.",
        "By which means does {e} pay?",
    ),
    move=(
        "Order {n} should go to {a} instead.",
        "I moved. Send order {n} to {a}.",
        "Would you redirect order {n} to {a}?",
        "Deliver order {n} to {a}, please.",
    ),
    swap=(
        "I would rather have {o} for order {n}.",
        "Exchange order {n}, I prefer {o}.",
        "Order {n} should have been {o}.",
        "Would you replace order {n} by {o}?",
    ),
    coupon=(
        "Take {c} off order {n}, it is a coupon.",
        "My coupon {c} belongs to order {n}.",
        "Would you redeem coupon {c} for order {n}?",
        "Order {n} should get my coupon {c}.",
    ),
    person=(
        "Connect me with someone real.",
        "Is there a human I can speak with?",
        "I refuse to speak with a machine.",
        "Put one of your staff on the line.",
    ),
    complaints=("fell apart", "smells odd", "was dirty", "lost its colour", "arrived open", "makes a noise"),
    greetings=("", "Good morning. ", "Dear shop. "),
    names=(
        *("Agnes", "Boris", "Cecil", "Doris", "Edgar", "Flora", "Gerda", "Henry", "Irene", "Jacob", "Klara", "Leon"),
        *("Magda", "Niels", "Olga", "Pavel", "Quinn", "Ralf", "Silke", "Theo", "Ulla", "Viola", "Willy", "Yara"),
    ),
)
SHIFTED = Surroundings(STOCK, LINES)
