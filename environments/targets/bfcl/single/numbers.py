"""The same item with other numbers, in its question and its reference alike."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from environments.targets.bfcl.single.items import Item

# Numbers that stand alone: no part of a word, a date, a time, a range, a power, a negative one or one with separators.
NUMBER = re.compile(r"(?<![\w.,/:^*\-])[0-9]+(?:\.[0-9]+)?(?![\w/:^*\-]|[.,][0-9])")
YEARS = range(1800, 2100)


def with_other_numbers(item: Item, rng: random.Random) -> Item | None:
    """`item` with other numbers of as many digits, or None when it has none that can be exchanged.

    A number is exchanged when it stands exactly once in the question and exactly once in the reference, there as the
    only value accepted of an argument that must be given (what may be left out may stand there by default and have
    nothing to do with the question). Nothing is exchanged in an item whose reference asks for a number that its
    question does not show: it may be worked out from one that it does show.
    """
    text = item.messages[0][1]
    shown = NUMBER.findall(text)
    if not _all_shown(item, shown):
        return None
    new: dict[str, str] = {}
    taken = {float(number) for number in shown} | set(_leaves(item.reference))
    for number in shown:
        if _exchangeable(item, number, shown):
            other = _other(number, rng, taken)
            if other:
                new[number] = other
                taken.add(float(other))
    if not new:
        return None
    values = {float(old): other for old, other in new.items()}
    said = NUMBER.sub(lambda found: new.get(found.group(), found.group()), text)
    reference = tuple(_exchanged(call, values) for call in item.reference)
    return replace(item, messages=((item.messages[0][0], said), *item.messages[1:]), reference=reference)


def _leaves(value: Any) -> Iterator[float]:
    """The numbers in a reference, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _accepted(item: Item) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    """Each argument of each call of the reference: how the function describes it, and its accepted values."""
    described = {function["name"]: function["parameters"]["properties"] for function in item.functions}
    for call in item.reference:
        for name, arguments in call.items():
            for key, accepted in arguments.items():
                yield described[name].get(key, {}), accepted


def _all_shown(item: Item, shown: list[str]) -> bool:
    """Whether the question shows every number that the answer needs."""
    numbers = {float(number) for number in shown}
    return all("" in accepted or numbers.issuperset(_leaves(accepted)) for _, accepted in _accepted(item))


def _exchangeable(item: Item, number: str, shown: list[str]) -> bool:
    """Whether one number can be another without making the reference wrong. 0 and 1 often are no quantities."""
    value = float(number)
    if (value < 2 and "." not in number) or [float(other) for other in shown].count(value) != 1:
        return False
    # It may also stand in a text of the reference ("5 miles"), or within a word or date of the question.
    digits = re.compile(rf"(?<![0-9]){re.escape(number)}(?![0-9])")
    if any(digits.search(text) for text in _texts(item.reference)) or len(digits.findall(item.messages[0][1])) != 1:
        return False
    if list(_leaves(item.reference)).count(value) != 1:
        return False
    ((what, accepted),) = [pair for pair in _accepted(item) if value in _leaves(pair[1])]
    whole = "." not in number or what.get("type") == "float" or what.get("items", {}).get("type") == "float"
    return whole and "enum" not in what and len(accepted) == 1


def _other(number: str, rng: random.Random, taken: set[float]) -> str:
    """Another number of the same form that is not in `taken`; "" when none is found."""
    before, dot, after = number.partition(".")
    for _ in range(20):
        if not dot and int(before) in YEARS:
            other = str(rng.randint(max(YEARS.start, int(before) - 40), int(before)))
        else:
            first = 2 if len(before) == 1 and not dot else 10 ** (len(before) - 1) * (len(before) > 1)
            other = str(rng.randint(first, 10 ** len(before) - 1))
        if dot:
            other += f".{rng.randint(1, 10 ** len(after) - 1):0{len(after)}}"
        if float(other) not in taken:
            return other
    return ""


def _exchanged(value: Any, new: Mapping[float, str]) -> Any:
    """A reference with other numbers, each of the kind that it was."""
    if isinstance(value, Mapping):
        return {key: _exchanged(item, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exchanged(item, new) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and value in new:
        other = float(new[value])
        return other if isinstance(value, float) else int(other)
    return value
