"""What the router is fitted on: what the rounds have seen that trained the members.

Diagnosis tasks, by what solves them, and tasks of the training environments that an adapter solved. Every new adapter
plays the round's diagnosis tasks once for it: an adapter also solves what nobody thought that it was trained for, and
does not solve all that it was. Not here: the tasks that the gate tests, which are never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from db import AdapterRow, CapabilityRow, LabelRow, ReleaseRow
from environments.contract import Message
from environments.picking import in_turn
from models.router.first_observation import Opening, embed_openings, opening_of
from models.router.solved import UNKNOWN, best_answers
from tasks.measuring.lineup import TRIED, members_of
from tasks.mining.labels import LACKING
from tasks.round.adapters import families_about
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import first_opening
from tasks.synthesis.calibration import HINT
from tasks.synthesis.starting import START

# Tasks of its own environment that the router keeps per capability.
EXAMPLES_PER_CAPABILITY = 120


def practised(frame: pd.DataFrame, owners: Mapping[str, str], most: int) -> dict[str, str]:
    """Class by trajectory id of at most `most` tasks of its environment that an adapter succeeded at, one trajectory a
    task, of all families alike.

    `frame` has id, task_id, family and success; `owners` says which capability a family is of. Tasks of other families
    stood there for retention and are the base's ("").
    """
    solved = frame[frame["success"].fillna(False).astype(bool)].drop_duplicates("task_id").sort_values("task_id")
    by_family = [[(str(r.id), str(r.family)) for r in rows.itertuples()] for _, rows in solved.groupby("family")]
    return {identity: owners.get(family, "") for identity, family in in_turn(by_family)[:most]}


def diagnosed(frame: pd.DataFrame, labels: pd.DataFrame, capabilities: Sequence[str]) -> dict[str, str]:
    """Class by trajectory id of the diagnosis tasks, one trajectory each.

    `frame` has id, task, success and acted (the capability whose adapter answered, "" for the base); `labels`
    trajectory_id, capability, label and weight. A task with success in at least half of the trials is of what answered
    it; it is left out when that is none of `capabilities` any more. Any other belongs to the one of `capabilities` that
    the labels of its failures call lacking most often (and more often than not), else to the base ("").
    """
    solved = frame.groupby("task")["success"].mean() >= 0.5
    acted = frame.groupby("task")["acted"].first()
    known = {"", *capabilities}
    failed = frame[~frame["success"]].set_index("id")["task"]
    given = labels[labels["trajectory_id"].isin(failed.index) & labels["capability"].isin(capabilities)]
    votes = given["weight"].where(given["label"] == LACKING, -given["weight"])
    tasks = given["trajectory_id"].map(failed)
    total = votes.groupby([tasks.rename("task"), given["capability"]]).sum()
    ranked = total[total > 0].reset_index(name="votes").sort_values(["votes", "capability"], ascending=[False, True])
    needed = ranked.drop_duplicates("task").set_index("task")["capability"]
    first = frame.drop_duplicates("task")
    found = {
        i: str(acted[t]) if solved[t] else str(needed.get(t, ""))
        for i, t in zip(first["id"], first["task"], strict=True)
    }
    return {i: label for i, label in found.items() if label in known}


@dataclass(frozen=True, eq=False)
class Example:
    """How a task began and where that lies (d,), what should answer it ("" the base, None: nothing solves what lies
    around it), and the trajectory that shows it. `successes` are the shares in which classes solved it, by class, of
    those that played it, `players` the ids of the adapters that these are of ("" the base); `task` is the task's id."""

    id: str
    opening: Opening
    vector: np.ndarray
    label: str | None
    successes: Mapping[str, float] = field(default_factory=dict)
    task: str = ""
    players: Mapping[str, str] = field(default_factory=dict)


def successes_of(frame: pd.DataFrame, tried: Mapping[str, pd.Series], classes: Sequence[str]) -> np.ndarray:
    """Shares of success as (tasks, classes), the tasks in the order of `frame`, NaN where a class did not play.

    `frame` has task, success and acted, as for `diagnosed`; `tried` the success by task of each adapter that played the
    tasks afterwards, by its capability.
    """
    tasks = list(dict.fromkeys(frame["task"]))
    by_class = frame.groupby(["acted", "task"])["success"].mean()
    columns = []
    for name in classes:
        acted = by_class[name] if name in by_class.index.get_level_values(0) else pd.Series(dtype=float)
        found = acted.astype(float).reindex(tasks)
        if name in tried:
            found = tried[name].astype(float).reindex(tasks).fillna(found)
        columns.append(found.to_numpy())
    return np.stack(columns, axis=1)


