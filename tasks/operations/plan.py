"""What a round will play at most, before it begins, and about how long that takes on this machine.

    at most 2,292 rollouts: 144 diagnosis, 3 x (64 calibration + 4 x 32 to 64 training + 44 choosing + 64 fresh seeds),
    864 evaluation; at most about 12 minutes on this machine

Where nothing can be trained, because the target has no generators and no model writes environments, the plan says so
and counts what such a round plays: diagnosis and test. A step of a training plays its batch, and as many batches as
`train.collections` says while no group of it teaches. The minutes are the pace of the last finished round of the same
target, profile and base in this home; without one they are not known, and the plan says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass

from db import GENERALIST, ReleaseRow, Round, RoundState, StageRow, Store, open_store
from environments.contract import SPLITS, Generators, Target
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import without_model
from errors import ConfigurationError, EnvironmentFault, TargetError
from settings import Settings
from tasks.measuring.gate_plan import noop_tasks, settling_episodes
from tasks.measuring.lineup import members_of
from tasks.operations.devices import check_gpu
from tasks.operations.provable import own_tasks, unprovable
from tasks.operations.training_memory import check_training, memory_text
from tasks.operations.without_effect import user_without_effect, without_effect
from tasks.releases.lifecycle import live_release
from tasks.round.analyst import round_client, target_of
from tasks.round.preflight import least_calls
from tasks.round.registry import open_registry
from tasks.synthesis.calibration import limits_of
from tasks.synthesis.choosing import retained
from tasks.synthesis.environments import can_train, composes, validated
from tasks.synthesis.guarded import GuardedTarget
from tasks.synthesis.learning.shown import SAMPLES, SCENARIOS, TURNS, first_shown
from tasks.synthesis.starting import MOST
from tasks.synthesis.transfer import first_third

# What stands in a plan for what is practised where nothing can be.
UNTRAINED = (
    "no training (the target has no generators to compose environments from, and no model is set to write them: "
    "synthesizer.kind = 'llm', analyst.model)"
)


@dataclass(frozen=True)
class RoundPlan:
    """Episodes of a round at most, by what they are for; those in the middle are of one capability, of `capabilities`
    (0: nothing can be trained), and `generalist` are those of the adapter that is made of all successes (0: there is
    none). `seconds` is what an episode took in the last round, all stages included; None: there was none. A step plays
    `batch` episodes at least and `collections` times as many at most; `transfer` are those of the early check.
    `written`: a model writes the environments, and what further versions and levels of one play is in no sum."""

    diagnosis: int
    capabilities: int
    calibration: int
    steps: int
    batch: int
    choosing: int
    fresh: int
    evaluation: int
    generalist: int = 0
    calls: int = 0
    seconds: float | None = None
    collections: int = 1
    transfer: int = 0
    written: bool = False

    @property
    def trains(self) -> bool:
        """Whether the round can train anything."""
        return self.capabilities > 0

    @property
    def rollouts(self) -> int:
        """All of them."""
        training = self.steps * self.batch * self.collections
        each = self.calibration + training + self.transfer + self.choosing + self.fresh
        return self.diagnosis + self.capabilities * each + self.generalist + self.evaluation

    def text(self) -> str:
        """The plan in one sentence."""
        most = f" to {self.batch * self.collections}" if self.collections > 1 else ""
        each = f"{self.calibration} calibration + {self.steps} x {self.batch}{most} training"
        each += f" + {self.transfer} transfer" if self.transfer else ""
        each += f" + {self.choosing} choosing" if self.choosing else ""
        practising = f"{self.capabilities} x ({each} + {self.fresh} fresh seeds)" if self.trains else UNTRAINED
        text = (
            f"at most {self.rollouts:,} rollouts: {self.diagnosis} diagnosis, {practising}, "
            f"{f'{self.generalist} generalist, ' if self.generalist else ''}{self.evaluation} evaluation"
        )
        if self.written:
            text += "; further versions and levels of a written environment are calibrated and trained in besides"
        if self.calls:
            text += f"; at least {self.calls} calls of a language model"
        if self.seconds is None:
            return f"{text}; how long that takes here is known after the first round"
        return f"{text}; at most about {max(1, round(self.rollouts * self.seconds / 60))} minutes on this machine"


def plan_of(
    settings: Settings, target: Target, seconds: float | None = None, live: ReleaseRow | None = None
) -> RoundPlan:
    """The plan of a round with these settings that goes on from the release `live` (None: the bare base)."""
    s = settings if composes(settings, target) else _without_generalist(settings)
    t = s.train
    counts = {split: len(target.tasks(split)) for split in SPLITS}
    most = {split: min(n, s.rollout.tasks or n) for split, n in counts.items()}
    if not can_train(s, target):
        return _untrained(s, most, live, least_calls(s, target), seconds)
    # The last checkpoint is compared with what training began from; a single step, or candidate, is taken as it is.
    contenders = min(t.candidates, s.training_steps()) + 1 if t.candidates > 1 and s.training_steps() > 1 else 0
    starts = MOST + 1 if t.carries else 0
    # What the early check has played of the start is not played again where the start is chosen among.
    looked = t.transfer + (1 if contenders else 2) * t.choosing if t.transfer and first_third(s.training_steps()) else 0
    trials, further = s.evaluation.validation_trials, s.selection.most * s.evaluation.own_tasks
    # An adapter alone: every trial on its own families, and once on diagnosis, for the router.
    adapters = (_own_tasks(target, s.selection.most, most["validation"]) + further) * trials
    routed = s.evaluation.routed(most["diagnosis"])
    adapters += s.selection.most * routed
    if t.generalist:  # it may be about all families, and with demonstrations its diagnosis is mined
        adapters += most["validation"] * trials
        adapters += most["diagnosis"] * s.rollout.trials if t.generalist_first else routed
    # Base, live release and candidate, and a few of doing nothing; further tasks, and what settles
    # whether a family fell, are for the last two.
    families = Counter(task.family for task in target.tasks("validation")).values()
    settling = settling_episodes(s.evaluation.own_tasks, trials, families)
    validation = (3 * most["validation"] + 2 * further) * trials + settling + noop_tasks(most["validation"])
    if len(families) > 1:  # behind a router that leaves fallen ones to what answers today the candidate plays again
        validation += (most["validation"] + further) * trials + settling
    test = (3 * s.evaluation.trials + 1) * most["test"]
    choosing = (contenders + starts) * (t.choosing + retained(t.choosing))
    # Base and adapter, and the champion that it was trained on from.
    champions, batch = _champions(live), t.groups * t.group_size
    fresh = (3 if champions - {GENERALIST} else 2) * s.evaluation.fresh
    practice = _practice(s, target, champions, routed)
    again = (3 if GENERALIST in champions else 2) * s.evaluation.fresh
    return RoundPlan(
        diagnosis=most["diagnosis"] * s.rollout.trials,
        capabilities=s.selection.most,
        calibration=s.calibration.seeds * s.calibration.samples * _calibrations(s, champions),
        steps=s.training_steps(),
        batch=batch,
        choosing=choosing,
        fresh=fresh,
        collections=t.collections,
        transfer=looked,
        written=s.synthesizer.kind == "llm",
        generalist=again + _shown(s, target, champions) + practice if t.generalist else 0,
        evaluation=adapters + validation + test,
        calls=least_calls(s, target),
        seconds=seconds,
    )


def _without_generalist(settings: Settings) -> Settings:
    """The settings of a round whose environments are not composed: what a model writes makes no generalist."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"generalist": 0})})


