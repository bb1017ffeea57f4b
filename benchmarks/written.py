"""Does a written environment train as well as the target's own generators, and does the early check tell beforehand?

    python -m benchmarks.written --seed 0 --folder FOLDER        # one seed; the same command goes on where it stopped
    python -m benchmarks.written --table FOLDER                  # what all seeds in the folder came to

For each capability that has a module in `environments/synthesized/worked_examples/shop`, two adapters are trained with
the same settings, retention families and most episodes: one on the environment that a round composes of the target's
generators for it, one on the module. Both then play tasks of the target that nothing was trained or chosen on: of the
capability's families (own) those of validation and test and as many again, drawn for this, of all others (rest) those
of test. The early check of a round (`tasks/synthesis/transfer.py`) is made on the weights after a third of the steps.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from db import TrainingStepRow
from environments.contract import TargetTask
from environments.synthesized import worked_examples
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import WrittenEnvironment, WrittenSpec
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.episodes import Episode
from models.training.checkpoints import weights_by_step
from settings import load_settings
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import measure
from tasks.synthesis.choosing import fresh_scenarios
from tasks.synthesis.environments import compose
from tasks.synthesis.learning.course import Course
from tasks.synthesis.learning.training import train_on
from tasks.synthesis.transfer import first_third, target_episodes, transfer_of

MODULES = Path(worked_examples.__file__).parent / "shop"
GENERATORS, WRITTEN = "generators", "written"
STEPS, MOST_EPISODES, DRAWN, TRIED = 8, 352, 16, 24
SHARE = 0.5


class Most:
    """A budget that gives each training so many episodes and counts nothing else."""

    def admit(self, ids: Iterable[str], purpose: str) -> None: ...

    def for_training(self, adapter: str) -> int:
        return MOST_EPISODES

    def unplayed(self, purpose: str) -> int:
        return 0

    def for_routing(self, adapters: Sequence[str], purpose: str) -> int:
        return 0


Trained: TypeAlias = ComposedEnvironment | WrittenEnvironment


@dataclass
class Bench:
    """One seed: the round's context, and the target's tasks that nothing is trained or chosen on."""

    context: Context
    folder: Path

    def environments(self, capability: str, module: SandboxedModule) -> dict[str, Any]:
        """The two environments, with the same families for retention."""
        context, by_family = self.context, defaultdict(list)
        diagnosis = context.tasks("diagnosis")
        played = self.play(diagnosis, None)
        for task in diagnosis:
            by_family[task.family].append(played.get(task.id, False))
        success = {family: float(np.mean(won)) for family, won in by_family.items()}
        share = context.settings.calibration.retention_share
        composed = compose(context.target, context.round, capability, success, share)
        at, spec = context.round, composed.spec
        written = WrittenSpec(
            at.target, at.data_hash, capability, module.code_hash, spec.families, spec.retention_families, (), share
        )
        return {GENERATORS: composed, WRITTEN: WrittenEnvironment(context.target, written, module)}

    def play(self, tasks: list[TargetTask], name: str | None, adapter: str = "") -> dict[str, bool]:
        """Success by task id, of the base (None) or a loaded adapter."""
        ground = replace(self.context.ground("evaluation"), adapter_id=adapter or None)
        episodes = [Episode("", task, self.context.seed, 0, name) for task in tasks]
        frame = outcomes(self.context.store, self.context.engine.play(ground, episodes, name or "base"))
        return {str(task): bool(won) for task, won in zip(frame["task"], frame["success"], strict=True)}

    def untouched(self, families: tuple[str, ...]) -> list[TargetTask]:
        """Tasks of test, and of the capability's families those of validation and more that are drawn."""
        validation = [task for task in self.context.tasks("validation") if task.family in families]
        return [*self.context.tasks("test"), *validation, *self.context.drawing.further(dict.fromkeys(families, DRAWN))]

    def train(self, capability: str, kind: str, environment: Trained) -> dict[str, Any]:
        """Train on an environment, and everything that is measured of it."""
        context, name = self.context, f"{capability}-{kind}"
        calibrated = measure(context.engine, context.settings, environment)
        if isinstance(environment, WrittenEnvironment):
            environment = environment.at(calibrated.level or 0)
        course = Course(name, environment, name, self.folder / name, STEPS, calibrated.hinted is not None)
        context.budget = Most()
        trained = train_on(context, course)
        context.budget = None
        weights = weights_by_step(course.folder, trained.steps)
        rows = sorted(context.store.rows(TrainingStepRow, adapter_id=name), key=lambda row: row.step)
        tasks = self.untouched(environment.spec.families)
        after = self._with(weights[trained.chosen], name, tasks) if trained.chosen else self.play(tasks, None)
        return {
            "capability": capability,
            "kind": kind,
            "families": list(environment.spec.families),
            "calibration": {"reason": calibrated.reason, "hinted": calibrated.hinted, "level": calibrated.level},
            "steps": trained.steps,
            "chosen": trained.chosen,
            "ending": trained.ending,
            "episodes": int(rows[-1].metrics["played"]) if rows else 0,
            "check": self._check(environment, name, weights),
            "tasks": {task.id: task.family for task in tasks},
            "before": self.play(tasks, None),
            "after": after,
        }

    def _with(self, weights: Path, name: str, tasks: list[TargetTask]) -> dict[str, bool]:
        policy, context = self.context.policy, self.context
        digest = adapter_digest(weights)
        loaded = load_folder(policy, weights, name, context.round.id, digest)
        played = self.play(tasks, loaded, f"{name}-{digest[:8]}")
        policy.unload_adapter(loaded)
        return played

    def _check(self, environment: Trained, name: str, weights: Mapping[int, Path]) -> dict[str, Any] | None:
        """The early check, made afterwards on the weights that it would have seen."""
        third = first_third(STEPS)
        assert third is not None
        step = min(third, max(weights))
        diagnosis = self.context.tasks("diagnosis")
        base = self.play(diagnosis, None)
        failed = [t for t in diagnosis if t.family in environment.spec.families and not base.get(t.id, True)]
        if not step or not failed:
            return None
        own, _ = fresh_scenarios(environment, self.context.settings.train.choosing, 1)
        context, digest = self.context, adapter_digest(weights[step])
        ground = context.training_ground(environment.spec.id, environment.environment, f"{name}-{digest[:8]}")
        loaded = load_folder(context.policy, weights[step], name, context.round.id, digest)

        def outcomes_of(where: Any, episodes: list[Episode]) -> Any:
            return outcomes(context.store, context.engine.play(where, episodes, f"check {name}"))

        start = outcomes_of(replace(ground, adapter_id=""), [Episode("", t, context.seed, 0, None) for t in own])
        now = outcomes_of(ground, [Episode("", t, context.seed, 0, loaded) for t in own])
        on_target = replace(context.ground("transfer"), adapter_id=f"{name}-{digest[:8]}")
        tried = outcomes_of(on_target, target_episodes(failed, TRIED, context.seed, loaded))
        context.policy.unload_adapter(loaded)
        found = transfer_of(step, start, now, tried)
        return {
            "before": found.before,
            "after": found.after,
            "episodes": found.episodes,
            "successes": found.successes,
            "verdict": found.verdict,
        }


