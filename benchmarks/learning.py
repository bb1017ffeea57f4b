"""What one training can teach a base on a target: one adapter on some of its families, success by family before and
after.

    python -m benchmarks.learning --target bfcl:single --profile bfcl --families irrelevance,simple_python
    python -m benchmarks.learning --target bfcl:single --profile bfcl --families parallel --hints \\
        --retention simple_python
    python -m benchmarks.learning --target bfcl:single --profile bfcl --families parallel,simple_python \\
        --demonstrations 40 --steps 0 --validation

`--demonstrations N`: the reference solutions of N scenarios of each of these families are learnt first, and GRPO begins
from there; with `--steps 0` there is nothing but them. `--validation` measures on the validation tasks, too.

For choosing settings on development seeds, before a comparison is run. Scenarios are the target's own generators', with
the dense reward of composed environments; success is the target's, on fresh scenarios of every family that training
never draws. One training: a difference of a few episodes says nothing. Other settings as everywhere
(`TRACE_TRAIN__...`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from db import TrainingStepRow
from environments.contract import Generators, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from errors import ConfigurationError
from models.adapters.loading import load_folder
from models.episodes import Episode
from settings import load_settings
from tasks.measuring.statistics import success_interval
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import FRESH_SEED
from tasks.synthesis.learning.course import Course
from tasks.synthesis.learning.demonstrated import demonstrations
from tasks.synthesis.learning.recalling import learn
from tasks.synthesis.learning.training import train_on, training_settings

NAME, ADAPTER, SHOWN = "learning", "adapter-learning", "shown"


def environment_of(context: Context, families: tuple[str, ...], retention: tuple[str, ...] = ()) -> ComposedEnvironment:
    """The environment of some families."""
    spec = CompositionSpec(context.round.target, context.round.data_hash, NAME, families, retention)
    return ComposedEnvironment(context.target, spec)


def success(context: Context, family: str, fresh: int, name: str | None) -> str:
    """Success on fresh scenarios of a family with its interval, of the base (None) or the adapter of that name."""
    environment = environment_of(context, (family,))
    tasks = [environment.own_scenario(FRESH_SEED + i) for i in range(fresh)]
    ground = context.training_ground(environment.spec.id, environment.environment, ADAPTER if name else "")
    return told(context, context.engine.play(ground, [Episode("", t, 0, 0, name) for t in tasks], name or "base"))


def on_validation(context: Context, tasks: Sequence[TargetTask], name: str | None) -> str:
    """Success on the target's own validation tasks."""
    ground = replace(context.ground("evaluation"), adapter_id=ADAPTER if name else None)
    return told(context, context.engine.play(ground, [Episode("", t, 0, 0, name) for t in tasks], name or "base"))


def told(context: Context, ids: list[str]) -> str:
    frame = outcomes(context.store, ids)
    found = success_interval(frame)
    return f"{100 * frame['success'].mean():3.0f} % ({100 * found.low:.0f} to {100 * found.high:.0f})"


def show(context: Context, families: Sequence[str], count: int, passes: int) -> tuple[Path, str]:
    """The adapter that has learnt `count` reference solutions of each family: its folder and its digest."""
    environment = environment_of(context, tuple(families))
    shown = demonstrations(environment, context.base, dict.fromkeys(families, count))
    learnt = learn(context, SHOWN, (), training_settings(context.settings), passes, demonstrations=shown, of=families)
    context.registry.end_run(learnt.run)
    return context.settings.folder / str(learnt.adapter.path), str(learnt.adapter.sha256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="shop")
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--families", required=True, help="what is trained on, commas between")
    parser.add_argument("--retention", default="", help="families of a third of the scenarios, commas between")
    parser.add_argument("--hints", action="store_true", help="half of each group's rollouts with a worked example")
    parser.add_argument("--demonstrations", type=int, default=0, help="of each family, learnt first")
    parser.add_argument("--passes", type=int, default=3, help="over the demonstrations")
    parser.add_argument("--validation", action="store_true", help="measure on the validation tasks, too")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fresh", type=int, default=40, help="fresh scenarios of each family")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    families, retention = ([f for f in text.split(",") if f] for text in (given.families, given.retention))
    with tempfile.TemporaryDirectory() as home:
        settings = load_settings(
            target=given.target, profile=given.profile, home=Path(home), seed=given.seed, train={"steps": given.steps}
        )
        context = open_context(settings)
        try:
            if not isinstance(context.target, Generators):
                raise ConfigurationError(f"{given.target} has no generators; take a target that has")
            validation: dict[str, list[TargetTask]] = {}
            for task in context.tasks("validation") if given.validation else ():
                validation.setdefault(task.family, []).append(task)
            before = {f: success(context, f, given.fresh, None) for f in context.target.families()}
            known = {f: on_validation(context, tasks, None) for f, tasks in validation.items()}

            def tell(name: str, what: str) -> None:
                for family, rate in before.items():
                    mark = "*" if family in families else " "
                    print(f"{mark} {family:<24} base {rate:<18} {what} {success(context, family, given.fresh, name)}")
                for family, rate in known.items():
                    after = on_validation(context, validation[family], name)
                    print(f"  validation: {family:<24} base {rate:<18} {what} {after}", flush=True)

            start = None
            if given.demonstrations:
                began = time.monotonic()
                start, digest = show(context, families, given.demonstrations, given.passes)
                print(f"demonstrations learnt in {time.monotonic() - began:.0f} s")
                name = load_folder(context.policy, start, SHOWN, context.round.id, digest)
                tell(name, "shown")
                context.policy.unload_adapter(name)
            if given.steps:
                environment = environment_of(context, tuple(families), tuple(retention))
                began = time.monotonic()
                course = Course(NAME, environment, ADAPTER, context.folder / NAME, given.steps, given.hints)
                result = train_on(context, course, start)
                seconds = time.monotonic() - began
                for row in sorted(context.store.rows(TrainingStepRow, adapter_id=ADAPTER), key=lambda r: r.step):
                    print(f"step {row.step}: reward {row.reward:.2f}, {row.metrics['played']:.0f} episodes played")
                print(f"{seconds:.0f} s, {result.ending}, the weights after step {result.chosen}")
                folder = context.folder / NAME / "final"
                tell(load_folder(context.policy, folder, NAME, context.round.id, result.sha256), "trained")
        finally:
            forget(context.round.id)


if __name__ == "__main__":
    main()
