"""Whether scenarios repeat other texts, by content: ids, numbers, addresses that they have in common.

Modules keep the shapes of the target's ids, so a short number meets one of a held-out task by chance. What counts is
therefore one entity that chance does not repeat (six digits or more), or two of the same text, or the same opening.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ENTITY = re.compile(r"[\w#][\w.@+-]*\w")
_DIGITS = 3
_RARE = 6
# Words of the last line of a request from which it is one: "Thank you." is none.
_LINE = 5
# From this share of scenarios on, single short entities of the evidence are no chance.
_COPIED = 0.5


@dataclass(frozen=True)
class Source:
    """A text that must not be repeated, under the name that a reason may use. `shown` texts were before the author's
    eyes, so that single entities of them count when most scenarios have one. `opening` is the request that the text
    begins with, its first line where that is not said."""

    name: str
    text: str
    shown: bool = False
    opening: str = ""


def entities(text: str) -> set[str]:
    """Words of a text that name one thing: with at least three digits or an @, in lower case and without a leading #.

    Dates and amounts of money are left out: they recur in unrelated texts.
    """
    words = {word.lstrip("#").lower() for word in _ENTITY.findall(text)}
    return {word for word in words if ("@" in word or _digits(word) >= _DIGITS) and not _is_common(word)}


def repeated(
    texts: Sequence[str], sources: Sequence[Source], public: str = "", requests: Sequence[str] = ()
) -> list[tuple[int, list[str], str]]:
    """(index of the text, what it repeats, name of the source) for every text that repeats a source. What stands in
    `public`, or in a quarter of at least eight sources, is common property. `requests` are those that the texts begin
    with; by default their first lines."""
    held = [entities(source.text) for source in sources]
    common = entities(public)
    if len(held) >= 8:
        counts = Counter(word for words in held for word in words)
        common |= {word for word, count in counts.items() if 4 * count >= len(held)}
    held = [words - common for words in held]
    where: dict[str, list[int]] = {}
    for number, words in enumerate(held):
        for word in words:
            where.setdefault(word, []).append(number)
    openings = {form: source.name for source in sources for form in _forms(source.opening or _first_line(source.text))}
    found: dict[int, tuple[list[str], str]] = {}
    single: dict[int, tuple[list[str], str]] = {}
    for index, text in enumerate(texts):
        mine = entities(text) & where.keys()
        shared: dict[int, list[str]] = {}
        for word in sorted(mine):
            for number in where[word]:
                shared.setdefault(number, []).append(word)
        copied = next((n for n, words in shared.items() if len(words) > 1 or _digits(words[0]) >= _RARE), None)
        request = requests[index] if requests else _first_line(text)
        opening = next((form for form in _forms(request) if form in openings), "")
        if copied is not None:
            found[index] = shared[copied][:4], sources[copied].name
        elif opening:
            found[index] = ["the same request"], openings[opening]
        else:
            _note_single(single, index, shared, sources)
    if len(found) + len(single) >= _COPIED * len(texts):
        found |= single
    return [(index, *found[index]) for index in sorted(found)]


def _note_single(
    single: dict[int, tuple[list[str], str]], index: int, shared: Mapping[int, list[str]], sources: Sequence[Source]
) -> None:
    for number, words in shared.items():
        if sources[number].shown:
            single[index] = words, sources[number].name
            return


def _digits(word: str) -> int:
    return sum(letter.isdigit() for letter in word)


def _is_common(word: str) -> bool:
    return re.fullmatch(r"(19|20)\d\d([-/.]\d\d?([-/.]\d\d?)?)?(t[\d:.]*)?|\d+\.\d\d", word) is not None


def _first_line(text: str) -> str:
    return text.split("\n")[0]


def _forms(request: str) -> list[str]:
    """What a request is known by: all of it, and its last line, which asks where the lines before it only offer (the
    signatures of functions, records)."""
    whole, last = _plain(request), _plain(request.strip().split("\n")[-1])
    return [form for form in (whole, last if len(last.split()) >= _LINE else "") if form]


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
