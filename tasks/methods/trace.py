"""TRACE's own round as a method, and its placebos.

`trace` is the round up to the gate: what is promoted answers. `placebo-capabilities` is the same round, its generalist
among it, on capabilities drawn at random among those that were not selected; `placebo-rewards` on the selected ones,
with the advantages of each group dealt out at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from db import GENERALIST, ReplyRow
from environments.contract import Drawable, Generators
from errors import EpisodesSpent
from settings import Settings
from tasks.contrast import contrast
from tasks.measuring.gate_plan import noop_tasks
from tasks.measuring.lineup import lineup_of
from tasks.methods.seed.answers import Answer
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun, find_lacking
from tasks.mining.labelling import STAGE as NAMING
from tasks.releases.lookup import release_numbered
from tasks.round.adapters import before_practice, registered
from tasks.round.context import Context
from tasks.round.results import (
    CalibrateResult,
    ChallengeResult,
    GateResult,
    RegisterResult,
    SelectResult,
    SynthesizeResult,
    TrainResult,
)
from tasks.round.stage import Stage, stage
from tasks.synthesis.choosing import retained
from tasks.synthesis.environments import families_of
from tasks.synthesis.learning import generalist
from tasks.synthesis.learning.generalist import specialists
from tasks.synthesis.starting import MOST, training_order


def trace(run: SeedRun, context: Context, account: Account) -> Answer:
    """TRACE as it is run every night, from the bare base."""
    return play_round(run, context, account)


def placebo_capabilities(run: SeedRun, context: Context, account: Account) -> Answer:
    """The round on as many other capabilities, which the rule did not select. What a language model has said of the
    seed's diagnosis is lent, as its episodes are: asked again it would name others, the selected ones among them."""
    chosen = find_lacking(run.context)
    context.store.put(run.context.store.rows(ReplyRow))
    named = [c.store.spent(c.round.id, stage=NAMING)["dollars"] for c in (run.context, context)]

    @stage("select", title="draw capabilities that were not selected")
    def draw(context: Context) -> SelectResult:
        pool = [c for c in contrast.do(context).candidates if c not in chosen]
        if isinstance(context.target, Generators) and context.settings.synthesizer.kind == "generators":
            tags = {tag for needs in context.target.families().values() for tag in needs}
            pool = [c for c in pool if c in tags]
        count = min(len(specialists(chosen)), len(pool))
        drawn = random.Random(f"placebo:{context.seed}").sample(sorted(pool), count)
        return SelectResult(selected=generalist.with_generalist(context, drawn, rank=count))

    answer = play_round(run, context, account, draw)
    drawn = specialists(_selected(context))
    notes = (f"capabilities drawn: {', '.join(drawn) or 'there was none to draw'}", *answer.notes)
    return replace(answer, notes=notes, shared_dollars=max(0.0, named[0] - named[1]))


def play_round(
    run: SeedRun, context: Context, account: Account, instead: Stage[[], SelectResult] | None = None
) -> Answer:
    """The round from its diagnosis on; what answers after the gate. Where the budget ends before the gate, nothing was
    proven, and the bare base answers. A stage `instead` of `select` is done as soon as the round has mined."""
    account.share = lambda left: for_next_training(context, _selected(context), left)
    account.proof = lambda: after_routing(context) if context.found(ChallengeResult) else account.episodes
    notes = []
    try:
        if instead is not None:
            run.play_round(context, contrast.name)
            instead.do(context)
        run.play_round(context)
    except EpisodesSpent as problem:
        notes.append(f"the budget ended before the gate: {problem}")
    for capability in _selected(context):
        training = context.found(TrainResult, capability)
        if training and training.ending == "budget":
            notes.append(f"training for {capability} ended with the budget, after {training.steps} steps")
        if training and training.unkept:
            notes.append(f"nothing of what {capability} has practised is kept: {training.unkept}")
    if context.found(SelectResult) is None:
        return Answer(context, notes=(*notes, "nothing was selected, so the bare base answers"))
    trained = _practised(context)
    gated = context.found(GateResult)
    if gated is None or not gated.release:
        return Answer(context, notes=(*notes, "nothing was promoted, so the bare base answers"), trained=trained)
    lineup = lineup_of(context, release_numbered(context.store, context.round.target, gated.release))
    order = sorted(_selected(context), key=lambda c: c == GENERALIST and generalist.comes_first(context), reverse=True)
    nested = tuple(c for c in order if c in lineup.members)
    return Answer(context, lineup, notes=tuple(notes), nested=nested, trained=trained)