def _untrained(
    settings: Settings, most: Mapping[str, int], live: ReleaseRow | None, calls: int, seconds: float | None
) -> RoundPlan:
    """The plan where nothing can be trained: no adapter is challenged and no candidate evaluated, so what is left is
    diagnosis, and on test the base, the live release where there is one, and doing nothing."""
    evaluated = (1 if live is None else 2) * settings.evaluation.trials + 1
    return RoundPlan(
        diagnosis=most["diagnosis"] * settings.rollout.trials,
        capabilities=0, calibration=0, steps=0, batch=0, choosing=0, fresh=0,
        evaluation=evaluated * most["test"], calls=calls, seconds=seconds,
    )  # fmt: skip


def _champions(live: ReleaseRow | None) -> set[str]:
    """What a release has adapters for that a round trained: its members but for blends."""
    return {name for name, adapter in members_of(live).items() if adapter}


def _calibrations(settings: Settings, champions: Collection[str]) -> int:
    """The most times that an environment's scenarios are calibrated on: without advice and with it, by a champion and
    by the live generalist behind it, or by one that has practised and by what that practised from."""
    train = settings.train
    behind = train.carry and GENERALIST in champions and len(champions) > 1
    behind |= train.practises and GENERALIST not in champions
    return (2 if train.hints else 1) * (2 if behind else 1)


def _practice(settings: Settings, target: Target, champions: Collection[str], routed: int) -> int:
    """The most episodes with which a generalist practises that is made first: what it knows already, on `routed`
    tasks, each step with its redraws, and the choice among its checkpoints."""
    t = settings.train
    if not t.practises or GENERALIST in champions or not isinstance(target, Generators):
        return 0
    contenders = min(t.candidates, t.practice) + 1 if t.candidates > 1 and t.practice > 1 else 0
    steps = t.practice * t.groups * t.group_size * t.collections
    return routed + steps + contenders * (t.choosing + retained(t.choosing))


