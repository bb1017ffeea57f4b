"""Fresh scenarios, recomposed from items of the diagnosis split alone.

Other numbers in a question and its reference alike; functions of other items beside the right ones; questions joined
into one; a question with another item's functions. What is guaranteed against the items of validation, test and the
live categories: no scenario's question is or contains one of theirs (those of fewer than `SHORTEST` characters: is), no
call of its reference is one of theirs, and its functions' names are not those of such an item. Every function on offer
is one of a diagnosis item's; some of these are, within another set, on offer in a held-out item too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from environments.targets.bfcl.single.items import Item, live_items, splits
from environments.targets.bfcl.single.numbers import with_other_numbers
from errors import TargetError

# Questions such as "hi" or "1" occur in every text.
SHORTEST = 20
ATTEMPTS = 2000
JOINTS = (" ", " Also: ", " And then: ", " Besides: ")
# Words of any question and any description, cut as `_words` cuts them: functions that share them may be unrelated.
COMMON = frozenset(
    (
        *("about", "based", "basis", "calcu", "compu", "deter", "each", "find", "from", "gener", "given", "infor"),
        *("into", "list", "much", "need", "numbe", "obtai", "perfo", "pleas", "provi", "retri", "retur", "show"),
        *("speci", "such", "that", "their", "them", "this", "using", "value", "what", "when", "where", "which"),
        *("with", "would", "your"),
    )
)


@dataclass(frozen=True)
class Pool:
    """What scenarios are made of, and what they may not be."""

    one_call: tuple[Item, ...]
    by_family: Mapping[str, tuple[Item, ...]]
    functions: tuple[Mapping[str, Any], ...]
    known: frozenset[tuple[str, frozenset[str]]]
    questions: frozenset[str]
    long_questions: tuple[str, ...]
    calls: frozenset[str]
    names: frozenset[frozenset[str]]

    def allows(self, item: Item) -> bool:
        """Whether a scenario is new and gives nothing of a held-out item away."""
        question = item.question
        return (
            question not in self.questions
            and self.calls.isdisjoint(item.calls)
            and item.names not in self.names
            and (question, item.names) not in self.known
            and not any(held in question for held in self.long_questions)
        )


@cache
def _pool() -> Pool:
    diagnosis = splits()["diagnosis"]
    held = [*splits()["validation"], *splits()["test"], *live_items()]
    functions: dict[str, Mapping[str, Any]] = {}
    for item in diagnosis:
        for function in item.functions:
            functions.setdefault(function["name"], function)
    questions = frozenset(item.question for item in held)
    families = dict.fromkeys(item.category for item in diagnosis)
    return Pool(
        one_call=tuple(item for item in diagnosis if len(item.reference) == 1),
        by_family={family: tuple(item for item in diagnosis if item.category == family) for family in families},
        functions=tuple(functions.values()),
        known=frozenset((item.question, item.names) for item in diagnosis),
        questions=questions,
        long_questions=tuple(sorted(question for question in questions if len(question) >= SHORTEST)),
        calls=frozenset(call for item in held for call in item.calls),
        names=frozenset(item.names for item in held),
    )


def generated(family: str, seed: int) -> Item:
    """The scenario of a family and a seed. Raises TargetError when the family has none or none is found."""
    if family not in _MAKERS:
        raise TargetError(f"family {family!r} does not exist; the families are {', '.join(_MAKERS)}")
    pool, rng = _pool(), random.Random(f"{family}:{seed}")
    for _ in range(ATTEMPTS):
        made = _MAKERS[family](pool, rng)
        if made is not None and pool.allows(made):
            return replace(made, id=f"{family}-{seed}", category=family)
    raise TargetError(f"family {family!r}: none of {ATTEMPTS} scenarios of seed {seed} is new; give another seed")


def _right(item: Item) -> tuple[Mapping[str, Any], ...]:
    """The functions that the reference calls."""
    wanted = {name for call in item.reference for name in call}
    return tuple(function for function in item.functions if function["name"] in wanted)


def _words(text: str) -> set[str]:
    """The telling words of a text, cut to five letters so that plurals are equal."""
    return {word[:5] for word in re.findall(r"[a-z]{4,}", text.lower().replace("_", " "))} - COMMON


def _told(function: Mapping[str, Any]) -> set[str]:
    """The telling words of a function's name and description."""
    return _words(f"{function['name']} {function['description']}")