def _selected(context: Context) -> list[str]:
    """What the round has selected; nothing before that is done."""
    found = context.found(SelectResult)
    return found.selected if found else []


def _practised(context: Context) -> tuple[str, ...]:
    """The capabilities whose adapters are registered, and all those that the generalist has practised with them."""
    trained, target = registered(context.stored), context.target
    if GENERALIST in trained and isinstance(target, Generators):
        needs = target.families()
        practised = {c for family in families_of(context, GENERALIST) for c in needs[family]}
        trained = [*trained, *sorted(practised - set(trained))]
    return tuple(trained)


def after_training(context: Context, selected: list[str]) -> int:
    """The most episodes that a round needs from here on beside its trainings' own: to choose and measure adapters on
    fresh seeds, and to prove them on validation. What has fallen out needs none, and what is trained is chosen."""
    tasks, capabilities = context.tasks("validation"), _still_in(context, selected)
    settings, diagnosis, draws = context.settings, len(context.tasks("diagnosis")), isinstance(context.target, Drawable)
    if not selected and generalist.comes_first(context) and context.found(SelectResult) is None:
        # What it is shown and practises with leaves over what the smallest round still needs, which has played the
        # diagnosis, and once there is something that practises, its practice's part of it.
        begun = _has_begun_to_practise(context)
        played = diagnosis * settings.rollout.trials + begun * practice_start(settings, diagnosis)
        return least_episodes(settings, diagnosis, len(tasks), draws) - played
    trained = sum(context.found(TrainResult, c) is not None for c in capabilities)
    # A generalist that came first has played the diagnosis already: that is what was mined.
    first = GENERALIST in capabilities and generalist.comes_first(context)
    played = int(first and context.found(TrainResult, GENERALIST) is not None)
    families = {c: _own_families(context, c) for c in specialists(capabilities)}
    if GENERALIST in capabilities:  # it may be about every family, and no checkpoint of it is chosen
        families[GENERALIST] = sorted({t.family for t in tasks})
        trained += context.found(TrainResult, GENERALIST) is None
    own = [(sum(t.family in mine for t in tasks), len(mine)) if mine else (len(tasks), 0) for mine in families.values()]
    return proof_episodes(settings, diagnosis, len(tasks), own, draws, trained, played)


def _has_begun_to_practise(context: Context) -> bool:
    """Whether there is something that practises, and nothing is selected for which more would be trained."""
    return context.found(SelectResult) is None and before_practice(context.store, context.round.id) is not None


def after_routing(context: Context) -> int:
    """The most episodes that a round needs once its router is fitted: the candidate on validation and on the further
    tasks that were drawn, and doing nothing."""
    tasks, trials = len(context.tasks("validation")), context.settings.evaluation.validation_trials
    further = sum(context.result(ChallengeResult).further.values())
    return (tasks + further) * trials + noop_tasks(tasks)


def _own_families(context: Context, capability: str) -> Sequence[str]:
    """The families of a capability's environment; while it waits for the place of another and has none yet, those that
    the target says need it, and none where that is not known."""
    if context.found(SynthesizeResult, capability):
        return families_of(context, capability)
    needs = context.target.families() if isinstance(context.target, Generators) else {}
    return [family for family, needed in needs.items() if capability in needed]


def for_next_training(context: Context, selected: list[str], left: int) -> int:
    """What the training that begins may take of all that is `left`: its share of what is not needed after all
    trainings (`share_of`). Where that fills no batch of each that waits, the last of them give way, and so does what
    they would need to be proven: better one that is trained than several that are not. What practises has a batch at
    least: the smallest round has one among it, which is not kept from it for what comes after."""
    train, still = context.settings.train, _still_in(context, selected)
    batch = train.groups * train.group_size
    while True:
        waiting, free = _waiting(context, still), left - after_training(context, still)
        if len(waiting) < 2 or free >= len(waiting) * batch:
            least = batch if free >= 0 and not selected and _has_begun_to_practise(context) else 0
            return share_of(context, still, max(least, free))
        still.remove(waiting[-1])


