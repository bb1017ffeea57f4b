"""What a generalist is shown: new scenarios that are played with advice, one more worked example in the prompt, and of
which it learns what succeeded as if there had been none (context distillation; Snell et al., 2022, arXiv 2209.15189).

One that is made last is shown the families that hardly ever succeeded in its round. One that is made first may be shown
all that is lacking, in turns (`train.shown`): what it has learnt in one turn plays the next, and so comes to know what
the bare base does not manage with advice either.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from db import GENERALIST, AdapterRow
from environments.contract import TargetTask
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import Advised, advised
from models.episodes import Episode
from settings_parts import TrainSettings
from tasks.measuring.lineup import held, load_member
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.rollouts import round_seed
from tasks.synthesis.calibration import HINT
from tasks.synthesis.learning.recalling import successes

# A family with fewer successes to learn from is shown with advice: so many scenarios of it, so many times each.
FEW, SCENARIOS, SAMPLES = 16, 8, 4
# Turns in which one that is made first learns; in each it is shown as many scenarios, and others, once each.
TURNS = 2
# What a generalist is shown is stored and paid for as calibration is.
PURPOSE = "calibration"


def first_shown(train: TrainSettings) -> int:
    """The first turn in which one that is made first is shown anything: where it has reference solutions to begin from,
    the bare base is shown nothing."""
    return 2 if train.demonstrations else 1


def show_missing(context: Context, environment: ComposedEnvironment) -> None:
    """Have the base play scenarios with advice of those of the environment's families that have fewer than FEW
    successes to learn from, as many as the budget pays for where there is one, those with the fewest first."""
    # Without what an earlier attempt of this stage has shown: it would show less.
    there = Counter(row.family for row in successes(context, without=environment.spec.id))
    missing = sorted((f for f in environment.spec.families if there[f] < FEW), key=lambda f: (there[f], f))
    if context.settings.train.hints:
        paid = _paid(context, environment, missing, SCENARIOS * SAMPLES)
        play_advised(context, environment, paid, PURPOSE, str(context.round.number))


def show_lacking(context: Context, environment: ComposedEnvironment, turn: int, latest: AdapterRow | None) -> None:
    """Have the base, or what the turn before has made, play `train.shown` new scenarios with advice of each of the
    environment's families, as many families as the budget pays for where there is one. A `turn` has the same scenarios
    whenever it is asked for."""
    count, draw = context.settings.train.shown, f"{context.round.number}.{turn}"
    each = count * (1 + TURNS - first_shown(context.settings.train))
    families = _paid(context, environment, environment.spec.families, each)
    play_advised(context, environment, families, PURPOSE, draw, latest, count, 1)


def _paid(context: Context, environment: ComposedEnvironment, families: Sequence[str], each: int) -> list[str]:
    """The first of the `families` that can be shown `each` episodes; all, where nothing pays."""
    if context.budget is None:
        return list(families)
    # What an earlier attempt of this stage was charged for, played or not, is asked for again.
    done = len(shown_so_far(context, environment.spec.id)) + context.budget.unplayed(PURPOSE)
    paid = context.budget.for_training(adapter_id(context.round.id, GENERALIST)) + done
    return list(families)[: paid // each]


def shown_so_far(context: Context, environment: str) -> list[str]:
    """Trajectory ids of what the round has played with advice in an environment, by the id of its specification."""
    frame = context.store.trajectory_frame(context.round.id, columns=["id"], environment=environment, group_id=HINT)
    return list(frame["id"])


def play_advised(
    context: Context, environment: ComposedEnvironment, families: Sequence[str], purpose: str, draw: str,
    start: AdapterRow | None = None, scenarios: int = SCENARIOS, samples: int = SAMPLES,
) -> list[str]:  # fmt: skip
    """Trajectory ids of so many scenarios of each family, with advice, so many times each, played by the base or what
    begins from `start`. No training draws these scenarios, and no other `draw` has them."""
    settings, spec = context.settings, environment.spec
    at, tokens = settings.train.temperature, settings.rollout.max_tokens
    make, scope = (lambda: Advised(environment.environment())), f"{spec.id}|{at}|{tokens}|{HINT}"
    adapter, name = start.id if start else None, load_member(context, spec.capability, start.id) if start else None
    ground = Playground(make, spec.id, purpose, at, tokens, adapter, HINT, scope)
    told = [
        advised(task, advice)
        for family in families
        for task in (_scenario(environment, family, draw, place) for place in range(scenarios))
        if (advice := environment.advice(task))
    ]
    seed = round_seed(settings.seed, context.round.number)
    episodes = [Episode("", task, seed, k, name) for task in told for k in range(samples)]
    with held(context, name):
        return context.engine.play(ground, episodes, f"shown with advice: {', '.join(families)}")


def _scenario(environment: ComposedEnvironment, family: str, draw: str, place: int) -> TargetTask:
    rng = random.Random(f"{environment.spec.id}:shown:{draw}:{family}:{place}")
    return environment.drawn(family, rng)
