"""Which seeds may be compared: those on which no setting was chosen and no version was judged."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from errors import ConfigurationError
from settings import LARGEST


def used_seeds(path: Path) -> dict[int, str]:
    """What each used seed was used for. Raises `ConfigurationError` for a file that is not there or says less.

    The file has tables `[[used]]` with `seeds` (a list of whole numbers) and `for` (what they were used for), or says
    `used = []`."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigurationError(
            f"{path} with the seeds that settings were chosen on cannot be read ({problem}); name it with --used-seeds"
        ) from None
    found: dict[int, str] = {}
    if "used" not in given:
        named = ", ".join(given) or "nothing"
        raise ConfigurationError(f"{path} has no tables [[used]] but {named}; write them, or used = [] for no seed")
    tables = given["used"]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{path}: used = {tables!r:.80} is not a list of tables; write them as [[used]]")
    for table in tables:
        seeds, purpose = table.get("seeds"), table.get("for")
        whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
        if not whole or not isinstance(purpose, str):
            raise ConfigurationError(f'{path}: {table} needs seeds = [whole numbers] and for = "what they were for"')
        found |= dict.fromkeys(seeds, purpose)
    return found


def check_seed(seed: int, used: Mapping[int, str], path: Path) -> None:
    """Raise `ConfigurationError` for a seed that was used, or is none."""
    if not 0 <= seed <= LARGEST:
        raise ConfigurationError(f"seed {seed} is not from 0 to {LARGEST}; take another")
    if seed in used:
        raise ConfigurationError(
            f"seed {seed} was used for {used[seed]} ({path.name}): a comparison on it would flatter what was chosen "
            "there; take another"
        )


def fresh_seeds(count: int, used: Mapping[int, str]) -> list[int]:
    """The first `count` seeds that were not used."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        if seed not in used:
            found.append(seed)
        seed += 1
    return found