def run(seed: int, folder: Path, profile: str) -> None:
    """All trainings of a seed; what is done is not done again."""
    home = folder / f"seed-{seed}"
    context = open_context(load_settings(target="shop", profile=profile, home=home, seed=seed, train={"steps": STEPS}))
    bench = Bench(context, context.folder / "written")
    try:
        for path in sorted(MODULES.glob("[a-z]*.py")):
            module = SandboxedModule(path.read_text(encoding="utf-8"))
            try:
                for kind, environment in bench.environments(path.stem, module).items():
                    result = folder / f"{path.stem}-{kind}-{seed}.json"
                    if not result.exists():
                        made = {"seed": seed, "profile": profile, **bench.train(path.stem, kind, environment)}
                        result.write_text(json.dumps(made, indent=1), encoding="utf-8")
                    print(told(json.loads(result.read_text(encoding="utf-8"))), flush=True)
            finally:
                module.close()
    finally:
        forget(context.round.id)


def gains(found: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """By task id, what the adapter gained on the capability's own families and on the rest; lost episodes left out."""
    both = found["before"].keys() & found["after"].keys()
    by_task = {task: float(found["after"][task]) - float(found["before"][task]) for task in sorted(both)}
    own = {t: g for t, g in by_task.items() if found["tasks"][t] in found["families"]}
    return own, {t: g for t, g in by_task.items() if t not in own}


def told(found: Mapping[str, Any]) -> str:
    """A training in a line."""
    own, rest = ([*part.values()] for part in gains(found))
    check, advised = found["check"], found["calibration"]["hinted"] is not None
    early = "no check" if check is None else f"check {check['successes']:2d} of {check['episodes']:2d}"
    return (
        f"seed {found['seed']}  {found['capability']:<16} {found['kind']:<10} {found['steps']} steps, "
        f"{found['episodes']:3d} episodes, step {found['chosen']}: own {100 * float(np.mean(own)):+5.1f} on {len(own)} "
        f"tasks, rest {100 * float(np.mean(rest)):+5.1f} on {len(rest)}, {early}{', with hints' if advised else ''}"
    )


def interval(parts: list[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Mean over seeds of the mean over tasks, with a 95 % interval bootstrapped over tasks within seeds."""
    rng = np.random.default_rng(seed)
    draws = [np.mean([rng.choice(p, len(p)).mean() for p in parts]) for _ in range(4000)]
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(np.mean([p.mean() for p in parts])), float(low), float(high)


def table(folder: Path) -> None:
    """What all seeds came to: gains, whether the written environment has half of the generators' gain, the check."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*-*.json"))]
    for one in found:
        print(told(one))
    by = {(f["capability"], f["kind"], f["seed"]): gains(f)[0] for f in found}
    for capability in sorted({f["capability"] for f in found}):
        seeds = [s for c, k, s in by if c == capability and k == WRITTEN and (c, GENERATORS, s) in by]
        shown = []
        for kind in (GENERATORS, WRITTEN):
            shown.append((kind, [np.array([*by[capability, kind, s].values()]) for s in seeds]))
        beyond = []
        for s in seeds:
            own, other = by[capability, WRITTEN, s], by[capability, GENERATORS, s]
            beyond.append(np.array([own[t] - SHARE * other[t] for t in own.keys() & other.keys()]))
        shown.append((f"written - {SHARE:g} x generators", beyond))
        for name, parts in shown:
            mean, low, high = (100 * x for x in interval(parts))
            print(f"{capability:<16} {name:<26} {mean:+6.1f} points ({low:+.1f} to {high:+.1f}), {len(seeds)} seeds")
    checked = [f for f in found if f["check"] is not None]
    for kind in (WRITTEN, GENERATORS):
        of = [f for f in checked if f["kind"] == kind]
        right = sum((f["check"]["successes"] > 0) == (np.mean([*gains(f)[0].values()]) > 0) for f in of)
        gained = sum(np.mean([*gains(f)[0].values()]) > 0 for f in of)
        print(f"{kind}: the check told the sign of {right} of {len(of)} gains ({gained} are above 0)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("written"))
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--table", type=Path, help="print what this folder holds, and train nothing")
    given = parser.parse_args()
    if given.table:
        table(given.table)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    run(given.seed, given.folder.resolve(), given.profile)


if __name__ == "__main__":
    main()
