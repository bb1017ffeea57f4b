"""Questions of the package reasoning-gym by family and number, and its own verdict on an answer.

Nothing of the package is imported before a question is asked for: the import takes seconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from environments.targets.third_party.adapter import TOOL_ERRORS, package_folder
from errors import TargetError

DISTRIBUTION, VERSION, LICENCE = "reasoning-gym", "0.1.25", "Apache-2.0"
INSTALL = f"run `make install-targets` (pip install {DISTRIBUTION}=={VERSION})"
# Their verifiers, or their questions, run text as Python code, an agent's answers among it.
RUN_CODE = frozenset(
    {
        "binary_matrix",
        "codeio",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
# Questions of a family are numbered from this seed of the package; another gives all splits other questions.
_SEED = 0
# How many numbers a family is told to have: the package uses none of it but `len`.
_SIZE = 2**62
# The level of the package's own curriculum that the shift test has, of levels from 0.
HARDER_LEVEL = 1
# What counts as the package's full score.
FULL = 1 - 1e-9


@dataclass(frozen=True)
class Problem:
    """A question with the package's answer, and what its verifier needs (`entry`)."""

    family: str
    question: str
    answer: str
    entry: Mapping[str, Any]


def check_package() -> None:
    """Raise TargetError when the package is absent or of another version; imports nothing of it."""
    package_folder("reasoning_gym", DISTRIBUTION, VERSION, INSTALL)


def known_families() -> Sequence[str]:
    """The families of the package whose verifiers run no code, sorted. Imports the package."""
    check_package()
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - RUN_CODE - {"composite"})


def check_families(families: Sequence[str]) -> None:
    """Raise TargetError for a family that the package does not have, that runs code, or that is named twice."""
    known = known_families()
    for family in families:
        if family in RUN_CODE:
            raise TargetError(f"family {family!r} of {DISTRIBUTION} runs answers as Python code; leave it out")
        if family not in known:
            close = difflib.get_close_matches(family, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TargetError(f"{DISTRIBUTION} {VERSION} has no family {family!r}{hint}. There are: {', '.join(known)}")
    twice = sorted({family for family in families if families.count(family) > 1})
    if twice:
        raise TargetError(f"family {twice[0]!r} is named twice; name each once")


@cache
def _dataset(family: str, harder: bool) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import create_curriculum

    if not harder:
        return reasoning_gym.create_dataset(family, seed=_SEED, size=_SIZE)
    curriculum = create_curriculum(family)
    curriculum.set_global_level(HARDER_LEVEL)
    return reasoning_gym.create_dataset(
        family, **vars(curriculum.generate_configuration({"seed": _SEED, "size": _SIZE}))
    )


def has_harder(family: str) -> bool:
    """Whether the package has a curriculum for a family."""
    from reasoning_gym.factory import CURRICULA

    return family in CURRICULA


@lru_cache(maxsize=20_000)
def problem(family: str, number: int, harder: bool = False) -> Problem | None:
    """The question of a number; None where the package's own answer does not convince its verifier. `harder`: of the
    curriculum's level `HARDER_LEVEL` (the family has one: `has_harder`)."""
    entry = _dataset(family, harder)[number]
    found = Problem(family, str(entry["question"]).strip(), str(entry["answer"]), entry)
    return found if package_score(found, found.answer, harder) >= FULL else None


def package_score(asked: Problem, answer: str, harder: bool = False) -> float:
    """The package's score of an answer, in [0, 1]; 0 where its verifier raises."""
    try:
        score = float(_dataset(asked.family, harder).score_answer(answer, dict(asked.entry)))
    except TOOL_ERRORS:
        return 0.0
    return min(1.0, max(0.0, score))
