"""The cheapest trainings: one adapter learns from what the policy itself has solved, with no reward but success, no
advantage and no capability; with the trainer that makes TRACE's generalist.

*Expert iteration* (STaR, Zelikman et al., 2022, arXiv 2203.14465; ReST-EM, Singh et al., 2023, arXiv 2312.06585): every
iteration plays each diagnosis task SAMPLES times with what the one before has learnt, and an adapter learns anew from
all successes so far. All that the budget leaves is played, the last time with as many samples as are left.

*Context distillation* (Snell et al., 2022, arXiv 2209.15189): new scenarios of every family from the target's own
generators are played with advice, one more worked example in the prompt, and what succeeded is learnt without it. It
has what TRACE's hints have, for every family alike, and no training beside.

*Demonstrations* (behaviour cloning): the reference solutions of such scenarios are learnt, and nothing is played at
all. It asks whether an agent has to try anything, where the environment's author has solved everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from db import AdapterRow
from environments.contract import Generators
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from errors import TrainingError
from models.episodes import Episode
from tasks.measuring.lineup import held, load_member
from tasks.methods.seed.answers import Answer, one_adapter, success_of
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.synthesis.learning.demonstrated import demonstrations
from tasks.synthesis.learning.recalling import COLUMNS, FAMILY, behind_known_prompts, learn, picked
from tasks.synthesis.learning.shown import SAMPLES as ADVISED
from tasks.synthesis.learning.shown import SCENARIOS, play_advised
from tasks.synthesis.learning.training import training_settings

EXPERT_ITERATION, CONTEXT_DISTILLATION, DEMONSTRATIONS = "expert-iteration", "context-distillation", "demonstrations"
# Samples of a diagnosis task in an iteration, and passes over what has succeeded: as many as the profile `night` has.
SAMPLES, PASSES = 8, 3
# Iterations of context distillation: the second shows what the first has learnt little of.
SHOWN = 2
NO_SOLUTIONS = "the target has no reference solutions of new scenarios, so the bare base answers"


def expert_iteration(run: SeedRun, context: Context, account: Account) -> Answer:
    """The adapter that the last iteration has made; the bare base where nothing ever succeeded."""
    tasks = context.tasks("diagnosis")
    ground = replace(context.ground("training"), temperature=context.settings.train.temperature)

    def play(number: int, samples: int, latest: AdapterRow | None) -> list[str]:
        policy = load_member(context, EXPERT_ITERATION, latest.id) if latest else None
        scope = f"{ground.where}|{EXPERT_ITERATION} {number}"
        # Numbered on from the diagnosis: each iteration has random numbers of its own.
        first = context.settings.rollout.trials + SAMPLES * (number - 1)
        episodes = [Episode("", task, context.seed, first + k, policy) for task in tasks for k in range(samples)]
        own = replace(ground, adapter_id=latest.id if latest else None, scope=scope)
        with held(context, policy):
            return context.engine.play(own, episodes, f"iteration {number} on diagnosis")

    # Counted from the beginning, so that a process that goes on makes the same iterations.
    left, counts = account.episodes - len(context.result(RolloutResult).trajectories), list[int]()
    while samples := min(SAMPLES, left // len(tasks)):
        counts.append(samples)
        left -= samples * len(tasks)
    return _iterated(context, EXPERT_ITERATION, counts, play)


def context_distillation(run: SeedRun, context: Context, account: Account) -> Answer:
    """The adapter that the last iteration has made, as many as the budget pays for; the bare base where there are none,
    or the target has no scenarios to show."""
    target = context.target
    if not isinstance(target, Generators):
        return Answer(context, notes=("the target has no generators to show scenarios of, so the bare base answers",))
    families = sorted(target.families())
    at = context.round
    spec = CompositionSpec(at.target, at.data_hash, CONTEXT_DISTILLATION, tuple(families), seed=at.seed)
    environment = ComposedEnvironment(target, spec)
    left = account.episodes - len(context.result(RolloutResult).trajectories)
    paid = min(SHOWN, left // (len(families) * SCENARIOS * ADVISED))

    def play(number: int, samples: int, latest: AdapterRow | None) -> list[str]:
        return play_advised(context, environment, families, "training", str(number), latest)

    return _iterated(context, CONTEXT_DISTILLATION, [ADVISED] * paid, play)


def cloning(run: SeedRun, context: Context, account: Account) -> Answer:
    """The adapter that has learnt reference solutions; the bare base where there are none."""
    try:
        cloned = cloned_adapter(context)
    except TrainingError as problem:
        return Answer(context, notes=(unlearnt_note(problem),))
    if cloned is None:
        return Answer(context, notes=(NO_SOLUTIONS,))
    return replace(one_adapter(context, DEMONSTRATIONS, cloned.id), notes=(cloned_note(cloned),))


def cloned_adapter(context: Context) -> AdapterRow | None:
    """An adapter that has learnt reference solutions, of every family `train.demonstrations` or else FAMILY, in as many
    passes as TRACE's generalist or else PASSES; None where the target has none of new scenarios. It is made once for
    all methods of a seed. Raises `TrainingError` where it cannot be made."""
    target, count = context.target, context.settings.train.demonstrations or FAMILY
    if not isinstance(target, Generators):
        return None
    families = sorted(target.families())
    at = context.round
    spec = CompositionSpec(at.target, at.data_hash, DEMONSTRATIONS, tuple(families), seed=at.seed)
    shown = demonstrations(ComposedEnvironment(target, spec), context.base, dict.fromkeys(families, count))
    if not shown:
        return None
    settings, passes = training_settings(context.settings), context.settings.train.generalist or PASSES
    learnt = learn(context, DEMONSTRATIONS, (), settings, passes, demonstrations=shown, of=families)
    context.registry.end_run(learnt.run)
    return learnt.adapter


def cloned_note(cloned: AdapterRow) -> str:
    """For a method's notes: what the adapter has learnt."""
    return f"learnt {cloned.config['demonstrations']} reference solutions"