def examples_of(context: Context, members: Mapping[str, str]) -> list[Example]:
    """What the router is fitted on, from this round and from those that trained a member or what it was trained on
    from."""
    lineage = _lineage(context, members)
    rounds = {context.round.id, *(row.round_id for _, row in lineage)}
    found: dict[str, Example] = {}
    practice = _practised(context, members, lineage)
    for round_id in sorted(rounds, key=lambda identity: context.store.round(identity).number):
        diagnosis = _diagnosis(context, round_id)
        shown = _embedded(context, practice[round_id])
        own = [(c, row) for c, row in lineage if row.round_id == round_id]
        tried = _tried(context, own)
        if diagnosis is None:
            found |= shown
        elif not tried:  # a round that was played before adapters were tried
            frame, labels = diagnosis
            found |= shown | _embedded(context, diagnosed(frame, labels, list(members)))
        else:
            versions = {c: row.id for c, row in own}
            found |= _by_success(context, diagnosis[0], tried, versions, ["", *sorted(members)], shown)
    return joined(list(found.values()))


def joined(examples: Sequence[Example]) -> list[Example]:
    """One example a task: of several rounds that played it the last one's, with the means of what was solved in all; of
    a class that was renewed between them what its last version solved. One that stood there twice would be told by
    itself when it is left out."""
    by_task: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_task[example.task or example.id].append(example)
    return [_joined(same) if len(same) > 1 else same[0] for same in by_task.values()]


def _joined(same: Sequence[Example]) -> Example:
    classes = dict.fromkeys(c for example in same for c in example.successes)
    last = {c: e.players.get(c) for e in same for c in e.successes}
    known = {c: [e.successes[c] for e in same if c in e.successes and e.players.get(c) == last[c]] for c in classes}
    return replace(same[-1], successes={c: float(np.mean(shares)) for c, shares in known.items()})


def _by_success(
    context: Context,
    frame: pd.DataFrame,
    tried: Mapping[str, pd.Series],
    versions: Mapping[str, str],
    classes: Sequence[str],
    shown: Mapping[str, Example],
) -> dict[str, Example]:
    """A round's examples where its adapters were tried. A diagnosis task is of the class that solves most around it, or
    of none where nothing does. So is what a training environment had for retention; what an adapter was trained for
    there and solved is its own, unless another solves more of the diagnosis tasks around it. What solved a diagnosis
    task itself is told beside it."""
    first = frame.drop_duplicates("task")
    played = _embedded(context, dict.fromkeys(first["id"], ""))
    compared = played_by_most(first["task"], tried)
    where = [i for i, identity in enumerate(first["id"]) if identity in played and compared[i]]
    vectors = np.stack([played[first["id"].iloc[i]].vector for i in where])
    successes = successes_of(frame, tried, classes)[where]
    players = players_of(frame, tried, versions)
    for i, shares in zip(where, successes, strict=True):
        task = first["task"].iloc[i]
        told = {c: float(share) for c, share in zip(classes, shares, strict=True) if not np.isnan(share)}
        mine = {c: players[c, task] for c in told}
        played[first["id"].iloc[i]] = replace(played[first["id"].iloc[i]], successes=told, players=mine)
    asked = [*played.values(), *shown.values()]
    own = np.array([classes.index(e.label) if e.label else UNKNOWN for e in asked])
    best = best_answers(np.stack([e.vector for e in asked]), vectors, successes, own)
    labels = [None if k == UNKNOWN else classes[k] for k in best]
    return {e.id: replace(e, label=label) for e, label in zip(asked, labels, strict=True)}


