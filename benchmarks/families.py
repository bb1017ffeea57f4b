"""What a base can already do of each family of reasoning-gym, before anything is trained: where it succeeds sometimes,
GRPO has something to learn from.

    python -m benchmarks.families --seed 2 [--families gcd,spell_backward] [--tasks 24] [--samples 8]

A row a family: success of one answer with its interval, how many questions had at least one right answer of `--samples`
(what sharpening alone could reach), how many groups have answers of both kinds, and what the most frequent right
answer would score by itself, which any method has to beat. Six worked examples of the family stand in the prompt.
Questions are of the training half, so nothing that is measured elsewhere is looked at, at the package's own level;
answers of up to `--max-tokens`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from environments.contract import TargetTask
from environments.targets.reasoning_gym.problems import known_families, problem
from environments.targets.reasoning_gym.target import NAME, ReasoningGymTarget
from errors import TargetError
from models.episodes import Episode
from settings import load_settings
from tasks.measuring.statistics import success_interval
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.rollouts import outcomes
from tasks.round.stage import forget, open_context

# Questions and answers that fit a small base and a laptop: characters of a question, of an answer.
LONGEST_QUESTION, LONGEST_ANSWER = 600, 60
# Seeds of training scenarios that no training of a comparison's seed comes to.
FIRST = 900_000_000


def short_enough(family: str) -> bool:
    """Whether a family's questions and answers are of a size that a laptop can train on."""
    found = [asked for asked in (problem(family, number) for number in range(100)) if asked is not None]
    if len(found) < 50:  # the package itself does not take its answers
        return False
    return (
        max(len(asked.question) for asked in found) <= LONGEST_QUESTION
        and max(len(asked.answer) for asked in found) <= LONGEST_ANSWER
    )


def row(context: Context, family: str, given: argparse.Namespace) -> str:
    """The table's row of a family."""
    target = ReasoningGymTarget([family])
    tasks = [target.generate(family, FIRST + 1000 * given.seed + place) for place in range(given.tasks)]
    ground = Playground(
        target.environment, target.name, "calibration", given.temperature, given.max_tokens, of_target=False
    )
    episodes = [Episode("", task, given.seed, trial) for task in tasks for trial in range(given.samples)]
    frame = outcomes(context.store, context.engine.play(ground, episodes, f"base on {family}"))
    solved = frame.groupby("task")["success"].mean()
    found = success_interval(frame)
    cells = (
        family,
        f"{100 * frame['success'].mean():.0f} % ({100 * found.low:.0f} to {100 * found.high:.0f})",
        f"{100 * (solved > 0).mean():.0f} %",
        f"{100 * ((solved > 0) & (solved < 1)).mean():.0f} %",
        f"{100 * constant(tasks):.0f} %",
    )
    return "| " + " | ".join(cells) + " |"


def constant(tasks: list[TargetTask]) -> float:
    """The share of the questions whose answer is the most frequent one."""
    asked = [problem(task.family, int(task.payload["number"])) for task in tasks]
    answers = Counter(one.answer for one in asked if one is not None)
    return answers.most_common(1)[0][1] / len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="commas between; all that are short enough without it")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    families = [f for f in given.families.split(",") if f] or [f for f in known_families() if short_enough(f)]
    with tempfile.TemporaryDirectory() as home:
        context = open_context(load_settings(target=NAME, home=Path(home), seed=given.seed))
        try:
            print("| family | base | any of the answers | groups of both kinds | a constant |\n|---|---|---|---|---|")
            for family in families:
                try:
                    print(row(context, family, given), flush=True)
                except TargetError as problem_:
                    print(f"| {family} | {problem_} |", flush=True)
        finally:
            forget(context.round.id)


if __name__ == "__main__":
    main()
