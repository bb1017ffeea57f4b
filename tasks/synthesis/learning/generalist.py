"""The generalist: one more adapter, which learns from everything that succeeded in the round.

The trainings of a round are its dearest part, and each of its adapters has learnt from its own alone; its calibrations
taught nothing. With `train.generalist` passes one adapter learns from the successes of all of them (`recalling.py`): at
diagnosis, in calibration, in the trainings of every capability, and where its adapters tried the diagnosis tasks, which
the router needs anyway. Nothing is played for its training but what shows it the families that hardly ever succeeded
(`show_missing`): some scenarios of each with advice, as calibration does.

With `train.demonstrations` so many conversations of every family are learnt from: what has succeeded, and for the rest
the reference solutions of new scenarios (`demonstrated.py`), for which nothing is played. With `train.shown` it learns
in turns, from what succeeded with advice (`shown.py`), and from as many solutions beside. Either way the generalist
needs no other adapter, and where none is live it is made *first* (`comes_first`): it plays the diagnosis, what it still
lacks is mined, and the trainings for that go on from it.

It goes through the same stages as the others, under this name: its environment, of all that the round trained for and
whatever else is not mastered, is validated, and says what it is measured on; it is registered, judged alone against
what is live, and offered to the router. What is unlike all that a round has seen is what an adapter for one capability
knows nothing of; the generalist has met every kind of task.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from db import GENERALIST, AdapterRow, CapabilityRow, SelectionRow, TrajectoryRow, row_id
from environments.contract import Generators, Target
from environments.synthesized.composed import ComposedEnvironment
from errors import Untrainable
from models.training.records import TrainingSettings
from tasks.measuring.lineup import champion_of, try_on_diagnosis
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id, before_practice, own_adapter, registered
from tasks.round.context import Context
from tasks.round.results import CalibrateResult, RegisterResult
from tasks.synthesis.calibration import FIGURES
from tasks.synthesis.environments import MASTERED, composed_of, composes, stored_environment
from tasks.synthesis.learning.demonstrated import demonstrations
from tasks.synthesis.learning.recalling import Learnt, learn, successes
from tasks.synthesis.learning.shown import TURNS, first_shown, show_lacking, show_missing
from tasks.synthesis.starting import trainable_champion

logger = logging.getLogger("trace")

DEFINITION = "All that the round trained for and whatever else is not mastered, learnt from what has succeeded."
LAST = "The round makes it last, of every success that it has seen."
FIRST = "The round makes it first, of successes and of reference solutions; what it lacks is trained next."


def specialists(capabilities: Sequence[str]) -> list[str]:
    """The capabilities, in order, without the generalist."""
    return [c for c in capabilities if c != GENERALIST]


def comes_first(context: Context) -> bool:
    """Whether the round makes its generalist before it looks for what is lacking: from demonstrations, where none is
    live that has learnt from them."""
    asked = context.settings.train.generalist_first
    return asked and not champion_of(context, GENERALIST) and composes(context.settings, context.target)


def beginning_of(context: Context, capability: str) -> tuple[str, str] | None:
    """Capability and adapter id of what a training for `capability` goes on from, as far as that is known before
    weights are compared (`starting.py`): its champion, else the generalist that the round has made first or, with
    `train.carry`, that is live; None: the base. A champion of another shape cannot be gone on from, and plays
    nothing that is to tell what a training would begin with."""
    if champion := trainable_champion(context, capability):
        return capability, champion
    if comes_first(context) and context.stored.found(RegisterResult, GENERALIST):
        return GENERALIST, own_adapter(context.stored, GENERALIST)
    live = trainable_champion(context, GENERALIST)
    return (GENERALIST, live) if live and context.settings.train.carry else None


def beginnings_of(context: Context, capability: str) -> list[tuple[str, str] | None]:
    """`beginning_of`, and with `train.carry` the live generalist behind a champion: what has learnt one thing may not
    even follow advice on another, where the generalist still does; and what has learnt behind a generalist that has
    practised, for the same reason."""
    first, live = beginning_of(context, capability), trainable_champion(context, GENERALIST)
    if first is not None and comes_first(context) and (before := before_practice(context.store, context.round.id)):
        return [first, (BEFORE_PRACTICE, before.id)]
    if live and context.settings.train.carry and first is not None and first[1] != live:
        return [first, (GENERALIST, live)]
    return [first]


def wanted(context: Context, selected: Sequence[str]) -> bool:
    """Whether a round that selected these capabilities makes a generalist last: of two of them, or one beside a
    generalist that is live and would else fall behind, or where it has demonstrations to learn from."""
    asked = context.settings.train.generalist and len(selected) >= max(1, _fewest(context))
    if not asked or comes_first(context):
        return False
    if not composes(context.settings, context.target):
        logger.warning("no generalist is made: environments that a model writes are not brought together in one")
        return False
    return True


def with_generalist(context: Context, selected: Sequence[str], rank: int) -> list[str]:
    """The `selected` capabilities, and the generalist where the round makes one last, of that `rank`, or has made one
    first."""
    if wanted(context, selected):
        store_generalist(context, rank)
        return [*selected, GENERALIST]
    first = comes_first(context) and context.found(RegisterResult, GENERALIST)
    return [*selected, GENERALIST] if first else list(selected)


def store_generalist(context: Context, rank: int | None) -> None:
    """Keep the generalist where capabilities are kept: selected, without figures of the rule; `rank` None: first."""
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
                reason=FIRST if rank is None else LAST,
            )
        ]
    )


def compose_generalist(
    context: Context, target: Target, success: Mapping[str, float], version: int = 1
) -> tuple[ComposedEnvironment | None, str]:
    """The environment, from the generators of `target`, of all families that the round's adapters were trained for and
    all others that what is live does not master, whatever selection made of them, or why there is none; `success` is
    that of what is live, by family."""
    parts = _parts(context)
    if len(parts) < _fewest(context):
        return None, f"{len(parts)} of the selected capabilities have an adapter: there is nothing to bring together"
    made = [stored_environment(context.store, context.round, target, c, context.keep) for c in parts]
    assert isinstance(target, Generators)
    families = {family for environment in made for family in environment.spec.families}
    families |= {family for family in target.families() if success.get(family, 0.0) < MASTERED}
    if not families:
        return None, "what is live masters every family, so that there is nothing to bring together"
    share = context.settings.calibration.retention_share
    return composed_of(target, context.round, GENERALIST, sorted(families), success, share, version), ""


def calibrated_by_parts(context: Context) -> CalibrateResult:
    """The means of its parts' figures: each of them was measured, and none of it is measured again."""
    parts = [context.result(CalibrateResult, c) for c in _parts(context)]
    figures = {name: sum(getattr(part, name) for part in parts) / max(1, len(parts)) for name in FIGURES}
    if not parts:
        return CalibrateResult(
            accepted=True, reason="accepted: no other adapter was made, and it needs none", **figures
        )
    reason = f"accepted: its {len(parts)} parts were calibrated, and these are the means of their figures"
    return CalibrateResult(accepted=True, reason=reason, **figures)


