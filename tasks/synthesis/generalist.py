"""The generalist: one more adapter, which learns last from everything that succeeded in the round.

The trainings of a round are its dearest part, and each of its adapters has learnt from its own alone; its calibrations
taught nothing. With `train.generalist` passes one adapter learns from the successes of all of them (`recalling.py`): at
diagnosis, in calibration, in the trainings of every capability, and where its adapters tried the diagnosis tasks, which
the router needs anyway. Nothing is played for its training but what shows it the families that hardly ever succeeded
(`show_missing`): some scenarios of each with advice, as calibration does. What hardly succeeds even so is demonstrated,
with `train.demonstrations`: the reference solutions of new scenarios are learnt beside (`demonstrated.py`).

It goes through the same stages as the others, under this name: its environment, of all that the round trained for and
whatever else is not mastered, is validated, and says what it is measured on; it is registered, judged alone against
what is live, and offered to the router. What is unlike all that a round has seen is what an adapter for one capability
knows nothing of; the generalist has met every kind of task.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from db import GENERALIST, AdapterRow, CapabilityRow, SelectionRow, row_id
from environments.contract import Generators, TargetTask
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import Advised, advised
from models.episodes import Episode
from models.training.records import TrainingSettings
from tasks.measuring.lineup import champion_of, load_member, try_on_diagnosis
from tasks.round.adapters import adapter_id, registered
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import CalibrateResult
from tasks.round.rollouts import round_seed
from tasks.round.target_prompt import first_opening
from tasks.synthesis.calibration import FIGURES, HINT
from tasks.synthesis.demonstrated import demonstrations
from tasks.synthesis.environments import MASTERED, composed_of, stored_environment
from tasks.synthesis.recalling import Learnt, learn, successes

logger = logging.getLogger("trace")

DEFINITION = "All that the round trained for and whatever else is not mastered, learnt last from what has succeeded."
REASON = "The round makes it last, of every success that it has seen."
# A family with fewer successes to learn from is shown with advice: so many scenarios of it, so many times each.
FEW, SCENARIOS, SAMPLES = 16, 8, 4


def specialists(capabilities: Sequence[str]) -> list[str]:
    """The capabilities, in order, without the generalist."""
    return [c for c in capabilities if c != GENERALIST]


def wanted(context: Context, selected: Sequence[str]) -> bool:
    """Whether a round that selected these capabilities may make a generalist: two of them, or one beside a generalist
    that is live and would else fall behind, or where it has demonstrations to learn from. Where environments are not
    composed it is said that there is none."""
    if not context.settings.train.generalist or len(selected) < max(1, _fewest(context)):
        return False
    if context.settings.synthesizer.kind == "llm" or not isinstance(context.target, Generators):
        logger.warning("no generalist is made: environments that a model writes are not brought together in one")
        return False
    return True


def store_generalist(context: Context, rank: int) -> None:
    """Keep the generalist where capabilities are kept: selected, without figures of the rule."""
    identity = row_id(context.round.id, GENERALIST)
    context.store.put(
        [
            CapabilityRow(
                id=identity,
                round_id=context.round.id,
                name=GENERALIST,
                definition=DEFINITION,
                analyst=context.settings.analyst.kind,
            )
        ]
    )
    context.store.put(
        [
            SelectionRow(
                round_id=context.round.id,
                capability_id=identity,
                selected=True,
                rank=rank,
                runs=context.settings.selection.runs,
                reason=REASON,
            )
        ]
    )


def compose_generalist(
    context: Context, success: Mapping[str, float], version: int = 1
) -> tuple[ComposedEnvironment | None, str]:
    """The environment of all families that the round's adapters were trained for and all others that what is live does
    not master, whatever selection made of them, or why there is none; `success` is that of what is live, by family."""
    parts = specialists(registered(context.stored))
    if len(parts) < _fewest(context):
        return None, f"{len(parts)} of the selected capabilities have an adapter: there is nothing to bring together"
    made = [stored_environment(context.store, context.round, context.target, c, context.keep) for c in parts]
    assert isinstance(context.target, Generators)
    families = {family for environment in made for family in environment.spec.families}
    families |= {family for family in context.target.families() if success.get(family, 0.0) < MASTERED}
    share = context.settings.calibration.retention_share
    return composed_of(context.target, context.round, GENERALIST, sorted(families), success, share, version), ""


def calibrated_by_parts(context: Context) -> CalibrateResult:
    """The means of its parts' figures: each of them was measured, and none of it is measured again."""
    parts = [context.result(CalibrateResult, c) for c in specialists(registered(context.stored))]
    figures = {name: sum(getattr(part, name) for part in parts) / max(1, len(parts)) for name in FIGURES}
    if not parts:
        return CalibrateResult(
            accepted=True, reason="accepted: no other adapter was made, it has demonstrations", **figures
        )
    reason = f"accepted: its {len(parts)} parts were calibrated, and these are the means of their figures"
    return CalibrateResult(accepted=True, reason=reason, **figures)