def share_of(context: Context, selected: list[str], left: int) -> int:
    """What the training that begins may take of the episodes that are `left` for trainings: as much as each after it.
    What it does not use is theirs, and at last what shows the generalist what is missing. Where not every one can fill
    a batch of groups, the first may."""
    train = context.settings.train
    waiting = _waiting(context, _still_in(context, selected))
    filled = len(waiting[: left // (train.groups * train.group_size)])
    return left // filled if filled else left


def _waiting(context: Context, still: list[str]) -> list[str]:
    """Those whose training has not ended, in the order in which they are trained, as far as that is known."""
    waiting = [c for c in specialists(still) if context.found(TrainResult, c) is None]
    return training_order(context, waiting) if all(context.found(CalibrateResult, c) for c in waiting) else waiting


def _still_in(context: Context, selected: list[str]) -> list[str]:
    """The capabilities of `selected` that have not fallen out, as many as a round trains, and the generalist."""
    still = [c for c in selected if not _fell_out(context, c)]
    return [*specialists(still)[: context.settings.selection.most], *(c for c in still if c == GENERALIST)]


def _fell_out(context: Context, capability: str) -> bool:
    """Whether a capability's environment was refused, or its calibration, training or measuring did not go on."""
    kinds = (SynthesizeResult, CalibrateResult, TrainResult, RegisterResult)
    found = (context.found(kind, capability) for kind in kinds)
    return any(result is not None and not result.goes_on for result in found)


def proof_episodes(
    settings: Settings,
    diagnosis: int,
    tasks: int,
    own: list[tuple[int, int]],
    draws: bool,
    trained: int = 0,
    played: int = 0,
) -> int:
    """The most episodes from choosing a checkpoint to the gate, for capabilities with `own` validation tasks of `tasks`
    in all, each with the number of its families (0: not known); each plays `diagnosis` tasks for the router, or those
    of them that it has to. `draws` says whether further tasks can be drawn, `trained` of how many the checkpoint is
    chosen already, and `played` how many have played the diagnosis already. What settles whether a family fell is not
    among them: it has what is left, and the gate decides without it."""
    e, trials, n = settings.evaluation, settings.evaluation.validation_trials, len(own)
    if not n:
        return 0
    chosen = (n - trained) * choosing_episodes(settings)
    starting = starting_episodes(settings, n) - starting_episodes(settings, trained)
    measured = chosen + starting + n * 2 * e.fresh
    live, alone, tried = tasks * trials, sum(mine for mine, _ in own) * trials, (n - played) * e.routed(diagnosis)
    routed, noop = tasks * trials, noop_tasks(tasks)
    # As many of each family of a capability that has too few (`tasks/challenge.py`), each played on three sides.
    short = [f * math.ceil(max(0, e.own_tasks - mine) / f) if f else e.own_tasks for mine, f in own]
    further = 3 * sum(short) * trials if draws else 0
    return measured + live + alone + tried + routed + noop + further


def choosing_episodes(settings: Settings) -> int:
    """The most episodes on which one training's checkpoint is chosen: its start and the candidates, on own scenarios
    and half as many for retention."""
    return (settings.train.candidates + 1) * _tried_on(settings)


def starting_episodes(settings: Settings, capabilities: int) -> int:
    """The most episodes on which trainings, the first from the bare base, choose what they begin from: the base and the
    adapters before each."""
    if not settings.train.carries:
        return 0
    more = int(settings.train.practises)  # what the generalist practised from is one of them
    return sum(min(before + more, MOST) + 1 for before in range(1, capabilities)) * _tried_on(settings)


def practice_start(settings: Settings, diagnosis: int) -> int:
    """The episodes of `diagnosis` tasks that say what a generalist practises most."""
    return settings.evaluation.routed(diagnosis) if settings.train.practises else 0


def _tried_on(settings: Settings) -> int:
    """Fresh scenarios that weights are tried on: own ones and half as many for retention."""
    own = settings.train.choosing
    return own + retained(own)


def least_episodes(settings: Settings, diagnosis: int, validation: int, draws: bool) -> int:
    """The fewest episodes with which a round can train one capability for one step and prove it; a generalist that
    comes first plays the diagnosis once more, practises for one step, where it practises, and is proven beside it."""
    train, first = settings.train, int(settings.train.generalist_first)
    practice = practice_start(settings, diagnosis)
    if practice:
        practice += train.groups * train.group_size + choosing_episodes(settings)
    return (
        diagnosis * settings.rollout.trials * (1 + first)
        + settings.calibration.seeds * settings.calibration.samples
        + train.groups * train.group_size
        + practice
        + proof_episodes(settings, diagnosis, validation, [(validation, 0)] * (1 + first), draws, first, first)
    )
