"""BFCL's single-turn items, and which split each is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from environments.contract import SPLITS, canonical_json, content_hash
from environments.targets.bfcl.package import INSTALL, bfcl_folder, read_lines
from environments.targets.third_party.adapter import folder_hash, split_all, together
from errors import TargetError

FAMILIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
# What users of BFCL's public service asked: the same kinds of item, written by other people. `live_relevance` has no
# possible answers.
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance")
# These have no file of possible answers: declining is right.
UNANSWERED = ("irrelevance", "live_irrelevance")


@dataclass(frozen=True)
class Item:
    """A question with the functions on offer. `messages` are pairs of role (user or assistant) and text, from a user to
    a user; `reference` has BFCL's possible answers, one {function: {argument: accepted values}} a call, none where
    declining is right."""

    id: str
    category: str
    messages: tuple[tuple[str, str], ...]
    functions: tuple[Mapping[str, Any], ...]
    reference: tuple[Mapping[str, Any], ...] = ()

    def payload(self) -> dict[str, Any]:
        """All but the id, as JSON."""
        return {
            "category": self.category,
            "messages": [list(pair) for pair in self.messages],
            "functions": list(self.functions),
            "reference": list(self.reference),
        }

    @property
    def question(self) -> str:
        """All that was said, whatever its case and spaces: what two items are compared by."""
        return plain(" ".join(text for _, text in self.messages))

    @property
    def calls(self) -> tuple[str, ...]:
        """The reference's calls, each as one text."""
        return tuple(canonical_json(call) for call in self.reference)

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions on offer."""
        return frozenset(function["name"] for function in self.functions)


def plain(text: str) -> str:
    """A text without what does not tell two questions apart: case and spaces."""
    return " ".join(text.casefold().split())


def item_of(key: str, payload: Mapping[str, Any]) -> Item:
    """The item that `payload` describes. Raises TargetError when something is missing."""
    try:
        messages = tuple((str(role), str(text)) for role, text in payload["messages"])
        functions, reference = tuple(payload["functions"]), tuple(payload["reference"])
        return Item(key, str(payload["category"]), messages, functions, reference)
    except (KeyError, TypeError, ValueError) as error:
        raise TargetError(f"BFCL task {key!r} has no {error} in its payload; take it from the target again") from error


def _merged(said: Iterable[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    """Messages as user and assistant in turns: what stands in a system message is the user's, and neighbours of one
    role are one message, because a target's instructions stand first and not every chat template takes two."""
    merged: list[tuple[str, str]] = []
    for message in said:
        role = "assistant" if message["role"] == "assistant" else "user"
        if merged and merged[-1][0] == role:
            merged[-1] = role, f"{merged[-1][1]}\n{message['content']}"
        else:
            merged.append((role, message["content"]))
    return tuple(merged)


@lru_cache(maxsize=16)
def load_items(category: str) -> tuple[Item, ...]:
    """The items of a category; imports nothing of BFCL.

    Raises TargetError on an unknown category, and when the package or a part of it is absent or damaged.
    """
    if category not in FAMILIES + LIVE:
        known = ", ".join(FAMILIES + LIVE)
        raise TargetError(f"BFCL category {category!r} does not exist; the single-turn categories are {known}")
    data, file = bfcl_folder() / "data", f"BFCL_v4_{category}.json"
    entries = read_lines(data / file)
    answered = category not in UNANSWERED
    answers = read_lines(data / "possible_answer" / file) if answered else []
    try:
        reference = {answer["id"]: answer["ground_truth"] for answer in answers}
        items = tuple(
            Item(
                entry["id"],
                category,
                _merged(entry["question"][0]),
                tuple(entry["function"]),
                tuple(reference[entry["id"]] if answered else ()),
            )
            for entry in entries
        )
        for item in items:
            wanted = {name for call in item.reference for name in call}
            if not item.question or not wanted <= item.names or bool(wanted) != answered:
                raise TargetError(f"{data / file} is damaged: item {item.id!r} is incomplete; {INSTALL}")
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise TargetError(f"{data / file} is damaged: {error!r}; {INSTALL}") from error
    return items


def files_hash(categories: Sequence[str]) -> str:
    """Hash of the categories' files and of the checker's code."""
    folder = bfcl_folder()
    data = folder_hash(folder / "data", [f"BFCL_v4_{category}.json" for category in categories])
    return content_hash([data, folder_hash(folder / "eval_checker" / "ast_eval", ["*.py"])])


def _shared(item: Item) -> list[str]:
    """What an item has that no item of another split may: its question, the names of its functions, each call of its
    reference."""
    return [f"question {item.question}", f"names {sorted(item.names)}", *(f"call {call}" for call in item.calls)]


@lru_cache(maxsize=1)
def splits() -> Mapping[str, tuple[Item, ...]]:
    """The items of all families by split.

    Within each family 40 % of the groups that begin there go to diagnosis, 20 % to validation, 40 % to test, by a hash
    of the first item's id. A group is never divided, so no question, no call of a reference and no set of offered
    functions is in two splits. (BFCL repeats itself: 100 of the 200 items of `multiple` ask a question of
    `simple_python`.)
    """
    items = [item for family in FAMILIES for item in load_items(family)]
    first = together({item.id: _shared(item) for item in items})
    where: dict[str, str] = {}
    for family in FAMILIES:
        where |= split_all(item.id for item in items if item.category == family and first[item.id] == item.id)
    return {split: tuple(item for item in items if where[first[item.id]] == split) for split in SPLITS}


@lru_cache(maxsize=1)
def live_items() -> tuple[Item, ...]:
    """The live items but those that ask a question of another family's item."""
    asked = {item.question for family in FAMILIES for item in load_items(family)}
    return tuple(item for category in LIVE for item in load_items(category) if item.question not in asked)
