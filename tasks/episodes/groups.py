"""Which of a round's episodes are shown, in groups that are read side by side: the groups of each training, what
diagnosis found, and the test split before and after.

What is chosen is bounded whatever the round's size, spread evenly over it, and the same each time it is chosen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from db import AdapterRow, CapabilityRow, LabelRow, SelectionRow, Store
from environments.picking import in_turn
from models.training.records import step_seed
from tasks.episodes.shown import Hide, ShownEpisode, evenly, shown_episode
from tasks.mining.labels import LACKING
from tasks.round.results import EvaluateResult, RolloutResult, TestResult
from tasks.round.rollouts import round_seed
from tasks.round.stored import StoredRound

# Groups of one page, episodes of one group, and of a diagnosis page the failures that are shown for each capability.
MOST_GROUPS, MOST_EPISODES, MOST_EVIDENCE = 24, 8, 4
_COLUMNS = ["id", "task_id", "family", "seed", "trial", "reward", "success", "group_id"]


class Outcome(StrEnum):
    """What a group's episodes came to; the last four where two sides are compared."""

    ALL = "all succeeded"
    MIXED = "some succeeded"
    NONE = "none succeeded"
    LOST = "lost to errors"
    WON = "newly solved"
    FELL = "no longer solved"
    BOTH = "solved by both"
    NEITHER = "solved by neither"


@dataclass(frozen=True)
class Group:
    """Episodes that are read side by side. `title` is the task, `place` where in the round it stands (such as
    `step 2`), `left_out` how many of its episodes are not shown. `outcome` and the `mean` reward are of all of
    them, or in a training of those without advice."""

    key: str
    title: str
    place: str
    family: str
    outcome: Outcome
    episodes: tuple[ShownEpisode, ...]
    left_out: int = 0
    mean: float | None = None
    step: int = 0


@dataclass(frozen=True)
class Groups:
    """The groups of a page, and how many groups there are in all."""

    groups: tuple[Group, ...] = ()
    total: int = 0

    @property
    def left_out(self) -> int:
        """Groups that are not shown."""
        return self.total - len(self.groups)


def training_groups(
    store: Store, round_id: str, adapter: str, hide: Hide, most: int = MOST_GROUPS, each: int = MOST_EPISODES
) -> Groups:
    """The GRPO groups of an adapter's training, in the order of its steps (from 1). At most `most` groups, and of each
    at most `each` episodes, from the least rewarded to the most."""
    frame = store.trajectory_frame(round_id, purpose="training", adapter_id=adapter, columns=_COLUMNS)
    if frame.empty:
        return Groups()
    # The least seed that is stored may be a later step's: what calibration has played can fill the first.
    first = step_seed(_seed_of(store, round_id, adapter), 0)
    # Trials are numbered through a step, so a task that was drawn twice in it has groups of its own.
    nth = frame["trial"] // _size_of(store, round_id, adapter, frame["trial"])
    groups = []
    drawn: Counter[tuple[int, str]] = Counter()
    for (seed, task, _), part in frame.groupby(["seed", "task_id", nth]):
        step = int(seed) - first + 1
        drawn[step, task] += 1
        at = f"s{step}" if drawn[step, task] == 1 else f"s{step}.{drawn[step, task]}"
        groups.append((f"{at}-{task}", step, str(task), part))
    chosen = [groups[i] for i in evenly(len(groups), most)]
    rows = _read(store, (i for *_, part in chosen for i in _spread(part, each)))
    shown_groups = []
    for key, step, task, part in chosen:
        plain = part[part["group_id"].isna()]  # what was played with advice is in no figure
        shown = [rows[i] for i in _spread(part, each)]
        shown_groups.append(
            Group(
                key=key,
                title=task,
                place=f"step {step}",
                family=str(part["family"].iloc[0]),
                outcome=_outcome(plain["success"]),
                episodes=tuple(
                    shown_episode(r, hide, note="with advice" if r.group_id else "")
                    for r in sorted(shown, key=lambda r: r.trial)
                ),
                left_out=len(part) - len(shown),
                mean=_mean(plain["reward"]),
                step=step,
            )
        )
    return Groups(tuple(shown_groups), len(groups))


