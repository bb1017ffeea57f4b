"""Methods that train one adapter for everything, with TRACE's own trainer.

`grpo-target` trains on the diagnosis tasks themselves, with the dense reward of TRACE's environments, `grpo-target-own`
with the target's own reward, `demonstrations-grpo` with the dense one from what has learnt reference solutions
(`tasks/methods/iterated.py`), as TRACE may begin, `generalist-grpo` from TRACE's own beginning. `mixed` trains on all
environments that TRACE synthesized and calibrated, mixed evenly. All choose among their checkpoints as TRACE does; all
that the budget leaves is training.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from db import GENERALIST, AdapterRow, SpendRow, StageRow, TrainingStepRow
from environments.contract import Environment, Message, Observation, Target, TargetTask, content_hash
from environments.synthesized.composed import NEAR_MISS, DenseEnvironment
from environments.synthesized.references import References
from environments.wrapping import WrappedEnvironment
from errors import TrainingError
from models.training.checkpoints import weights_by_step
from tasks.measuring.lineup import tried_on_diagnosis
from tasks.methods.iterated import NO_SOLUTIONS, cloned_adapter, cloned_note, unlearnt_note
from tasks.methods.seed.answers import Answer, Checkpoint, one_adapter
from tasks.methods.seed.budget import TEST, Account
from tasks.methods.seed.seed_run import SeedRun
from tasks.methods.trace import choosing_episodes
from tasks.round.adapters import adapter_id, own_adapter, registered
from tasks.round.context import Context
from tasks.round.results import CalibrateResult, SelectResult, TrainResult
from tasks.synthesis.environments import TrainingEnvironment, stored_environment
from tasks.synthesis.learning.course import Course
from tasks.synthesis.learning.generalist import beginning_of, comes_first, specialists
from tasks.synthesis.learning.practising import practice_episodes
from tasks.synthesis.learning.shown import shown_so_far
from tasks.synthesis.learning.training import train_on

DEMONSTRATIONS_GRPO, GENERALIST_GRPO = "demonstrations-grpo", "generalist-grpo"
# A budget is there to be used: where most tasks are solved or hopeless, two collections without an informative group
# say nothing, and neither do two steps at 95 %, whose few scenarios of many families may have been the easy ones. After
# as many collections the training ends, or when two steps lost nothing, and the method's notes say so.
PATIENCE, SOLVED = 30, 1.0
# How the stages of TRACE's round begin whose work `mixed` takes over: what made its environments, and its start.
MAKES_ENVIRONMENTS = ("contrast", "select", "synthesize", "calibrate")
TRAINS_START = f"train:{GENERALIST}"
MAKES_START = (TRAINS_START, f"rollout:{GENERALIST}")


@dataclass(frozen=True)
class Spec:
    """Who a training's environment is; see `TrainingSpec`."""

    id: str
    capability: str
    retention_share: float = 0.0


class TargetPractice:
    """The target's diagnosis tasks as scenarios; its validation tasks are those that a checkpoint is chosen on, in an
    order of the environment's own: targets list their tasks family by family, and a checkpoint is chosen on a few that
    follow one another. The reward is `dense`, or the target's own."""

    def __init__(
        self, name: str, target: Target, diagnosis: Sequence[TargetTask], validation: Sequence[TargetTask], dense: bool
    ) -> None:
        self.target, self.diagnosis, self.dense, self._references = target, diagnosis, dense, References(target)
        tasks = [[t.id for t in part] for part in (diagnosis, validation)]
        self.spec = Spec(content_hash([name, target.name, target.data_hash, tasks]), name)
        self.validation = random.Random(f"{self.spec.id}:choosing").sample(list(validation), len(validation))

    def scenario(self, seed: int) -> TargetTask:
        return random.Random(f"{self.spec.id}:{seed}").choice(self.diagnosis)

    def own_scenario(self, seed: int) -> TargetTask:
        return self.validation[seed % len(self.validation)]

    def own(self, task: TargetTask) -> bool:
        return True

    def advice(self, task: TargetTask) -> Sequence[Message]:
        return ()  # plain GRPO has none

    def environment(self) -> Environment:
        if not self.dense:
            return self.target.environment()
        return DenseEnvironment(self.target.environment(), self._references, NEAR_MISS)


