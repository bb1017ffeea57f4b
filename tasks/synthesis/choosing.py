"""Which checkpoint of a training becomes its adapter: the best on fresh seeds (method, section 5).

Own and retention scenarios are counted apart: a checkpoint is taken for its success on the capability's own, and passed
over when it has forgotten what the start could do. Nothing that is reported of the adapter is measured on these seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from environments.contract import TargetTask
from environments.sandbox.workers import NOT_STARTED, ModuleError
from errors import EnvironmentFault, SandboxError
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.episodes import Episode
from models.training.records import GroupFigures, StepRecord
from tasks.measuring.lineup import held
from tasks.measuring.statistics import Interval, clustered_interval, paired_difference, success_interval
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import CheckpointFigures
from tasks.round.rollouts import RoundEngine, outcomes
from tasks.synthesis.calibration import CHOOSING_SEED, seed_offset
from tasks.synthesis.environments import TrainingEnvironment

# Scenarios drawn for each retention scenario that is wanted, and the fewest that are wanted: of fewer no loss is seen.
DRAWS, LEAST_RETENTION = 20, 4
# How sure it has to be that weights do worse than what they are compared with. On a dozen scenarios 95 % would still
# take an adapter that solves a third of them where the base solves three quarters, and on four retention scenarios
# one that has lost them all.
WORSE = 0.8


@dataclass(frozen=True)
class Choice:
    """The step that was chosen (0: what training began from), and the figures of all that were played."""

    step: int
    figures: tuple[CheckpointFigures, ...]


def candidates(records: Sequence[StepRecord], most: int) -> list[int]:
    """Steps of the checkpoints that are worth playing, at most `most`: the last, and of the others those whose own
    success in training was within noise of the best.

    A checkpoint's rollouts are those of the step after it; the last one has none. Of a training whose scenarios became
    harder those at the hardest level count that any checkpoint has played.
    """
    last, played = len(records), [r for r in records if r.step > 1 and r.own_groups]
    hardest = max((r.level for r in played), default=0)
    seen = {r.step - 1: _interval(r.own_groups) for r in played if r.level == hardest}
    best = max((i.rate for i in seen.values()), default=0.0)
    contenders = [step for step, interval in seen.items() if interval.high >= best]
    ranked = sorted(contenders, key=lambda step: (-seen[step].rate, -step))
    return sorted([*ranked[: most - 1], last])


def retained(own: int) -> int:
    """How many retention scenarios weights are tried on beside so many of the capability's own: half as many."""
    return max(LEAST_RETENTION, (own + 1) // 2)


def fresh_scenarios(
    environment: TrainingEnvironment, count: int, number: int, kind: int = CHOOSING_SEED
) -> tuple[list[TargetTask], list[TargetTask]]:
    """`count` of the capability's own scenarios and `retained` for retention (fewer where there are fewer, none
    where training has none), each once, for round `number` and this `kind` of seeds alone. Training draws from seeds
    that are not negative."""
    first = kind + seed_offset(number)
    own = {task.id: task for task in (environment.own_scenario(first + i) for i in range(count))}
    wanted = retained(count) if environment.spec.retention_share else 0
    retention: dict[str, TargetTask] = {}
    for i in range(DRAWS * wanted):
        if len(retention) == wanted:
            break
        task = environment.scenario(-first - i)
        if not environment.own(task):
            retention[task.id] = task
    return list(own.values()), list(retention.values())


@contextmanager
def loaded(context: Context, folder: Path | None, capability: str) -> Iterator[str | None]:
    """The name by which a checkpoint's weights (None: the base) are sampled with; they are loaded within alone, however
    it ends."""
    given = None
    if folder is not None:
        given = load_folder(context.policy, folder, capability, context.round.id, adapter_digest(folder))
    with held(context, given) as name:
        yield name


def play_checkpoint(
    engine: RoundEngine, ground: Playground, tasks: Sequence[TargetTask], seed: int, adapter: str | None
) -> pd.DataFrame:
    """Outcomes (see `outcomes`) of one episode on each task, the lost ones among them; what is stored is not played
    again."""
    what = f"choose a checkpoint: {adapter or 'base'}"
    ids = engine.play(ground, [Episode("", task, seed, 0, adapter) for task in tasks], what)
    return outcomes(engine.engine.store, ids, lost=True)


def finished(frame: pd.DataFrame, own: Collection[str] = (), what: str = "") -> pd.DataFrame:
    """Of outcomes with those that were lost, those that were not, as `outcomes` has them.

    Raises `ModuleError` where a written module has lost every episode of the scenarios named `own`, which were to show
    `what`: played again they would be lost again, and nothing else in the round is at fault. A machine that starts no
    worker says nothing of a module."""
    gone = frame[frame["error_boundary"].notna()]
    mine = part_of(frame, set(own), True)
    lost = part_of(gone, set(own), True)
    said = zip(lost["error_boundary"], lost["error"], strict=True)
    modules = [b == SandboxError.boundary and not str(error).startswith(NOT_STARTED) for b, error in said]
    if len(lost) == len(mine) > 0 and all(modules):
        raise ModuleError(
            f"the written module ended all {len(lost)} episodes that were to show {what} with an error; the first: "
            f"{lost['error'].iloc[0]}"
        )
    kept = frame.drop(gone.index).reset_index(drop=True)
    return kept.assign(success=kept["success"].astype(bool))


def pick(played: Mapping[int, pd.DataFrame], own: Sequence[TargetTask]) -> Choice:
    """Choose among checkpoints by their outcomes; `played` has them by step, 0 being what training began from.

    The best on the capability's own scenarios, by success, then by reward, then the later one; those that forget are
    left out unless all do. The start itself is kept only when it is significantly better than that: a difference
    within noise is for the gate to judge, on the target's own tasks. Raises `EnvironmentFault` when every episode of a
    checkpoint was lost.
    """
    names = {task.id for task in own}
    start = played[0]
    found = {step: _figures(step, frame, start, names) for step, frame in sorted(played.items())}
    steps = [step for step in found if step > 0 and not found[step].forgets] or [step for step in found if step > 0]
    best = max(steps, key=lambda step: (found[step].success, found[step].reward, step))
    if falls(part_of(start, names, True), part_of(played[best], names, True)):
        best = 0
    return Choice(best, tuple(found.values()))


def _figures(step: int, frame: pd.DataFrame, start: pd.DataFrame, names: set[str]) -> CheckpointFigures:
    mine, others = part_of(frame, names, True), part_of(frame, names, False)
    if mine.empty:
        raise EnvironmentFault(
            f"all episodes that were to show what step {step} is worth were lost to errors; their trajectories say why"
        )
    success = success_interval(mine)
    return CheckpointFigures(
        step=step,
        success=success.rate,
        low=success.low,
        high=success.high,
        reward=float(mine["reward"].mean()),
        retention=float(others["success"].mean()) if len(others) else None,
        forgets=step > 0 and falls(part_of(start, names, False), others, WORSE),
    )


def part_of(frame: pd.DataFrame, names: set[str], own: bool) -> pd.DataFrame:
    """Outcomes on the scenarios with these names, or on all others."""
    return frame[frame["task"].isin(names) == own]


def falls(before: pd.DataFrame, after: pd.DataFrame, confidence: float = 0.95) -> bool:
    """Whether success fell, task by task, by an interval of that confidence; not where the two share no task."""
    both = before.merge(after, on="task", suffixes=("_before", "_after"))
    if both.empty:
        return False
    sides = [both[f"success_{side}"].astype(float).to_numpy() for side in ("before", "after")]
    return paired_difference(sides[0], sides[1], both["task"].to_numpy(), confidence).high < 0


def _interval(groups: Sequence[GroupFigures]) -> Interval:
    """Success over the episodes of a step, clustered by scenario."""
    wins = [float(k < g.successes) for g in groups for k in range(g.episodes)]
    return clustered_interval(wins, [i for i, g in enumerate(groups) for _ in range(g.episodes)])


def choice_metrics(figures: CheckpointFigures, chosen: int) -> dict[str, float]:
    """A checkpoint's figures on fresh seeds as MLflow metrics; `choice/chosen` is 1 for the one that was chosen."""
    found = {
        "own_success": figures.success,
        "own_reward": figures.reward,
        "retention_success": figures.retention,
        "chosen": float(figures.step == chosen),
    }
    return {f"choice/{name}": value for name, value in found.items() if value is not None}