def _foreign(pool: Pool, rng: random.Random, item: Item, count: int) -> list[Mapping[str, Any]] | None:
    """Functions for `item` that have nothing to do with it: they share no telling word with its question or functions,
    so none of them can be right. None when so many are not found."""
    words = _words(item.question)
    for function in item.functions:
        words |= _told(function)
    found: dict[str, Mapping[str, Any]] = {}
    for function in rng.sample(pool.functions, min(60, len(pool.functions))):
        if len(found) == count:
            break
        if words.isdisjoint(_told(function)):
            found[function["name"]] = function
    return list(found.values()) if len(found) == count else None


def _offering(item: Item, functions: Sequence[Mapping[str, Any]], rng: random.Random) -> Item:
    return replace(item, functions=tuple(rng.sample(list(functions), len(functions))))


def _with_foreign(pool: Pool, rng: random.Random, item: Item, count: int) -> Item | None:
    """`item` with `count` more functions, in any order."""
    more = _foreign(pool, rng, item, count)
    return None if more is None else _offering(item, [*item.functions, *more], rng)


def _joined(rng: random.Random, items: Sequence[Item]) -> Item | None:
    """Items of one call each as one question; the functions that they call, each once. None when two calls are equal,
    two functions of one name differ, or a function of one item could be right for what another asks: it shares a
    telling word with that question."""
    functions: dict[str, Mapping[str, Any]] = {}
    for item in items:
        for function in _right(item):
            if functions.setdefault(function["name"], function) != function:
                return None
    for item in items:
        asked, right = _words(item.question), {function["name"] for function in _right(item)}
        if any(name not in right and asked & _told(function) for name, function in functions.items()):
            return None
    if len({call for item in items for call in item.calls}) < len(items):
        return None
    joint = rng.choice(JOINTS)
    texts = [item.messages[0][1].strip() for item in items]
    text = joint.join(text if text[-1] in ".?!'\"" else f"{text}." for text in texts)
    reference = tuple(call for item in items for call in item.reference)
    return Item("", "", (("user", text),), tuple(functions.values()), reference)


def _simple(pool: Pool, rng: random.Random) -> Item | None:
    """One call with other numbers, or a question of `multiple` with its own function alone."""
    item = rng.choice(pool.one_call)
    return replace(with_other_numbers(item, rng) or item, functions=_right(item))


def _multiple(pool: Pool, rng: random.Random) -> Item | None:
    """A scenario of `_simple`, with one to three functions of other items beside the one that it calls."""
    item = _simple(pool, rng)
    return None if item is None else _with_foreign(pool, rng, item, rng.randint(1, 3))


def _parallel(pool: Pool, rng: random.Random) -> Item | None:
    """An item with other numbers; or one call's question asked two or three times with different numbers."""
    if rng.random() < 0.5:
        return with_other_numbers(rng.choice(pool.by_family["parallel"]), rng)
    item = rng.choice(pool.one_call)
    asked = [with_other_numbers(item, rng) for _ in range(rng.choice((2, 2, 3)))]
    return _joined(rng, [one for one in asked if one]) if all(asked) else None


def _parallel_multiple(pool: Pool, rng: random.Random) -> Item | None:
    """Questions of different functions joined, or an item with other numbers; perhaps another function beside."""
    if rng.random() < 0.3:
        item = rng.choice(pool.by_family["parallel_multiple"])
        made: Item | None = with_other_numbers(item, rng) or item
    else:
        chosen = rng.sample(pool.one_call, rng.choice((2, 2, 3)))
        made = _joined(rng, [with_other_numbers(item, rng) or item for item in chosen])
        if made is not None and len(made.functions) < len(chosen):
            return None
    return None if made is None else _with_foreign(pool, rng, made, rng.choice((0, 0, 1)))


def _irrelevance(pool: Pool, rng: random.Random) -> Item | None:
    """A question with a function of another item that has nothing to do with it."""
    item = rng.choice((*pool.one_call, *pool.by_family["irrelevance"]))
    other = _foreign(pool, rng, item, 1)
    return None if other is None else replace(item, functions=tuple(other), reference=())


_MAKERS: Mapping[str, Callable[[Pool, random.Random], Item | None]] = {
    "simple_python": _simple,
    "multiple": _multiple,
    "parallel": _parallel,
    "parallel_multiple": _parallel_multiple,
    "irrelevance": _irrelevance,
}
