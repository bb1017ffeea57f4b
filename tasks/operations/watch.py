"""The daily watch: does what is live still beat what it replaced? (`trace-agent watch`, deployment `watch`.)

Live release, its parent and the bare base play the same fresh tasks with the same seeds (a target that can draw gives
tasks that no round had; a finite one its validation tasks with the day's seeds). What users said of conversations is
compared as well, where the gateway's log has feedback on both releases: those are not the same conversations, so that
difference may have other reasons than the release.

A look a day at one release: the n-th day may spend alpha x 6 / (pi n)^2, half of it on traffic where there is any, so
that all looks together call a release that is as good as its parent worse with a probability of alpha at most. A day's
episodes are stored: a second run on the same day plays nothing and says the same of them. What users have said since it
looks at again at the same level, so whoever asks often on a day spends more than alpha there.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pandas import isna
from scipy.stats import fisher_exact

from db import DrawnTaskRow, ReleaseRow, ReleaseState, Store, open_store
from db.values.types import utc_now
from environments.contract import Draw, Drawable, Environment, Target, TargetTask
from environments.picking import spread
from errors import AdapterError, BudgetExceeded, ConfigurationError, EpisodesLost, StoreError, TargetError
from models.providers.client import ModelClient
from models.providers.spending import OF_WATCH, SpendingCap
from models.router.router import ASKED
from settings import Settings
from tasks.measuring.comparison import compare
from tasks.measuring.evaluation import EVALUATION, EvaluationSpec, run_evaluation
from tasks.measuring.falls import judge_lost
from tasks.measuring.gate_plan import GateRules, alpha_at, p_phrase
from tasks.measuring.outcomes import Outcomes, outcomes_of
from tasks.measuring.policy_names import PolicyOptions, load_policy, parse_policy
from tasks.measuring.statistics import PairedDifference
from tasks.releases.lifecycle import live_release, rollback
from tasks.releases.lookup import Basis, stored_release
from tasks.round.analyst import analyst_settings, target_of
from tasks.round.registry import open_registry
from tasks.unattended.notices import Notice, notify

# Draws of the watch; rounds are numbered far below.
FIRST_DRAW = 1_000_000_000
BASE = "the bare base"


@dataclass(frozen=True)
class Fall:
    """The live release against another side: `points` of difference in success (below 0: a fall; None: both finished
    no task) and its p-value, on `seen` tasks or conversations. `significant` at the day's level. `unclear`: the live
    release lost so many more tasks to errors that a fall cannot be excluded, for they may be the ones that it fails."""

    against: str
    what: str
    points: float | None
    p: float
    seen: str
    significant: bool = False
    unclear: bool = False

    def text(self) -> str:
        """The comparison as people read it."""
        if self.points is None:
            return f"nothing to compare with {self.against} on {self.seen}"
        return f"{self.points:+.1f} points against {self.against} on {self.seen} ({p_phrase(self.p, 4)})"


@dataclass(frozen=True)
class Watched:
    """What a watch found. `release` 0: nothing is live. `rolled_back` says where to, "" where it was not."""

    target: str
    release: int
    reason: str
    comparisons: tuple[Fall, ...] = ()
    rolled_back: str = ""

    @property
    def falls(self) -> list[Fall]:
        """What is significantly worse."""
        return [c for c in self.comparisons if c.significant]

    @property
    def losses(self) -> list[Fall]:
        """What says nothing of a fall, for want of episodes of the live release."""
        return [c for c in self.comparisons if c.unclear]


class FreshTasks:
    """The target with tasks of the watch's own as its validation split."""

    def __init__(self, target: Target, tasks: Sequence[TargetTask]) -> None:
        self._target, self._tasks = target, tasks
        self.name, self.licence, self.data_hash = target.name, target.licence, target.data_hash

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The watch's tasks, whatever the split."""
        return self._tasks

    def environment(self) -> Environment:
        """The target's own."""
        return self._target.environment()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def watch_release(settings: Settings, now: datetime | None = None) -> Watched:
    """Compare what is live with what it replaced, tell of a fall, and roll back where the settings want it. Raises
    `BudgetExceeded` and `ConfigurationError` where a simulated user cannot be asked on, and `EpisodesLost` where too
    much was lost to errors to say anything."""
    now = now or utc_now()
    with open_store(settings.database_url) as store:
        live = live_release(store, settings.target)
        if live is None:
            return Watched(settings.target, 0, "the bare base answers: there is nothing to watch")
        client = ModelClient(SpendingCap(analyst_settings(settings).limits, refusal=OF_WATCH))
        with closing(client):
            target = target_of(settings, store, client)
            if target.data_hash != live.data_hash:
                why = f"release {live.number} was proven on data {live.data_hash}, the target has {target.data_hash}"
                _tell(settings, "fell", f"{settings.target} cannot be watched: {why}; run the next round")
                return Watched(settings.target, live.number, why)
            traffic = _on_traffic(settings, store, live)
            found = [*_on_tasks(settings, store, live, target, client, now), *traffic]
        level = level_of(settings, live, now) / (2 if traffic else 1)
        judged = tuple(replace(fall, significant=(fall.points or 0) < 0 and fall.p < level) for fall in found)
        watched = Watched(settings.target, live.number, "", judged)
        return _act(settings, store, live, watched)