def players_of(
    frame: pd.DataFrame, tried: Mapping[str, pd.Series], versions: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """Id of the adapter whose success `successes_of` tells, by class and task; "" the base. `frame` has the adapter_id
    of who acted, `versions` that of who `tried`, by capability."""
    acted = frame["adapter_id"].fillna("").groupby([frame["acted"], frame["task"]]).first()
    return acted.to_dict() | {(c, task): versions[c] for c, shares in tried.items() for task in shares.index}


def played_by_most(tasks: Sequence[str] | pd.Series[str], tried: Mapping[str, pd.Series]) -> np.ndarray:
    """(tasks,) whether so many of the `tried` adapters played a task as played any: where they play a part of the
    diagnosis (`evaluation.routing`), what one of them alone has played compares nothing."""
    count = pd.DataFrame(dict(tried)).reindex(list(tasks)).notna().sum(axis=1).to_numpy()
    return np.asarray(count == count.max())


def _lineage(context: Context, members: Mapping[str, str]) -> list[tuple[str, AdapterRow]]:
    """Capability and adapter of the members and of the versions that they were trained on from, newest first."""
    found = {identity: capability for capability, identity in members.items()}
    release = context.parent
    while release is not None:
        for capability, identity in members_of(release).items():
            if capability in members:
                found.setdefault(identity, capability)
        release = context.store.row(ReleaseRow, id=release.parent_id) if release.parent_id else None
    rows = {identity: context.store.row(AdapterRow, id=identity) for identity in found}
    known = [(found[identity], row) for identity, row in rows.items() if row is not None]
    return sorted(known, key=lambda pair: (pair[1].created_at, pair[1].id), reverse=True)


def _practised(
    context: Context, members: Mapping[str, str], lineage: Sequence[tuple[str, AdapterRow]]
) -> Mapping[str, Mapping[str, str]]:
    """Classes of tasks of the training environments that adapters solved, by trajectory id, by round."""
    about = {row.id: families_about(context.store, row) for _, row in lineage}
    owners = {family: capability for capability, row in lineage for family in about[row.id]}
    left = dict.fromkeys(members, EXAMPLES_PER_CAPABILITY)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for capability, row in lineage:
        frame = context.store.trajectory_frame(row.round_id, adapter_id=row.id)
        # What was shown advice opens as no task does; what tried an adapter as a start is about another capability.
        frame = frame[(frame["environment"] != context.round.target) & ~frame["group_id"].isin((HINT, START))]
        # A family that several adapters are about is of the one that solved the task.
        own = {family: c for c, other in lineage for family in about[other.id] if c == capability}
        taken = practised(frame, owners | own, left[capability])
        left[capability] -= len(taken)
        found[row.round_id] |= taken
    return found


def _embedded(context: Context, labels: Mapping[str, str]) -> dict[str, Example]:
    """Examples of stored trajectories, by id; those whose episode ended before the agent spoke are left out."""
    given = stored_openings(context, list(labels))
    if not given:
        return {}
    with context.model:
        vectors = embed_openings(context.base.policy, list(given.values()))
    frame = context.store.trajectory_frame(None, id=list(given), columns=["id", "task_id"])
    task = dict(zip(frame["id"], frame["task_id"], strict=True))
    return {i: Example(i, given[i], v, labels[i], task=task[i]) for i, v in zip(given, vectors, strict=True)}


def stored_openings(context: Context, ids: list[str]) -> dict[str, Opening]:
    """How stored trajectories began, by id; ids whose episode ended before the agent spoke are left out."""
    prompt, found = first_opening(context.target)[0], dict[str, Opening]()
    for row in context.store.trajectories(None, id=ids):
        roles = [m["role"] for m in row.messages]
        if "assistant" in roles and roles[0] != "assistant":
            first = [Message(m["role"], m["content"]) for m in row.messages[: roles.index("assistant")]]
            found[row.id] = opening_of(prompt, context.base.renderer, first)
    return {i: found[i] for i in ids if i in found}


def _tried(context: Context, trained: Sequence[tuple[str, AdapterRow]]) -> dict[str, pd.Series]:
    """Success by task of the adapters that played their round's diagnosis tasks, by capability."""
    found = {}
    for capability, row in trained:
        frame = context.store.trajectory_frame(
            row.round_id, adapter_id=row.id, purpose=TRIED, columns=["task_id", "success"]
        ).dropna()
        if len(frame):
            found[capability] = frame.groupby("task_id")["success"].mean()
    return found


def _diagnosis(context: Context, round_id: str) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """A round's diagnosis and its labels, as `diagnosed` takes them; None of a round that was not stored in this
    form."""
    store = context.store
    stored = StoredRound(store, store.round(round_id))
    rolled = stored.found(RolloutResult) if not stored.unreadable() else None
    labels = pd.DataFrame(store.rows(LabelRow, round_id=round_id))
    if rolled is None or labels.empty:
        return None
    names = {r.id: r.name for r in store.rows(CapabilityRow, round_id=round_id)}
    labels["capability"] = labels["capability_id"].map(names)
    frame = outcomes(store, rolled.trajectories)
    frame["acted"] = frame["adapter_id"].map(_capability_of(context, frame["adapter_id"])).fillna("")
    return frame, labels


def definitions_of(context: Context, members: Mapping[str, str]) -> dict[str, str]:
    """What the capabilities of these members (adapter id by capability) are, as the rounds that trained them wrote it
    down; without those of which nothing is written."""
    found = {}
    for capability, identity in members.items():
        row = context.store.row(AdapterRow, id=identity)
        about = row and row.capability_id and context.store.row(CapabilityRow, id=row.capability_id)
        if about and about.definition:
            found[capability] = about.definition
    return found


def _capability_of(context: Context, adapters: pd.Series[str]) -> dict[str, str]:
    """Capability by adapter id."""
    found = {}
    for identity in sorted(set(adapters.dropna())):
        row = context.store.row(AdapterRow, id=identity)
        capability = row and row.capability_id and context.store.row(CapabilityRow, id=row.capability_id)
        if capability:
            found[identity] = capability.name
    return found
