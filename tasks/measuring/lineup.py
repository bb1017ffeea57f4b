"""A lineup: the base, adapters by capability, and the router that chooses among them. It plays tasks as production
would; the live release is one, an assembled candidate another.

What the router leaves to the base is the base's own episode, and an adapter's episode is the same whichever lineup it
was chosen in: trajectories are found by what decides them, so two lineups that agree on a task share its episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from db import AdapterRow, ReleaseRow, RouteRow
from environments.contract import TargetTask
from environments.picking import spread
from errors import AdapterError, ConfigurationError
from models.adapters.loading import load_folder
from models.episodes import Episode
from models.router.first_observation import openings_by_task
from models.router.router import RouteDecision, Router
from tasks.releases.lifecycle import release_router
from tasks.round.adapters import own_adapter
from tasks.round.context import Context
from tasks.round.target_prompt import first_opening

# The purpose of the episodes that show which adapter solves what.
TRIED = "routing"


@dataclass(frozen=True)
class Lineup:
    """`members` are adapter ids by capability; without a router the base alone answers."""

    members: Mapping[str, str] = field(default_factory=dict)
    router: Router | None = None


BARE_BASE = Lineup()


def members_of(release: ReleaseRow | None) -> dict[str, str]:
    """Adapter ids by capability; none of the bare base."""
    return {} if release is None else {name: str(m["adapter_id"]) for name, m in release.members.items()}


def lineup_of(context: Context, release: ReleaseRow | None) -> Lineup:
    """What a release answers with; None is the bare base. Raises `ConfigurationError` for one of another base."""
    if release is None:
        return BARE_BASE
    mine = context.base.identity
    if (release.base, release.base_revision) != (mine.base, mine.revision):
        raise ConfigurationError(
            f"release {release.number} of {release.target} stands on {release.base} ({release.base_revision}), this "
            f"round's base is {mine.base} ({mine.revision}): its adapters do not fit. Use that base, or another home"
        )
    return Lineup(members_of(release), release_router(context.settings.folder, release, context.settings.files))


def stored_member(context: Context, capability: str, adapter_id: str) -> tuple[AdapterRow, Path]:
    """A member's row and folder. Raises `AdapterError` for one that is not stored, or whose folder is gone."""
    row = context.store.row(AdapterRow, id=adapter_id)
    if row is None or not row.path:
        raise AdapterError(
            f"the adapter {adapter_id!r} for {capability!r} is not in the store; roll back to a release without it "
            "('trace-agent history' lists them)"
        )
    folder = context.files.fetch(row.path)
    if not folder.is_dir():
        raise AdapterError(
            f"the adapter for {capability!r} should lie in {folder}, which is gone; restore the folder, or roll back "
            "to a release without it ('trace-agent history' lists them)"
        )
    return row, folder


def load_member(context: Context, capability: str, adapter_id: str) -> str:
    """Make a stored adapter usable by the round's policy; the name to sample with. Raises `AdapterError` for one that
    is not there, or whose bytes are not those that were stored."""
    row, folder = stored_member(context, capability, adapter_id)
    return load_folder(context.policy, folder, capability, row.round_id, row.sha256)


@contextmanager
def held(context: Context, name: str | None) -> Iterator[str | None]:
    """An adapter that was loaded to be sampled with for a while (None: the base): it is unloaded at the end of the
    block, however that ends."""
    try:
        yield name
    finally:
        if name is not None:
            context.policy.unload_adapter(name)


def champion_of(context: Context, capability: str) -> str | None:
    """Id of the adapter that the round would train on: the capability's in the release that it goes on from."""
    return members_of(context.parent).get(capability)


@dataclass(frozen=True)
class Played:
    """Trajectory ids, in the order of tasks and trials, and the capability whose adapter acted by task ("": base)."""

    ids: list[str]
    acted: Mapping[str, str]


@dataclass(frozen=True)
class Trials:
    """Episodes that are owed: `each` trials of every one of some tasks, from trial `first` on; `purpose` is what they
    are stored and paid for as."""

    tasks: Sequence[TargetTask]
    each: int
    seed: int
    purpose: str = "evaluation"
    first: int = 0

    def episodes(self) -> list[Episode]:
        """In the order of tasks and trials."""
        numbers = range(self.first, self.first + self.each)
        return [Episode("", t, self.seed, k) for t in self.tasks for k in numbers]