def watch_text(watched: Watched) -> str:
    """What a watch found, in Markdown."""
    head = f"**release {watched.release} of {watched.target}**" if watched.release else f"**{watched.target}**"
    if watched.reason:
        return f"{head}: {watched.reason}"
    marks = {c: "significantly worse: " if c.significant else "unclear: " for c in [*watched.falls, *watched.losses]}
    lines = [f"- {marks.get(c, '')}{c.text()}" for c in watched.comparisons]
    if watched.rolled_back:
        lines.append(f"- rolled back: {watched.rolled_back} answers again")
    found = "a fall cannot be excluded" if watched.losses else "no significant fall"
    return "\n".join([f"{head}: {'it has fallen' if watched.falls else found}", "", *lines])


def level_of(settings: Settings, live: ReleaseRow, now: datetime) -> float:
    """What today's look may spend: the dates (UTC) since the release became live count the looks."""
    since = _aware(live.live_at or live.created_at)
    days = now.astimezone(UTC).date().toordinal() - since.astimezone(UTC).date().toordinal()
    return alpha_at(1 + max(0, days), settings.evaluation.alpha)


def parent_of(store: Store, live: ReleaseRow) -> ReleaseRow | None:
    """The release that the live one replaced, where the two can be compared."""
    if live.parent_id is None:
        return None
    parent = stored_release(store, live.parent_id)
    return parent if Basis.of(parent) == Basis.of(live) else None


def fresh_tasks(settings: Settings, target: Target, day: int, used: AbstractSet[str] = frozenset()) -> list[TargetTask]:
    """The watch's tasks of a day: drawn, without the contents that rounds have used, or the validation split's, at
    equal distances."""
    if isinstance(target, Drawable):
        tasks = list(target.drawn("validation", Draw(settings.seed, FIRST_DRAW + day, frozenset(used))))
    else:
        tasks = list(target.tasks("validation"))
    if not tasks:
        raise TargetError(f"target {target.name!r} has no validation task to watch a release on; take another target")
    return spread(tasks, settings.unattended.watch_tasks)