def diagnosis_groups(stored: StoredRound, hide: Hide, most: int = MOST_GROUPS) -> Groups:
    """Diagnosis tasks with all their trials: the evidence of each selected capability first, then others of every
    family in turn. An episode's note says what its labels call lacking."""
    rolled = stored.diagnosis() if stored.found(RolloutResult) else None
    if rolled is None or not rolled.trajectories:
        return Groups()
    frame = stored.store.trajectory_frame(None, id=rolled.trajectories, columns=_COLUMNS)
    tasks = {str(task): part.sort_values("trial") for task, part in frame.groupby("task_id")}
    of_evidence = {str(i): str(t) for i, t in zip(frame["id"], frame["task_id"], strict=True)}
    wanted = [of_evidence[i] for i in _evidence(stored) if i in of_evidence]
    by_family: dict[str, list[str]] = defaultdict(list)
    for task, part in tasks.items():
        by_family[str(part["family"].iloc[0])].append(task)
    names = list(dict.fromkeys([*wanted, *in_turn(by_family.values())]))[:most]
    ids = [i for name in names for i in tasks[name]["id"].head(MOST_EPISODES)]
    rows, lacking = _read(stored.store, ids), _lacking(stored, ids)
    shown_groups = []
    for name in names:
        part = tasks[name]
        episodes = [
            shown_episode(rows[i], hide, note=f"lacks {', '.join(lacking[i])}" if lacking.get(i) else "")
            for i in part["id"].head(MOST_EPISODES)
        ]
        shown_groups.append(
            Group(
                key=f"d-{name}",
                title=name,
                place="diagnosis",
                family=str(part["family"].iloc[0]),
                outcome=_outcome(part["success"]),
                episodes=tuple(episodes),
                left_out=len(part) - len(episodes),
                mean=_mean(part["reward"]),
            )
        )
    return Groups(tuple(shown_groups), len(tasks))