def learn_generalist(context: Context, environment_id: str, settings: TrainingSettings) -> Learnt | None:
    """The round's generalist; None where nothing has succeeded."""
    try_on_diagnosis(context, specialists(registered(context.stored)))
    environment = stored_environment(context.store, context.round, context.target, GENERALIST, context.keep)
    assert isinstance(environment, ComposedEnvironment)
    show_missing(context, environment)
    found, train = successes(context), context.settings.train
    there = Counter(row.family for row in found)
    lacking = [f for f in environment.spec.families if there[f] < FEW] if train.demonstrations else []
    prompt = first_opening(context.target)[0]
    shown = demonstrations(environment, context.base.renderer, prompt, lacking, train.demonstrations)
    if not found and not shown:
        return None
    return learn(context, GENERALIST, found, settings, train.generalist, environment_id, shown, lacking)


def show_missing(context: Context, environment: ComposedEnvironment) -> None:
    """Have the base play scenarios with advice of those of the environment's families that have fewer than FEW
    successes to learn from, as many as the budget pays for where there is one, those with the fewest first."""
    spec = environment.spec
    # Without what an earlier attempt of this stage has shown: it would show less.
    there = Counter(row.family for row in successes(context, without=spec.id))
    missing = sorted((f for f in spec.families if there[f] < FEW), key=lambda f: (there[f], f))
    if context.budget is not None:
        done = context.store.trajectory_frame(context.round.id, columns=["id"], environment=spec.id, group_id=HINT)
        paid = context.budget.for_training(adapter_id(context.round.id, GENERALIST)) + len(done)
        missing = missing[: paid // (SCENARIOS * SAMPLES)]
    if context.settings.train.hints:
        play_advised(context, environment, missing, "calibration", context.round.number)


def play_advised(
    context: Context, environment: ComposedEnvironment, families: Sequence[str], purpose: str, draw: int,
    start: AdapterRow | None = None,
) -> list[str]:  # fmt: skip
    """Trajectory ids of SCENARIOS scenarios of each family, with advice, SAMPLES times each, played by the base or what
    begins from `start`. No training draws these scenarios, and no other `draw` has them."""
    settings, spec = context.settings, environment.spec
    at, tokens = settings.train.temperature, settings.rollout.max_tokens
    make, scope = (lambda: Advised(environment.environment())), f"{spec.id}|{at}|{tokens}|{HINT}"
    adapter, name = start.id if start else None, load_member(context, spec.capability, start.id) if start else None
    ground = Playground(make, spec.id, purpose, at, tokens, adapter, HINT, scope)
    told = [
        advised(task, advice)
        for family in families
        for task in (_scenario(environment, family, draw, place) for place in range(SCENARIOS))
        if (advice := environment.advice(task))
    ]
    seed = round_seed(settings.seed, context.round.number)
    episodes = [Episode("", task, seed, k, name) for task in told for k in range(SAMPLES)]
    ids = context.engine.play(ground, episodes, f"shown with advice: {', '.join(families)}")
    if name is not None:
        context.policy.unload_adapter(name)
    return ids


def _scenario(environment: ComposedEnvironment, family: str, draw: int, place: int) -> TargetTask:
    rng = random.Random(f"{environment.spec.id}:shown:{draw}:{family}:{place}")
    return environment.generators.generate(family, rng.randrange(10**9))


def _fewest(context: Context) -> int:
    """Adapters of capabilities without which there is nothing to bring together."""
    if context.settings.train.demonstrations:
        return 0
    return 1 if champion_of(context, GENERALIST) else 2