def _on_tasks(
    settings: Settings, store: Store, live: ReleaseRow, target: Target, client: ModelClient, now: datetime
) -> list[Fall]:
    """The live release against parent and base on the day's tasks."""
    day = now.astimezone(UTC).date().toordinal()
    drawn = store.rows(DrawnTaskRow, target=settings.target, data_hash=target.data_hash)
    watched: Any = FreshTasks(target, fresh_tasks(settings, target, day, {row.content for row in drawn}))
    spec = EvaluationSpec(watched, settings.target, "validation", 1, FIRST_DRAW + day)
    parent = parent_of(store, live)
    sides = {"live": f"release@{live.number}", BASE: f"local:{settings.base_model}"}
    if parent is not None:
        sides[f"release {parent.number}"] = f"release@{parent.number}"
    played, lost = {}, {}
    for side, name in sides.items():
        loaded = load_policy(parse_policy(name), PolicyOptions(), settings, watched, client)
        try:
            run = run_evaluation(store, spec, loaded, client.cap)
        finally:
            loaded.close()
        # What was not played for want of money, or of a key, no side has lost.
        if run.stopped_by in EVALUATION.fatal:
            raise (BudgetExceeded if run.stopped_by == BudgetExceeded.boundary else ConfigurationError)(run.stopped)
        played[side] = outcomes_of(store, run.id, settings.target)
        lost[side] = len(run.ids) - len(store.stored_ids(run.ids))
    rules, tasks = GateRules(margin=settings.evaluation.margin), len(spec.tasks)
    found = []
    for side in sides:
        if side == "live":
            continue
        mine, theirs = lost["live"], lost[side]
        d = _difference(played[side], played["live"])
        # First: a release that lost every task has no difference, and may have fallen all the more.
        unclear = judge_lost("", (theirs, mine), tasks, rules).blocks
        if not unclear and (d is None or 2 * max(mine, theirs) > tasks):
            most = side if theirs > mine else "the live release"
            raise EpisodesLost(
                f"{max(mine, theirs)} of {tasks} fresh tasks were lost to errors with {most}, and the others "
                "say too little; see what they were lost to (docs/2-database.md, question 3), then watch again"
            )
        seen = f"{0 if d is None else d.tasks} fresh tasks"
        seen += f", without {mine} lost to errors ({side}: {theirs})" if mine or theirs else ""
        points, p = (None, 1.0) if d is None else (d.points, d.p)
        found.append(Fall(side, "fresh tasks", points, p, seen, unclear=unclear))
    return found


def _difference(other: Outcomes, live: Outcomes) -> PairedDifference | None:
    """The live release against another side on the tasks that both finished; None where there is none."""
    finished = [set(side.frame["task"][side.frame["success"].notna()]) for side in (other, live)]
    return compare(other, live).difference if finished[0] & finished[1] else None


def _on_traffic(settings: Settings, store: Store, live: ReleaseRow) -> list[Fall]:
    """What users said of the live release against what they said of its parent, or of the base before it.
    Nothing where another release came between, or this one was live before: then what came earlier is not the
    parent's alone. What a client asked of the base, or of one adapter, by its name says nothing of the release, nor
    does what another router than the release's own decided (a gateway's `--mode`), or the base answered because the
    adapter was missing. A gateway that is pinned answers with another release than the live one: a conversation counts
    for the one that answered, at the moment of its last answer (where a client gives one id to all its conversations,
    the first of them may have begun long ago), and for what was live when it began where that was not kept."""
    if not _follows_its_parent(store, live):
        return []
    since = _aware(live.live_at or live.created_at)
    parent = parent_of(store, live)
    began = _alone_since(store, live) if parent is None or parent.live_at is None else _aware(parent.live_at)
    # Not as rows: they would bring every conversation's messages.
    text = (
        "SELECT success, CASE WHEN release IS NULL THEN created_at ELSE updated_at END AS moment, release, "
        "router_version FROM conversations "
        "WHERE target = :target AND success IS NOT NULL AND mode <> :by_name AND (capability = '' OR adapter <> '')"
    )
    frame = store.query(text, target=settings.target, by_name=ASKED)
    replaced = parent.number if parent else 0
    routers = {replaced: _router_of(parent), live.number: _router_of(live)}
    said: dict[int, list[bool]] = {number: [] for number in routers}
    moments = frame["moment"].map(_moment)
    for success, at, release, router in zip(
        frame["success"], moments, frame["release"], frame["router_version"], strict=True
    ):
        by_time = live.number if at >= since else replaced
        number = by_time if isna(release) else int(release)
        if at >= began and number in routers and routers[number] in (router, None):
            said[number].append(bool(success))
    after, before = said[live.number], said[replaced]
    if not after or not before:
        return []
    counts = [[sum(side), len(side) - sum(side)] for side in (after, before)]
    p = float(fisher_exact(counts)[1])
    points = 100 * (sum(after) / len(after) - sum(before) / len(before))
    against = BASE if parent is None else f"release {parent.number}"
    seen = f"{len(after)} and {len(before)} conversations with feedback"
    return [Fall(against, "traffic", points, p, seen)]


