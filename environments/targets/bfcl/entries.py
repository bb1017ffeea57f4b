"""BFCL's multi-turn entries by category, and which split each is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from environments.contract import canonical_json, content_hash
from environments.targets.bfcl.package import INSTALL, VERSION, bfcl_folder, read_lines
from environments.targets.third_party.adapter import folder_hash, split_all, together
from errors import TargetError

CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
# Part of every data hash. 2: an entry is in the same split in every category. 3: episodes with long results share no
# credit card or booking.
ADAPTER_VERSION = 3
INSTRUCTIONS = (
    "You carry out the user's requests with the given functions. In every turn call functions until the request of "
    "that turn is fulfilled, then answer in one short sentence without a call. If no function fits, or a needed value "
    "is missing, say so instead of calling."
)


@dataclass(frozen=True, eq=False)
class Category:
    """The entries of one category with their reference turns, by id, and the hash of what decides a score."""

    name: str
    entries: Mapping[str, dict[str, Any]]
    gold: Mapping[str, list[list[str]]]
    data_hash: str
    splits: Mapping[str, str]


def load_category(name: str) -> Category:
    """A category's entries; imports nothing of BFCL. Raises TargetError when a file of any category is absent or
    damaged, because the splits are those of all four."""
    if name not in CATEGORIES:
        raise TargetError(f"BFCL category {name!r} does not exist; the categories are {', '.join(CATEGORIES)}")
    return load_categories()[name]


@lru_cache(maxsize=1)
def load_categories() -> Mapping[str, Category]:
    """All categories by name. Raises TargetError as `load_category` does."""
    data = bfcl_folder() / "data"
    code = folder_hash(bfcl_folder() / "eval_checker" / "multi_turn_eval", ["*.py"])
    docs = folder_hash(data / "multi_turn_func_doc", ["*.json"])
    read = {name: _read(name) for name in CATEGORIES}
    where = _splits([pair for entries, gold in read.values() for pair in _shared_by_entry(entries, gold)])
    found = {}
    for name, (entries, gold) in read.items():
        splits = {key: where[_number(key)] for key in entries}
        files = folder_hash(data, [_file(name)])
        parts = ["bfcl-eval", VERSION, ADAPTER_VERSION, name, files, docs, code, INSTRUCTIONS, splits]
        found[name] = Category(name, entries, gold, content_hash(parts), splits)
    return found


def _file(category: str) -> str:
    return f"BFCL_v4_multi_turn_{category}.json"


def _read(name: str) -> tuple[dict[str, dict[str, Any]], dict[str, list[list[str]]]]:
    """A category's entries and their reference turns, by id."""
    data, file = bfcl_folder() / "data", _file(name)
    try:
        entries = {item["id"]: item for item in read_lines(data / file)}
        gold = {item["id"]: item["ground_truth"] for item in read_lines(data / "possible_answer" / file)}
        for key, item in entries.items():
            if len(item["question"]) != len(gold[key]):
                raise TargetError(
                    f"{file}: entry {key!r} has {len(item['question'])} turns and {len(gold[key])} answers"
                )
    except (KeyError, TypeError) as error:
        raise TargetError(f"{data / file} is damaged: {error!r} is missing; {INSTALL}") from error
    return entries, gold


def _number(key: str) -> str:
    """An entry's number. Entries of one number are variants of one another: the base entry's conversation with long
    results, with a function that comes late, or with a value that does."""
    return key.rpartition("_")[2]


def _shared_by_entry(
    entries: Mapping[str, dict[str, Any]], gold: Mapping[str, list[list[str]]]
) -> list[tuple[str, list[str]]]:
    return [(_number(key), _shared(item["question"], gold[key])) for key, item in entries.items()]


def _shared(question: Sequence[Any], gold: Sequence[Sequence[str]]) -> list[str]:
    """What an entry has that no entry of another split may: all calls of its reference, in whichever turns they stand,
    and what is asked in each turn. A single call, or the calls of one turn, may be in several: more than half of all
    entries share those, directly or through others."""
    calls = [call for turn in gold for call in turn]
    return [f"reference {canonical_json(calls)}", *(f"turn {canonical_json(turn)}" for turn in question if turn)]


def _splits(contents: Sequence[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """The split of each number, the same in every category: groups of numbers are divided, by a hash of the first
    one's base entry, and never a group. `contents` has pairs of a number and what its entry in some category holds."""
    shared: dict[str, list[str]] = {}
    for number, texts in contents:
        shared.setdefault(number, []).extend(texts)
    first = together(shared)
    where = split_all(f"multi_turn_base_{number}" for number in shared if first[number] == number)
    return {number: where[f"multi_turn_base_{first[number]}"] for number in shared}