def unlearnt_note(problem: TrainingError, whose: str = "the bare base") -> str:
    """For a method's notes: why a training has no adapter, and who answers for it. An outage is no figure of a method
    and is raised: the same command goes on where it was."""
    if problem.transient:
        raise problem
    return f"nothing was learnt, so {whose} answers: {problem}"


def _iterated(
    context: Context, name: str, samples: Sequence[int], play: Callable[[int, int, AdapterRow | None], list[str]]
) -> Answer:
    """Play and learn in turn, from the diagnosis' own successes on, with so many samples in each iteration. Where one
    cannot be learnt from, what the one before has made answers."""
    found, notes, latest = list(context.result(RolloutResult).trajectories), list[str](), None
    settings = training_settings(context.settings)
    for number, count in enumerate(samples, 1):
        ids = play(number, count, latest)
        found += ids
        notes.append(f"iteration {number}: {len(ids)} episodes, {100 * success_of(context, ids):.0f} %")
        frame = context.store.trajectory_frame(None, columns=COLUMNS, id=found)
        rows = behind_known_prompts(context, picked(context.store, frame))
        if not rows:  # the next has other random numbers
            continue
        try:
            learnt = learn(context, f"{name}-{number}", rows, settings, PASSES)
        except TrainingError as problem:
            if latest is None:
                return Answer(context, notes=(*notes, unlearnt_note(problem)))
            notes.append(unlearnt_note(problem, f"the adapter of iteration {number - 1}"))
            break
        context.registry.end_run(learnt.run)
        latest = learnt.adapter
    if latest is None:
        return Answer(context, notes=(*notes, "nothing has succeeded, so the bare base answers"))
    return replace(one_adapter(context, name, latest.id), notes=tuple(notes))