def _router_of(release: ReleaseRow | None) -> str | None:
    """The version of the router that decides for a release, "" where none does; None where it was not kept."""
    if release is None or not release.router_path:
        return ""
    return release.router or None


def _alone_since(store: Store, live: ReleaseRow) -> datetime:
    """Since when the bare base answered until `live` did: since the last release before it ended, or ever."""
    began = datetime.min.replace(tzinfo=UTC)
    earlier = [r for r in store.rows(ReleaseRow, target=live.target) if r.id != live.id and r.live_at]
    return max((_aware(r.ended_at) for r in earlier if r.ended_at), default=began)


def _follows_its_parent(store: Store, live: ReleaseRow) -> bool:
    """Whether the live release became live once, in place of its parent."""
    times_live = [entry for entry in live.evidence.get("history", ()) if entry["state"] == ReleaseState.LIVE]
    replaced = {r.id for r in store.rows(ReleaseRow, target=live.target) if r.ended_at and r.ended_at == live.live_at}
    return len(times_live) < 2 and replaced == ({live.parent_id} if live.parent_id else set())


def _act(settings: Settings, store: Store, live: ReleaseRow, watched: Watched) -> Watched:
    """Tell of a significant fall, or of one that cannot be excluded; roll back, where the settings want it, behind what
    was replaced."""
    if not watched.falls:
        if watched.losses:
            said = "; ".join(f.text() for f in watched.losses)
            _tell(settings, "fell", f"release {live.number} of {settings.target} may have fallen: {said}")
        return watched
    text = f"release {live.number} of {settings.target} has fallen: " + "; ".join(f.text() for f in watched.falls)
    parent = parent_of(store, live)
    replaced = BASE if parent is None else f"release {parent.number}"
    behind = [f for f in watched.falls if f.against == replaced]
    if not settings.unattended.roll_back or not behind:
        hint = f"; 'trace-agent rollback --target {settings.target}' goes back" if behind else ""
        _tell(settings, "fell", text + hint)
        return watched
    try:  # the sides have played for minutes: a round or a person may have changed what is live
        registry = open_registry(settings, settings.target)
        # Where it goes back to is what it was compared with today: a release of other data cannot be.
        back = rollback(store, registry, settings.target, 0 if parent is None else None, expected=live.id)
    except (AdapterError, ConfigurationError, StoreError) as refused:  # the way back may be blocked as well
        _tell(settings, "fell", f"{text}; it was not rolled back: {refused}")
        return watched
    where = BASE if back is None else f"release {back.number}"
    _tell(settings, "rolled-back", f"{text}; {where} answers again")
    return replace(watched, rolled_back=where)


def _tell(settings: Settings, kind: Any, text: str) -> None:
    notify(settings, Notice(kind, settings.target, text))


def _moment(stored: Any) -> datetime:
    """A moment as a SELECT has it: SQLite gives the text that it keeps."""
    return _aware(datetime.fromisoformat(stored) if isinstance(stored, str) else stored)


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