def play_lineup(context: Context, lineup: Lineup, owed: Trials, what: str) -> Played:
    """Play what is owed with what the lineup's router chooses, and store the decisions; `what` is told meanwhile."""
    tasks, episodes = owed.tasks, owed.episodes()
    decisions = _decide(context, lineup, tasks)
    acted = {task: decision.capability for task, decision in decisions.items()}
    ids: dict[int, str] = {}
    for capability in sorted({acted.get(t.id, "") for t in tasks}):
        where = [i for i, e in enumerate(episodes) if acted.get(e.task.id, "") == capability]
        mine = [episodes[i] for i in where]
        title = f"{capability or 'base'} on {what}"
        ids |= dict(zip(where, _play_one(context, lineup, capability, mine, title, owed.purpose), strict=True))
    in_order = [ids[i] for i in range(len(episodes))]
    if lineup.router is not None:
        routed = [(i, e.task.id) for i, e in zip(in_order, episodes, strict=True) if e.task.id in decisions]
        _store_routes(context, lineup, {i: decisions[task] for i, task in routed})
    return Played(in_order, {t.id: acted.get(t.id, "") for t in tasks})


def play_alone(context: Context, capability: str, adapter_id: str, owed: Trials, what: str) -> list[str]:
    """Trajectory ids of one adapter that answers every task, whatever a router would choose."""
    alone = Lineup({capability: adapter_id})
    return _play_one(context, alone, capability, owed.episodes(), f"{capability} alone on {what}", owed.purpose)


def try_on_diagnosis(context: Context, capabilities: Sequence[str]) -> dict[str, list[str]]:
    """Have the round's new adapters of some capabilities play its diagnosis tasks once each, or `evaluation.routing` of
    them, or more where a comparison's budget would else be left over; the trajectories of each capability."""
    diagnosis, adapters = context.tasks("diagnosis"), {c: own_adapter(context.stored, c) for c in capabilities}
    most = context.settings.evaluation.routed(len(diagnosis))
    if context.budget is not None and adapters:
        paid = context.budget.for_routing(list(adapters.values()), TRIED)
        most = max(most, min(len(diagnosis), paid // len(adapters)))
    owed = Trials(spread(diagnosis, most), 1, context.seed, TRIED)
    return {c: play_alone(context, c, a, owed, "diagnosis") for c, a in adapters.items()}


def tried_on_diagnosis(context: Context, capability: str) -> list[str]:
    """Trajectory ids of what the round's adapter of a capability has played for the router."""
    adapter = own_adapter(context.stored, capability)
    return list(context.store.trajectory_frame(None, columns=["id"], adapter_id=adapter, purpose=TRIED)["id"])


def _play_one(
    context: Context, lineup: Lineup, capability: str, episodes: Sequence[Episode], what: str, purpose: str
) -> list[str]:
    ground: Any = context.ground(purpose)
    if not capability:
        return context.engine.play(ground, episodes, what)
    identity = lineup.members[capability]
    name = load_member(context, capability, identity)
    ground = replace(ground, adapter_id=identity)
    return context.engine.play(ground, [replace(e, adapter=name) for e in episodes], what)


def _decide(context: Context, lineup: Lineup, tasks: Sequence[TargetTask]) -> dict[str, RouteDecision]:
    """The router's decision by task; what is no member counts as no adapter. Empty without a router, and none for a
    task that does not open: the base has its episode, which will tell why."""
    if lineup.router is None or not tasks:
        return {}
    base = context.base
    given = openings_by_task(context.target.environment, base.renderer, tasks, first_opening(context.target)[0])
    with context.model:
        decisions = lineup.router.route(base.policy, base.renderer, list(given.values()))
    kept = [d if d.capability in lineup.members else replace(d, capability="") for d in decisions]
    return dict(zip(given, kept, strict=True))


def _store_routes(context: Context, lineup: Lineup, decisions: Mapping[str, RouteDecision]) -> None:
    """Keep the decisions, by trajectory id; of several routers that decided alike on an episode, the last one's."""
    assert lineup.router is not None
    version = lineup.router.version
    context.store.put(
        [
            RouteRow(
                trajectory_id=i,
                round_id=context.round.id,
                router_version=version,
                capability=d.capability,
                adapter_id=lineup.members.get(d.capability),
                probabilities={k or "none": v for k, v in d.probabilities.items()},
                neighbours=list(d.neighbours),
                milliseconds=d.milliseconds,
            )
            for i, d in decisions.items()
        ],
        replace=True,
    )
