"""Questions of the package reasoning-gym by family and number, and its own verdict on an answer.

Nothing of the package is imported before a question is asked for: the import takes seconds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import DefaultContext, localcontext
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
# Families that are refused, and why: what each does.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(RUN_CODE, "runs answers as Python code"),
    # The order of Python's sets and the hashes of its texts go into their questions.
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "ransom_note"),
        "asks something else for the same number in every process, so splits leak and no round resumes",
    ),
    **dict.fromkeys(("acre", "gsm_symbolic", "list_functions"), "makes all of its questions before it asks the first"),
    "word_ladder": "has at most 20,000 questions, fewer than there are numbers",
    "pool_matrix": "takes no number from 2**32 on, and rounds and training draw theirs from there",
    **dict.fromkeys(
        ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
        "has no question whose own answer its verifier takes",
    ),
    # `WORD_FOR_WORD` is for those of one right answer.
    **dict.fromkeys(
        ("jugs", "kakurasu", "quantum_lock", "sokoban", "tower_of_hanoi"),
        "has several right answers to a question and takes any text beside one",
    ),
    "composite": "asks the questions of other families, which can be named themselves",
}
# Their verifiers take more than the one right answer: any text behind or around it (`knights_knaves`, `letter_jumble`,
# `survo`, `time_intervals` ...), its first digits (`coin_flip`), numbers that are off by one (`number_sorting`), "nan"
# (`complex_arithmetic`), anything at all (`game_of_life_halting`). `tests/environments/targets/test_junk_answers.py`
# looks for more.
WORD_FOR_WORD = frozenset(
    {
        "advanced_geometry",
        "coin_flip",
        "complex_arithmetic",
        "figlet_font",
        "fraction_simplification",
        "game_of_life",
        "game_of_life_halting",
        "knights_knaves",
        "letter_jumble",
        "number_sorting",
        "polynomial_equations",
        "survo",
        "time_intervals",
        "word_sorting",
    }
)
# The package refuses the settings of its own curriculum.
NO_HARDER = frozenset({"modulo_grid"})
# Questions of a family are numbered from this seed of the package; another gives all splits other questions.
_SEED = 0
# How many numbers a family is told to have: the package uses none of it but `len`.
_SIZE = 2**62
# The level of the package's own curriculum that the shift test has, of levels from 0.
HARDER_LEVEL = 1
# The package's score of a right answer, and the most that is left of it for any other.
FULL, BELOW_FULL = 1.0, 0.999
# Numbers of which one at least has a question, in a family that can be played.
PROBED = 32
# What the package raises where it cannot make a question.
_FAILURES = (*TOOL_ERRORS, MemoryError)


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
    """The families of the package that are not refused, sorted. Imports the package."""
    check_package()
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - set(REFUSED))


def check_families(families: Sequence[str]) -> None:
    """Raise TargetError for a family that the package does not have, that is refused, that has no question that can be
    asked, or that is named twice."""
    known = known_families()
    for family in families:
        _refuse(family)
        if family not in known:
            close = difflib.get_close_matches(family, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TargetError(f"{DISTRIBUTION} {VERSION} has no family {family!r}{hint}. There are: {', '.join(known)}")
    twice = sorted({family for family in families if families.count(family) > 1})
    if twice:
        raise TargetError(f"family {twice[0]!r} is named twice; name each once")
    for family in families:
        _entry(family, 0, False)
        if all(problem(family, number) is None for number in range(PROBED)):
            raise TargetError(
                f"{DISTRIBUTION} takes none of its own answers to the first {PROBED} questions of family {family!r}; "
                "leave it out"
            )


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
    """Whether the package has a curriculum for a family that it can ask questions of."""
    from reasoning_gym.factory import CURRICULA

    return family in CURRICULA and family not in NO_HARDER


def _refuse(family: str) -> None:
    if family in REFUSED:
        raise TargetError(f"family {family!r} of {DISTRIBUTION} {REFUSED[family]}; leave it out")


def _entry(family: str, number: int, harder: bool) -> Mapping[str, Any]:
    """The package's question of a number. Raises TargetError where the package fails to make it."""
    try:
        with localcontext(DefaultContext):  # `decimal_arithmetic` sets the precision of all decimals of a thread
            entry: Mapping[str, Any] = _dataset(family, harder)[number]
    except _FAILURES as error:
        raise TargetError(
            f"{DISTRIBUTION} cannot make question {number} of family {family!r} ({error!r}); leave the family out"
        ) from error
    return entry


@lru_cache(maxsize=20_000)
def problem(family: str, number: int, harder: bool = False) -> Problem | None:
    """The question of a number; None where the package fails to make it, and where the answer is empty or does not
    convince the package's verifier. `harder`: of the curriculum's level `HARDER_LEVEL` (the family has one:
    `has_harder`). Raises TargetError for a refused family, whoever made a task of it: answers are not to be run."""
    _refuse(family)
    try:
        entry = _entry(family, number, harder)
    except TargetError:
        return None
    # An agent's answer is stripped as well, so that what is asked can be answered.
    found = Problem(family, str(entry["question"]).strip(), str(entry["answer"]).strip(), entry)
    return found if found.answer and package_score(found, found.answer, harder) == FULL else None


def package_score(asked: Problem, answer: str, harder: bool = False) -> float:
    """How right an answer is: `FULL` where it is right, else from 0 to `BELOW_FULL`; 0 where the package's verifier
    raises.

    Right is what the package gives exactly 1 and, in a family of `WORD_FOR_WORD`, what is also the package's answer as
    `_bare` reads it. A score that only rounds to 1 is not right: `spell_backward` sums one over the word's length for
    each letter in its place, whatever follows.
    """
    try:
        with localcontext(DefaultContext):
            score = float(_dataset(asked.family, harder).score_answer(answer, dict(asked.entry)))
    except TOOL_ERRORS:
        return 0.0
    if asked.family in WORD_FOR_WORD:
        # What such a verifier says of any other answer is worth nothing.
        return FULL if score == FULL and _bare(answer) == _bare(asked.answer) else 0.0
    return FULL if score == FULL else min(BELOW_FULL, max(0.0, score))


def _bare(text: str) -> str:
    """An answer without what does not tell two apart: case, spaces, quotation marks, the period at its end, and which
    article stands (`knights_knaves` asks for "a angel" and answers "an angel")."""
    return re.sub(r"[\s'\"]", "", re.sub(r"\ban\b", "a", text.casefold())).rstrip(".")
