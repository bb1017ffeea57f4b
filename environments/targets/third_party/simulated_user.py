"""Simulated users: one who tells the scenario's facts, and the form of one who is played by a model.

Environments call no provider: who plays the user with a model is given to a target when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from environments.contract import ToolCall


class UserModel(Protocol):
    """A model that plays simulated users. Safe to use for several episodes at once."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """The text and the tool calls of one turn, given the conversation and the user's own tools in OpenAI's form.

        Raises `ProviderError` when the model fails or says nothing, `BudgetExceeded` when it may cost no more.
        """
        ...


YES = "Yes, please go ahead."
# A scripted user agrees at most this often to an agent that only asks; then it leaves.
PATIENCE = 8

_FIRST_PERSON = {
    "you are": "I am",
    "you're": "I'm",
    "you were": "I was",
    "you've": "I've",
    "you'd": "I'd",
    "you'll": "I'll",
    "yourself": "myself",
    "yours": "mine",
    "your": "my",
    "you": "I",
}
_PATTERN = re.compile(r"\b(" + "|".join(_FIRST_PERSON) + r")\b", re.IGNORECASE)


def in_first_person(text: str) -> str:
    """Scenario prose ("You are Emma Kim ...") as the user would say it. The facts stay as they are."""
    return _PATTERN.sub(lambda match: _FIRST_PERSON[match.group(0).lower()], text).strip()


class FactTeller:
    """What a scripted user says: the facts it still has, one a turn; then yes to questions, at most 8 times; then None,
    which means that it leaves."""

    def __init__(self, facts: Sequence[str]) -> None:
        self._facts, self._agreed = list(facts), 0

    def reply(self, heard: str) -> str | None:
        """The answer to `heard`."""
        if self._facts:
            return self._facts.pop(0)
        if "?" in heard and self._agreed < PATIENCE:
            self._agreed += 1
            return YES
        return None