def compared_groups(stored: StoredRound, hide: Hide, most: int = MOST_GROUPS) -> Groups:
    """Episodes of the test split, one trial of one task each: the bare base, what was live before, and what is live
    after. What changed comes first, and every family in turn."""
    tested = stored.found(TestResult)
    if tested is None or not tested.routed_ids:
        return Groups()
    sides = _sides(tested)
    pairs: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    frame = stored.store.trajectory_frame(None, id=sorted({i for ids in sides.values() for i in ids}), columns=_COLUMNS)
    by_id = {r.id: r for r in frame.itertuples()}
    for side, ids in sides.items():
        for i in ids:
            if i in by_id:
                pairs[str(by_id[i].task_id), int(by_id[i].trial)][side] = by_id[i]
    # Of sides that are one the episodes are the same: then nothing is newly solved, whatever the bare base did.
    before = _shown_as(sides, tested.live_ids or tested.base_ids)
    two = before, _shown_as(sides, tested.routed_ids)
    outcomes = {pair: _compared(episodes, two) for pair, episodes in pairs.items()}
    by_outcome = {
        outcome: in_turn(_by_family({p: f for p, f in pairs.items() if outcomes[p] is outcome}).values())
        for outcome in Outcome
    }
    changed = [*by_outcome[Outcome.FELL], *by_outcome[Outcome.WON]]
    same = in_turn([by_outcome[Outcome.NEITHER], by_outcome[Outcome.BOTH], by_outcome[Outcome.LOST]])
    # What changed may fill most of the page, what did not the rest.
    chosen = changed[: max(most - len(same), most - most // 4)]
    chosen += same[: most - len(chosen)]
    rows = _read(stored.store, {pairs[p][side].id for p in chosen for side in pairs[p]})
    shown_groups = [
        Group(
            key=f"t-{task}-{trial}",
            title=task,
            place=f"trial {trial + 1}",
            family=str(next(iter(pairs[task, trial].values())).family),
            outcome=outcomes[task, trial],
            episodes=tuple(
                shown_episode(rows[pairs[task, trial][side].id], hide, side)
                for side in sides
                if side in pairs[task, trial]
            ),
        )
        for task, trial in chosen
    ]
    return Groups(tuple(shown_groups), len(pairs))


def _seed_of(store: Store, round_id: str, adapter: str) -> int:
    """The seed of an adapter's training: as its row has it, or else as every training of its round has it: the row of a
    generalist whose practice was not kept tells of what it had learnt before."""
    row, at = store.row(AdapterRow, id=adapter), store.round(round_id)
    return int(row.config["seed"]) if row and "seed" in row.config else round_seed(at.seed, at.number)


def _size_of(store: Store, round_id: str, adapter: str, trials: pd.Series) -> int:
    """How many episodes a group of an adapter's training has: as its row has it, or else as its round's settings. Where
    neither does, all of these trials are of one group."""
    row = store.row(AdapterRow, id=adapter)
    told = (row.config if row else {}), store.round(round_id).config.get("train") or {}
    return next((int(t["group_size"]) for t in told if t.get("group_size")), int(trials.max()) + 1)


def _sides(tested: EvaluateResult) -> dict[str, list[str]]:
    """What played the test split, each once: what was live before may be the base, and what is live after, that."""
    names = {"base": "bare base", "live": "live before", "routed": "live after"}
    found: dict[str, list[str]] = {}
    for side, name in names.items():
        ids = tested.sides()[side]
        if ids and ids not in found.values():
            found[name] = ids
    return found


def _shown_as(sides: Mapping[str, list[str]], ids: list[str]) -> str:
    """The side that shows these episodes; "" where none does."""
    return next((side for side, shown in sides.items() if shown == ids), "")


def _compared(sides: Mapping[str, Any], two: Sequence[str]) -> Outcome:
    """How the second of two sides did against the first."""
    won = [None if side not in sides or pd.isna(sides[side].success) else bool(sides[side].success) for side in two]
    if None in won:
        return Outcome.LOST
    before, after = won[0], won[-1]
    if after == before:
        return Outcome.BOTH if after else Outcome.NEITHER
    return Outcome.WON if after else Outcome.FELL


def _outcome(success: Any) -> Outcome:
    known = success.dropna()
    if known.empty:
        return Outcome.LOST
    return Outcome.ALL if known.all() else Outcome.MIXED if known.any() else Outcome.NONE


def _mean(reward: Any) -> float | None:
    known = reward.dropna()
    return None if known.empty else round(float(known.mean()), 4)


def _spread(part: Any, most: int) -> list[str]:
    """Ids of a group's episodes, at most so many, evenly from the least rewarded to the most."""
    ordered = part.sort_values(["reward", "trial"])["id"].tolist()
    return [str(ordered[i]) for i in evenly(len(ordered), most)]


def _evidence(stored: StoredRound) -> list[str]:
    """Trajectories that the selected capabilities were found by, in order of selection."""
    chosen = stored.store.rows(SelectionRow, round_id=stored.round.id, selected=True)
    return [str(e["id"]) for row in sorted(chosen, key=lambda r: r.rank or 0) for e in row.evidence[:MOST_EVIDENCE]]


def _lacking(stored: StoredRound, ids: Sequence[str]) -> dict[str, list[str]]:
    """Capabilities that most labelling runs call lacking, by trajectory."""
    names = {r.id: r.name for r in stored.store.rows(CapabilityRow, round_id=stored.round.id)}
    votes: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    for label in stored.store.rows(LabelRow, round_id=stored.round.id, trajectory_id=list(ids)):
        pair = label.trajectory_id, names[label.capability_id]
        runs[pair] += 1
        votes[pair] += label.label == LACKING
    found: dict[str, list[str]] = defaultdict(list)
    for (trajectory, name), count in sorted(votes.items()):
        if 2 * count > runs[trajectory, name]:
            found[trajectory].append(name)
    return found


def _by_family(pairs: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for pair, sides in sorted(pairs.items()):
        found[str(next(iter(sides.values())).family)].append(pair)
    return found


def _read(store: Store, ids: Iterable[str]) -> dict[str, Any]:
    """Whole trajectories by id."""
    return {row.id: row for row in store.trajectories(id=list(ids))}