class Mixture:
    """Several training environments as one: each scenario is drawn from one of them, and is played in that one. What is
    another's own scenario stands in for retention, so nothing is kept apart."""

    def __init__(self, parts: Sequence[TrainingEnvironment]) -> None:
        self.parts = parts
        self.spec = Spec(content_hash(["mixed", [part.spec.id for part in parts]]), "mixed")
        self._of: dict[str, TrainingEnvironment] = {}

    def _drawn(self, part: TrainingEnvironment, task: TargetTask) -> TargetTask:
        self._of[task.id] = part
        return task

    def _part(self, kind: str, seed: int) -> TrainingEnvironment:
        return random.Random(f"{self.spec.id}:{kind}:{seed}").choice(self.parts)

    def scenario(self, seed: int) -> TargetTask:
        part = self._part("any", seed)
        return self._drawn(part, part.scenario(seed))

    def own_scenario(self, seed: int) -> TargetTask:
        part = self._part("own", seed)
        return self._drawn(part, part.own_scenario(seed))

    def own(self, task: TargetTask) -> bool:
        return True

    def advice(self, task: TargetTask) -> Sequence[Message]:
        return ()  # a mixture is not calibrated

    def environment(self) -> Environment:
        return _Dispatching(self._of)


class _Dispatching(WrappedEnvironment):
    """The environment of whichever part a task was drawn from, from `reset` on."""

    def __init__(self, of: Mapping[str, TrainingEnvironment]) -> None:
        self._of = of
        super().__init__(next(iter(of.values())).environment())

    def reset(self, task: TargetTask) -> Observation:
        self.close()
        self.inner = self._of[task.id].environment()
        return super().reset(task)


def grpo_target(run: SeedRun, context: Context, account: Account) -> Answer:
    """GRPO on the target itself, with the dense reward."""
    return _practised(run, context, account, "grpo-target", dense=True)


def grpo_target_own(run: SeedRun, context: Context, account: Account) -> Answer:
    """GRPO on the target itself, with the reward that it gives."""
    return _practised(run, context, account, "grpo-target-own", dense=False)


def grpo_cloned(run: SeedRun, context: Context, account: Account) -> Answer:
    """GRPO on the target itself, with the dense reward, that begins from the adapter of `demonstrations`."""
    try:
        cloned = cloned_adapter(context)
    except TrainingError as problem:
        return Answer(context, notes=(unlearnt_note(problem),))
    if cloned is None:
        return Answer(context, notes=(NO_SOLUTIONS,))
    answer = _practised(run, context, account, DEMONSTRATIONS_GRPO, dense=True, start=cloned)
    return replace(answer, notes=(cloned_note(cloned), *answer.notes))


def grpo_generalist(run: SeedRun, context: Context, account: Account) -> Answer:
    """GRPO on the target itself, with the dense reward, that begins from the generalist that TRACE has made first: what
    TRACE's own trainings begin from. It pays for what that was shown and has practised with."""
    if not (comes_first(context) and GENERALIST in registered(context.stored)):
        return Answer(context, notes=("TRACE has made no generalist first, so the bare base answers",))
    start = context.store.row(AdapterRow, id=own_adapter(context.stored, GENERALIST))
    environment = stored_environment(context.store, context.round, context.target, GENERALIST, context.keep)
    account.admit(shown_so_far(context, environment.spec.id), "calibration")
    _pay_for_practice(context, account)
    answer = _practised(run, context, account, GENERALIST_GRPO, dense=True, start=start)
    return replace(answer, shared_seconds=_seconds(context, (TRAINS_START,)))


def _pay_for_practice(context: Context, account: Account) -> None:
    """Charge what the generalist that a method begins from has practised with."""
    played = practice_episodes(context)
    for purpose in sorted({*played.values()}):
        account.admit([i for i, of in played.items() if of == purpose], purpose)


def _seconds(context: Context, stages: tuple[str, ...]) -> float:
    """What the round's stages took whose names begin so."""
    rows = context.store.rows(StageRow, round_id=context.round.id)
    return sum(row.seconds or 0.0 for row in rows if row.name.startswith(stages))


def _practised(
    run: SeedRun, context: Context, account: Account, name: str, dense: bool, start: AdapterRow | None = None
) -> Answer:
    diagnosis, validation = context.tasks("diagnosis"), context.tasks("validation")
    environment = TargetPractice(name, context.target, diagnosis, validation, dense)
    return _trained(run, context, account, name, environment, start)


