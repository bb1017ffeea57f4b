"""reasoning-gym: no wrong answer wins, in any family that can be played, and every process asks the same questions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest

from environments.contract import SPLITS, Action, Environment
from environments.targets.reasoning_gym import problems
from environments.targets.reasoning_gym.problems import (
    BELOW_FULL,
    FULL,
    WORD_FOR_WORD,
    Problem,
    known_families,
    package_score,
    problem,
)
from environments.targets.reasoning_gym.target import NEAR_MISS, ReasoningGymTarget
from environments.targets.reference_check import play

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is absent: it needs a C compiler"
)
# Questions of these take most of a second each.
SLOW = {"futoshiki", "zebra_puzzles"}
CONSTANTS = ("nan", "inf", "?", "I do not know", "None", "[]", "{}", "()", "no answer")
# How a wrong answer that the package's verifier takes for right is made of the right one, by family.
LAX: Mapping[str, Callable[[str], str]] = {
    "advanced_geometry": lambda right: f"{right}, or not",
    "coin_flip": lambda right: right[:2],
    "complex_arithmetic": lambda right: "nan",
    "figlet_font": lambda right: f"{right} or so",
    "fraction_simplification": lambda right: f"{right} or so",
    "game_of_life": lambda right: f"{right[:-1]},[5]]",
    "game_of_life_halting": lambda right: "I do not know",
    "knights_knaves": lambda right: f"Not {right} or so",
    "letter_jumble": lambda right: f"{right} or so",
    "number_sorting": lambda right: re.sub(r"\d(?='])", lambda last: str((int(last[0]) + 1) % 10), right),
    "polynomial_equations": lambda right: f"{right}, or not",
    "survo": lambda right: f"So {right} or so",
    "time_intervals": lambda right: f"{right}, or not",
    "word_sorting": lambda right: f"{right}, or not",
}


def junk(asked: Problem) -> Iterator[str]:
    """Answers that are wrong whatever the question is."""
    yield from CONSTANTS
    for behind in (" and so on, I think", " or so", ", or not", ", nan", "\nnot sure", f" or {asked.answer}?"):
        yield asked.answer + behind
    for before in ("I think ", "not ", "zzz\n"):
        yield before + asked.answer


def _say(said: Action, environment: Environment) -> Action:
    return said


def test_a_word_spelt_backward_has_to_end_there() -> None:
    """The package's sum of one over the word's length comes to 0.9999999 or 1.0000002 for six, seven, nine, ten."""
    target = ReasoningGymTarget()
    tasks = [task for split in SPLITS for task in target.tasks(split) if task.family == "spell_backward"]
    assert len(tasks) == 96
    for task in tasks:
        asked = problem(task.family, task.payload["number"])
        assert asked is not None
        for behind in (" and so on, I think", asked.answer, "."):
            said = Action(content=asked.answer + behind)
            score = play(target.environment(), task, partial(_say, said))
            assert not score.success
            assert score.reward < NEAR_MISS


@pytest.mark.parametrize("family", sorted(LAX))
def test_where_the_verifier_is_lax_the_answer_has_to_be_the_packages(family: str) -> None:
    assert set(LAX) == WORD_FOR_WORD
    harder = family == "figlet_font"  # its verifier gives a tenth a letter, so words of ten take anything behind them
    for number in range(60):
        asked = problem(family, number, harder)
        assert asked is not None
        wrong = LAX[family](asked.answer)
        taken = problems._dataset(family, harder).score_answer(wrong, dict(asked.entry)) == 1.0
        if taken and wrong != asked.answer:
            assert package_score(asked, wrong, harder) == 0.0
            assert package_score(asked, f" {asked.answer} ", harder) == FULL
            return
    pytest.fail("the package takes none of these wrong answers: the family needs no rule of its own")


def test_the_form_that_the_question_asks_for_is_right() -> None:
    asked = problem("knights_knaves", 3)
    assert asked is not None
    assert asked.answer == "Joseph is an angel, and Zoey is an angel."
    assert package_score(asked, "Joseph is a angel, and Zoey is a angel") == FULL


def test_junk_wins_nowhere() -> None:
    asked = [problem(family, number) for family in known_families() if family not in SLOW for number in range(3)]
    assert len(asked) > 200
    wins = [(one.family, text) for one in asked if one for text in junk(one) if package_score(one, text) > BELOW_FULL]
    assert wins == []


QUESTIONS = """
from environments.contract import content_hash
from environments.targets.reasoning_gym.problems import known_families, problem
for family in known_families():
    if family not in {slow}:
        found = [problem(family, number) for number in range(2)]
        print()
        print(family, content_hash([[one.question, one.answer] for one in found if one]))
"""


def test_every_process_asks_the_same() -> None:
    def asked(hash_seed: str) -> list[str]:
        code = QUESTIONS.replace("{slow}", repr(SLOW))
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return [line for line in run.stdout.splitlines() if re.fullmatch(r"\w+ [0-9a-f]+", line)]

    first = asked("1")
    assert len(first) > 60
    assert first == asked("2")
