"""What choosing among the checkpoints of a training costs, and what it gains.

    python -m benchmarks.choosing --seed 11            # a round up to training, about ten minutes on two cores
    python -m benchmarks.choosing --seed 11 --most 1   # its first capability alone

Each capability that is selected is trained. Printed are seconds of training and of choosing, the figures that the
choice saw, and success of start, chosen and last checkpoint on the same 32 further seeds of the environment, on which
nothing was chosen.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from flows.cli.main import QUIET
from settings import load_settings

SEEDS = 32
# Of the seeds that a home's rounds have, those of one that no home reaches.
ROUND = 10_000


def main(seed: int, most: int, profile: str) -> None:
    from db import TrainingStepRow
    from models.adapters.files import adapter_digest
    from models.adapters.loading import load_folder
    from models.training.checkpoints import weights_by_step
    from tasks.calibrate import calibrate
    from tasks.contrast import contrast
    from tasks.measuring.statistics import success_interval
    from tasks.rollout import rollout
    from tasks.round.engine import Playground
    from tasks.round.stage import forget, open_context
    from tasks.select import select
    from tasks.synthesis.choosing import fresh_scenarios, play_checkpoint
    from tasks.synthesis.environments import stored_environment
    from tasks.synthesize import synthesize
    from tasks.train import train

    context = open_context(load_settings(profile=profile, seed=seed, home=Path(os.environ["TRACE_HOME"])))
    rollout.do(context)
    contrast.do(context)
    for capability in select.do(context).selected[:most]:
        made = synthesize.do(context, capability)
        measured = calibrate.do(context, capability) if made.goes_on else None
        if measured is None or not measured.goes_on:
            print(f"{capability}: not trained, {measured.reason if measured else '; '.join(made.reasons)}")
            continue
        result = train.do(context, capability)
        row = context.store.stage(context.round.id, f"train:{capability}").row()
        training = (row.seconds or 0.0) - result.choosing_seconds
        share = 100 * result.choosing_seconds / training
        steps = context.store.rows(TrainingStepRow, adapter_id=result.adapter)
        rollouts = sum(r.metrics["rollout_seconds"] for r in steps)
        episodes = sum(r.metrics["own_episodes"] + r.metrics["retention_episodes"] for r in steps)
        print(
            f"{capability}: {result.steps} steps ({result.ending}) in {training:.1f} s, {rollouts:.1f} s of it "
            f"{episodes:.0f} episodes; step {result.chosen} chosen in {result.choosing_seconds:.1f} s ({share:.0f} %)"
        )
        for c in result.choice:
            kept = "none" if c.retention is None else f"{100 * c.retention:.0f} %"
            print(f"  step {c.step}: own {100 * c.success:.0f} %, reward {c.reward:.2f}, retention {kept}")
        environment = stored_environment(context.store, context.round, context.target, capability, context.keep)
        s = context.settings.rollout
        ground = Playground(
            environment.environment, environment.spec.id, "evaluation", s.temperature, s.max_tokens, result.adapter
        )
        own, retention = fresh_scenarios(environment, SEEDS, ROUND)
        weights = weights_by_step(context.folder / "training" / capability, result.steps)
        for step in sorted({0, result.chosen, result.steps}):
            name, said = None, []
            if step:
                folder = weights[step]
                name = load_folder(context.policy, folder, capability, context.round.id, adapter_digest(folder))
            for tasks in (own, retention):
                frame = play_checkpoint(context.engine, ground, tasks, seed, name)
                rate = success_interval(frame)
                said.append(f"{100 * rate.rate:.0f} % ({100 * rate.low:.0f} to {100 * rate.high:.0f})")
            print(f"  step {step} on {SEEDS} further seeds: own {said[0]}, retention {said[1]}")
    forget(context.round.id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--profile", default="laptop")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(QUIET | {"TRACE_HOME": folder, "PREFECT_HOME": folder})
        main(given.seed, given.most, given.profile)