def mixed(run: SeedRun, context: Context, account: Account) -> Answer:
    """One adapter on all environments that TRACE may train on; it begins from the generalist where TRACE makes that
    first, as TRACE's own trainings do."""
    accepted = [
        c
        for c in specialists(context.result(SelectResult).selected)
        if (found := context.found(CalibrateResult, c)) and found.accepted
    ]
    if not accepted:
        return Answer(context, notes=("no synthesized environment was accepted, so the bare base answers",))
    # What TRACE paid for its environments, this method pays too: what the generalist lacks is mined from the diagnosis
    # tasks that it has played.
    trace = Account(context.store, "trace")
    account.admit([i for i, purpose in trace.charged().items() if purpose == "calibration"], "calibration")
    start, began = None, beginning_of(context, accepted[0])
    if began is not None and began[0] == GENERALIST:
        start = context.store.row(AdapterRow, id=began[1])
        account.admit(tried_on_diagnosis(context, GENERALIST), "routing")
        _pay_for_practice(context, account)
    used = (*MAKES_ENVIRONMENTS, *(MAKES_START if start is not None else ()))
    parts = [stored_environment(context.store, context.round, context.target, c, context.keep) for c in accepted]
    answer = _trained(run, context, account, "mixed", Mixture(parts), start)
    notes = (f"environments: {', '.join(accepted)}", *answer.notes)
    written = context.store.rows(SpendRow, round_id=context.round.id, stage=list(MAKES_ENVIRONMENTS))
    dollars = sum(row.dollars for row in written)
    return replace(answer, notes=notes, shared_seconds=_seconds(context, used), shared_dollars=dollars)


def _trained(
    run: SeedRun,
    context: Context,
    account: Account,
    name: str,
    environment: TrainingEnvironment,
    start: AdapterRow | None = None,
) -> Answer:
    """One adapter, trained with all that the account leaves from zero or from `start`, which answers (or else the bare
    base) where nothing could be learnt."""
    before = Answer(context) if start is None else one_adapter(context, name, start.id)
    whose = "the bare base" if start is None else "the adapter that it begins from"
    identity = adapter_id(context.round.id, name)
    account.share = lambda left: left - choosing_episodes(context.settings)
    train = context.settings.train
    # One that has begun goes on: what has chosen among its checkpoints since is no longer left.
    begun = context.store.row(AdapterRow, id=identity)
    paid = account.for_training(identity) // (train.groups * train.group_size)
    steps = paid if begun is None else int(begun.config["steps"])
    if not steps:
        return replace(before, notes=(f"the budget leaves no group to train on, so {whose} answers",))
    folder = context.folder / "training" / name
    # Not judged: there is no environment to be made anew, and near misses that come before success would cost it all.
    course = Course(name, environment, identity, folder, steps, patience=PATIENCE, solved=SOLVED, judged=False)
    try:
        trained = train_on(context, course, None if start is None else context.settings.folder / str(start.path))
    except TrainingError as problem:
        return replace(before, notes=(unlearnt_note(problem, whose),))
    context.registry.end_run(trained.run)
    notes, checkpoints = _notes(trained), _checkpoints(context, account, course, trained.steps)
    kept = checkpoints if len(checkpoints) <= run.points else _at_equal_distances(checkpoints, run.points)
    if not trained.chosen:
        notes = (*notes, f"no checkpoint is better than {whose}, which answers")
        return replace(before, notes=notes, checkpoints=kept)
    return replace(one_adapter(context, name, trained.adapter), notes=notes, checkpoints=kept)


def _checkpoints(context: Context, account: Account, course: Course, steps: int) -> tuple[Checkpoint, ...]:
    """The weights after each step, with the episodes of the whole budget that had been played by then."""
    # Also the base's own there, which checkpoints are held against.
    mine = set(context.store.trajectory_frame(None, columns=["id"], environment=course.environment.spec.id)["id"])
    before = sum(purpose != TEST for i, purpose in account.charged().items() if i not in mine)
    rows = sorted(context.store.rows(TrainingStepRow, adapter_id=course.adapter), key=lambda row: row.step)
    folders = weights_by_step(course.folder, steps)
    return tuple(
        Checkpoint(before + int(row.metrics["played"]), course.adapter, folders[row.step])
        for row in rows
        if row.step <= steps
    )


def _at_equal_distances(checkpoints: Sequence[Checkpoint], most: int) -> tuple[Checkpoint, ...]:
    """At most `most`, the last among them."""
    count = len(checkpoints)
    return tuple(checkpoints[(i + 1) * count // most - 1] for i in range(most))


def _notes(trained: TrainResult) -> tuple[str, ...]:
    told = f"trained for {trained.steps} steps ({trained.ending}), the weights after step {trained.chosen}"
    return (told, trained.verdict) if trained.verdict else (told,)
