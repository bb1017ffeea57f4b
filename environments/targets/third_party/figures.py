"""The figures that a text states: a verifier that looks for digits in an answer takes a list of guesses for one."""

from __future__ import annotations

import re

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {word: n for n, word in enumerate(_SMALL)} | {word: 20 + 10 * n for n, word in enumerate(_TENS)}
_SCALES = {"hundred": 100, "thousand": 1000}
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY, _YEAR = r"\d{1,2}(?:st|nd|rd|th)?", r"(?:,? 20\d\d\b)?"
# What is no figure: a date, and the number of a line in a list. None of it can hold a figure of three digits.
_OTHERWISE = re.compile(
    rf"\b20\d\d-\d\d-\d\d\b|\b{_MONTH} {_DAY}\b{_YEAR}|(?<![\w.,]){_DAY} (?:of )?{_MONTH}{_YEAR}|\b{_MONTH} 20\d\d\b"
    r"|^\s*\d{1,2}[.)]\s",
    re.IGNORECASE | re.MULTILINE,
)
# One that stands by itself: digits inside a word, as in an account's number, are none.
_DIGITS = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w)")
_NUMBER = "|".join([*_WORDS, *_SCALES])
_SPELT = re.compile(rf"\b(?:{_NUMBER})(?:[\s-]+(?:and\s+)?(?:{_NUMBER}))*\b", re.IGNORECASE)


def figures(text: str) -> frozenset[float]:
    """The figures that a text states, in digits or, from a hundred on, in words. Dates are left out, and the numbers of
    lines in a list."""
    text = _OTHERWISE.sub(" ", text)
    spelt = {value for run in _SPELT.findall(text) if (value := _value(run)) >= min(_SCALES.values())}
    return frozenset({float(digits.replace(",", "")) for digits in _DIGITS.findall(text)} | spelt)


def _value(run: str) -> float:
    """What a number in words comes to."""
    total = part = 0
    for word in re.findall(r"[a-z]+", run.lower()):
        if word == "thousand":
            total, part = total + max(part, 1) * _SCALES[word], 0
        elif word in _SCALES:
            part = max(part, 1) * _SCALES[word]
        else:
            part += _WORDS.get(word, 0)
    return float(total + part)