def learn_generalist(
    context: Context, environment_id: str | None, settings: TrainingSettings, name: str = GENERALIST
) -> Learnt | None:
    """The round's generalist, or under another `name` what it practises from; None where there is nothing to learn
    from. Raises `Untrainable` where all that there is does not fit the base's context."""
    train = context.settings.train
    try_on_diagnosis(context, _parts(context))
    environment = stored_environment(context.store, context.round, context.target, GENERALIST, context.keep)
    assert isinstance(environment, ComposedEnvironment)
    if not (train.shows and comes_first(context)):
        if not train.demonstrations:
            show_missing(context, environment)
        return _learnt(context, environment, environment_id, settings, name)
    latest = None
    for turn in range(1, TURNS + 1):
        of_turn = f"{GENERALIST}-{turn}"
        made = context.store.row(AdapterRow, id=adapter_id(context.round.id, of_turn))
        if made is not None and made.path:  # by a process that died since: later turns have shown more than it learnt
            latest = made
            continue
        if turn >= first_shown(train):
            show_lacking(context, environment, turn, latest)
        # What plays the next turn needs no more than to follow advice.
        half = train.recall_steps // 2
        if turn < TURNS and (taught := _learnt(context, environment, None, settings, of_turn, half)):
            context.registry.end_run(taught.run)
            latest = taught.adapter
    return _learnt(context, environment, environment_id, settings, name, beside=True)


def _learnt(
    context: Context, environment: ComposedEnvironment, environment_id: str | None, settings: TrainingSettings,
    name: str = GENERALIST, least: int | None = None, *, beside: bool = False,
) -> Learnt | None:  # fmt: skip
    """What has learnt from all that has succeeded so far, and from as many reference solutions as are owed for the
    rest, or all of them `beside` it: what succeeds with advice is the easier part of what was shown, and learnt in
    place of solutions it loses what they teach of the harder one (`benchmarks/findings/generalist.md`)."""
    train = context.settings.train
    found = successes(context)
    owed = _owed(environment, () if beside else found, train.demonstrations)
    try:
        shown = demonstrations(environment, context.base, owed)
    except Untrainable as problem:
        if not found:
            raise
        logger.warning("the generalist learns from what has succeeded alone: %s", problem)
        shown = []
    if not found and not shown:
        return None
    return learn(context, name, found, settings, train.generalist, environment_id, shown, list(owed), least)


def _owed(environment: ComposedEnvironment, found: Sequence[TrajectoryRow], count: int) -> dict[str, int]:
    """How many reference solutions of which family of the target make `count` conversations with what was `found`."""
    there = Counter(row.family for row in found)
    return {f: count - there[f] for f in sorted(environment.generators.families()) if there[f] < count}


def _parts(context: Context) -> list[str]:
    """The round's other capabilities with an adapter; none yet where the generalist comes first."""
    return [] if comes_first(context) else specialists(registered(context.stored))


def _fewest(context: Context) -> int:
    """Adapters of capabilities without which there is nothing to bring together."""
    if context.settings.train.demonstrations or comes_first(context):
        return 0
    return 1 if champion_of(context, GENERALIST) else 2
