"""Expert iteration: one adapter learns from the policy's own successes on the diagnosis tasks, sampled and learnt from
in turn (STaR, Zelikman et al., 2022, arXiv 2203.14465; ReST-EM, Singh et al., 2023, arXiv 2312.06585).

The cheapest training: no reward but success, no advantage, no environment. Every iteration plays each diagnosis task
SAMPLES times with what the one before has learnt, and trains an adapter anew on all successes so far, with the trainer
of TRACE's recall. All that the budget leaves is played, the last time with as many samples as are left.
"""

from __future__ import annotations

from dataclasses import replace

from db import AdapterRow
from models.episodes import Episode
from tasks.measuring.lineup import load_member
from tasks.methods.seed.answers import Answer, one_adapter, success_of
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.synthesis.recalling import COLUMNS, learn, picked
from tasks.train import training_settings

NAME = "expert-iteration"
# Samples of a task in an iteration, and passes over what has succeeded: as many as the profile `night` has.
SAMPLES, PASSES = 8, 3


def expert_iteration(run: SeedRun, context: Context, account: Account) -> Answer:
    """The adapter that the last iteration has made; the bare base where nothing ever succeeded."""
    tasks, found, notes = context.tasks("diagnosis"), list(context.result(RolloutResult).trajectories), list[str]()
    settings, passes = training_settings(context.settings), PASSES
    ground = replace(context.ground("training"), temperature=settings.temperature)
    latest: AdapterRow | None = None
    # Counted from the beginning, so that a process that goes on makes the same iterations.
    left = account.episodes - len(found)
    while samples := min(SAMPLES, left // len(tasks)):
        left -= samples * len(tasks)
        number = len(notes) + 1
        policy = load_member(context, NAME, latest.id) if latest else None
        ids = context.engine.play(
            replace(ground, adapter_id=latest.id if latest else None, scope=f"{ground.where}|{NAME} {number}"),
            [Episode("", task, context.seed, k, policy) for task in tasks for k in range(samples)],
            f"iteration {number} on diagnosis",
        )
        if policy is not None:
            context.policy.unload_adapter(policy)
        found += ids
        notes.append(f"iteration {number}: {samples} samples of each task, {100 * success_of(context, ids):.0f} %")
        rows = picked(context.store, context.store.trajectory_frame(None, columns=COLUMNS, id=found))
        if not rows:
            break
        learnt = learn(context, f"{NAME}-{number}", rows, settings, passes)
        context.registry.end_run(learnt.run)
        latest = learnt.adapter
    if latest is None:
        return Answer(context, notes=(*notes, "nothing has succeeded, so the bare base answers"))
    answer = one_adapter(context, NAME, latest.id)
    return replace(answer, notes=tuple(notes))