def _shown(settings: Settings, target: Target, champions: Collection[str]) -> int:
    """The most episodes that show a generalist what is missing: of every family. In turns where none is live."""
    t = settings.train
    if t.shows and GENERALIST not in champions:
        each = t.shown * (1 + TURNS - first_shown(t))
    else:
        each = 0 if t.demonstrations else SCENARIOS * SAMPLES
    return each * len(target.families()) if isinstance(target, Generators) else 0


def _own_tasks(target: Target, capabilities: int, most: int) -> int:
    """The most validation tasks that so many capabilities have as their own, each at most `most`: all, where the target
    does not say which families are whose."""
    if not isinstance(target, Generators):
        return capabilities * most
    return sum(sorted((min(most, n) for n in own_tasks(target).values()), reverse=True)[:capabilities])


def pace_of(store: Store, settings: Settings, target: Target | None = None) -> float | None:
    """Seconds of work an episode in the last finished round of the same target, profile and base; None without one.
    Only a round that trained says how long another takes, unless nothing of `target` can be trained."""
    trains = target is None or can_train(settings, target)
    for row in sorted(store.rows(Round, target=settings.target, state=RoundState.DONE), key=lambda r: -r.number):
        if (row.profile, row.config.get("base_model")) != (settings.profile, settings.base_model):
            continue
        frame = store.query("SELECT count(*) AS n FROM trajectories WHERE round_id = :round", round=row.id)
        worked = sum(stage.seconds or 0.0 for stage in store.rows(StageRow, round_id=row.id))
        # A round that had nothing to train says little of one that has.
        trained = any(stage.name.startswith("train:") for stage in store.rows(StageRow, round_id=row.id))
        if trained == trains and int(frame["n"].iloc[0]):
            return worked / int(frame["n"].iloc[0])
    return None


def rehearse(settings: Settings) -> list[str]:
    """A dry run, once `preflight` has passed: what would be played, where it would be stored, what it may take, and
    whether environments can be composed of the target's generators.
    It opens the registry and the store, but no round. Raises what `check_training` raises, where anything can be
    trained."""
    with open_store(settings.database_url) as store, closing(round_client(settings, store, None)) as client:
        target = target_of(settings, store, client)
        if can_train(settings, target):
            check_training(settings)
        open_registry(settings, settings.target).champions()
        live = live_release(store, settings.target)
        plan = plan_of(settings, target, pace_of(store, settings, target), live)
        tasks = {split: len(target.tasks(split)) for split in SPLITS}
        warned = [*without_effect(settings, live), *user_without_effect(settings, target)]
        if plan.trains and (said := unprovable(store, target, settings)):
            warned.append(said)
        return [
            f"target {settings.target} with {tasks}",
            f"store {store.url}",
            f"plan: {plan.text()}",
            f"limits: {limits_text(settings)}",
            *_composed(settings, without_model(target)),
            *([f"memory: {memory_text(settings, target)}"] if plan.trains else []),
            *(f"warning: {said}" for said in warned),
            *(_refused_here(settings) if plan.trains else []),
        ]


def _composed(settings: Settings, target: Target | None) -> list[str]:
    """What validation says of an environment that is composed of all families of the target, as the round would say
    only after its rollouts. No model is needed; a few seconds are."""
    if target is None or not composes(settings, target):
        return []
    guarded = GuardedTarget(target)
    families = tuple(sorted(guarded.families()))
    spec = CompositionSpec(settings.target, guarded.data_hash, GENERALIST, families, (), 0.0, seed=settings.seed)
    try:
        _, verdict = validated(ComposedEnvironment(guarded, spec), limits_of(settings.calibration))
        reasons = verdict.reasons
    except (EnvironmentFault, TargetError) as fault:
        reasons = (str(fault),)
    said = f"refused, and so may be what the round composes of them: {'; '.join(reasons)}" if reasons else "accepted"
    return [f"generators: an environment of all {len(families)} families is {said}"]


def _refused_here(settings: Settings) -> list[str]:
    """What keeps a round from starting on this machine, though not from being planned on it."""
    try:
        check_gpu(settings)
    except ConfigurationError as problem:
        return [f"a round does not start here: {problem}"]
    return []


def limits_text(settings: Settings) -> str:
    """The limits that are set, as people read them."""
    limits, dollars = settings.limits, settings.analyst.max_dollars
    held = {
        "rollouts": limits.rollouts, "tokens": limits.tokens, "hours": limits.hours, "GiB": limits.disk_gib,
        "dollars": dollars,
    }  # fmt: skip
    return ", ".join(f"{value:g} {name}" for name, value in held.items() if value) or "none"
