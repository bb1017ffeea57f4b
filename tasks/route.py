"""Stage 6, `trace-agent stage route`: assemble the candidate release, the live one's adapters with those that passed,
and fit the router for exactly these (method, section 6; the router is `models.router.router`).

It is fitted on what the rounds have seen that trained the members: diagnosis tasks, by what solves them, and tasks of
the training environments that an adapter solved. For that every new adapter plays the round's diagnosis tasks once: an
adapter also solves what nobody thought that it was trained for, and does not solve all that it was. A share of all of
these is kept out to choose the mode and the probability below which the router abstains; the tasks that the gate tests
are never looked at.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from db import AdapterRow, CapabilityRow, LabelRow, ReleaseRow
from environments.contract import Message, content_hash
from models.router.first_observation import Opening, embed_openings, opening_of
from models.router.router import Router
from models.router.solved import UNKNOWN, best_answers
from models.router.validation import accuracy, calibrated, choose_mode
from tasks.measuring.lineup import TRIED, lineup_of, members_of, try_on_diagnosis
from tasks.mining.labels import LACKING
from tasks.releases.lifecycle import new_candidate
from tasks.round.adapters import families_about, own_adapter
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, RolloutResult, RouteResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import first_opening
from tasks.synthesis.calibration import HINT
from tasks.synthesis.starting import START
from tasks.tracking.wrong_routes import answers_unlike, tell_wrong_routes

logger = logging.getLogger("trace")

# Folders of the round: the router as it was fitted, and with families left to what answers them today.
ROUTER, AMENDED = "router", "router-amended"
# Tasks of its own environment that the router keeps per capability.
EXAMPLES_PER_CAPABILITY = 120
# How many neighbours vote: 5 were right on 92 to 94 % of the validation tasks that need an adapter (three rounds of the
# shop), 9 on 93 to 95 %, 15 on 95 to 97 %. No more than the smallest class has, or the others would outvote it.
FEWEST, MOST = 5, 15
# Share of the examples that mode and threshold are chosen on.
CALIBRATION_SHARE = 0.25


def _stored_openings(context: Context, ids: list[str]) -> dict[str, Opening]:
    """How stored trajectories began, by id; ids whose episode ended before the agent spoke are left out."""
    prompt, found = first_opening(context.target)[0], dict[str, Opening]()
    for row in context.store.trajectories(None, id=ids):
        roles = [m["role"] for m in row.messages]
        if "assistant" in roles and roles[0] != "assistant":
            first = [Message(m["role"], m["content"]) for m in row.messages[: roles.index("assistant")]]
            found[row.id] = opening_of(prompt, context.base.renderer, first)
    return {i: found[i] for i in ids if i in found}


def practised(frame: pd.DataFrame, owners: Mapping[str, str], most: int) -> dict[str, str]:
    """Class by trajectory id of at most `most` tasks of its environment that an adapter succeeded at, one trajectory a
    task.

    `frame` has id, task_id, family and success; `owners` says which capability a family is of. Tasks of other families
    stood there for retention and are the base's ("").
    """
    solved = frame[frame["success"].fillna(False).astype(bool)].drop_duplicates("task_id").sort_values("task_id")
    return {r.id: owners.get(r.family, "") for r in solved.head(most).itertuples()}


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
    """How a task began and where that lies (d,), what should answer it ("" the base), and the trajectory that shows
    it."""

    id: str
    opening: Opening
    vector: np.ndarray
    label: str


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


def _examples(context: Context, members: Mapping[str, str]) -> list[Example]:
    """What the router is fitted on, from this round and from those that trained a member or what it was trained on
    from."""
    lineage = _lineage(context, members)
    rounds = {context.round.id, *(row.round_id for _, row in lineage)}
    found: dict[str, Example] = {}
    practice = _practised(context, members, lineage)
    for round_id in sorted(rounds):
        diagnosis = _diagnosis(context, round_id)
        shown = _embedded(context, practice[round_id])
        tried = _tried(context, [(c, row) for c, row in lineage if row.round_id == round_id])
        if diagnosis is None:
            found |= shown
        elif not tried:  # a round that was played before adapters were tried
            frame, labels = diagnosis
            found |= shown | _embedded(context, diagnosed(frame, labels, list(members)))
        else:
            found |= _by_success(context, diagnosis[0], tried, ["", *sorted(members)], shown)
    return list(found.values())


def _by_success(
    context: Context,
    frame: pd.DataFrame,
    tried: Mapping[str, pd.Series],
    classes: Sequence[str],
    shown: Mapping[str, Example],
) -> dict[str, Example]:
    """A round's examples where its adapters were tried. A diagnosis task is of the class that solves most around it, or
    left out where nothing does. So is what a training environment had for retention; what an adapter was trained for
    there and solved is its own, unless another solves more of the diagnosis tasks around it."""
    first = frame.drop_duplicates("task")
    played = _embedded(context, dict.fromkeys(first["id"], ""))
    compared = played_by_most(first["task"], tried)
    where = [i for i, identity in enumerate(first["id"]) if identity in played and compared[i]]
    vectors = np.stack([played[first["id"].iloc[i]].vector for i in where])
    successes = successes_of(frame, tried, classes)[where]
    asked = [*played.values(), *shown.values()]
    own = np.array([classes.index(e.label) if e.label else UNKNOWN for e in asked])
    best = best_answers(np.stack([e.vector for e in asked]), vectors, successes, own)
    return {e.id: replace(e, label=classes[k]) for e, k in zip(asked, best, strict=True) if k != UNKNOWN}


def played_by_most(tasks: Sequence[str] | pd.Series[str], tried: Mapping[str, pd.Series]) -> np.ndarray:
    """(tasks,) whether so many of the `tried` adapters played a task as played any: where they play a part of the
    diagnosis (`evaluation.routing`), what one of them alone has played compares nothing."""
    count = pd.DataFrame(dict(tried)).reindex(list(tasks)).notna().sum(axis=1).to_numpy()
    return np.asarray(count == count.max())


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
    given = _stored_openings(context, list(labels))
    if not given:
        return {}
    with context.model:
        vectors = embed_openings(context.base.policy, list(given.values()))
    return {i: Example(i, given[i], vector, labels[i]) for i, vector in zip(given, vectors, strict=True)}


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


def _capability_of(context: Context, adapters: pd.Series[str]) -> dict[str, str]:
    """Capability by adapter id."""
    found = {}
    for identity in sorted(set(adapters.dropna())):
        row = context.store.row(AdapterRow, id=identity)
        capability = row and row.capability_id and context.store.row(CapabilityRow, id=row.capability_id)
        if capability:
            found[identity] = capability.name
    return found


def kept_out(trajectory_id: str) -> bool:
    """Whether a trajectory is of the share that thresholds are fitted on, decided by its id alone."""
    return int(content_hash(trajectory_id), 16) % 1000 < 1000 * CALIBRATION_SHARE


@stage("route", title="assemble the candidate, fit its router")
def route(context: Context) -> RouteResult:
    """Fit on first observations, choose mode and threshold on the share kept out, and store the candidate release."""
    challenged = context.result(ChallengeResult)
    if not challenged.passed:
        return RouteResult(skipped=challenged.skipped or "no adapter was better than what answers today")
    members = members_of(context.parent) | {c: own_adapter(context.stored, c) for c in challenged.passed}
    tried = try_on_diagnosis(context, challenged.passed)
    today = lineup_of(context, context.incumbent).router
    kept = today.unlike if today and today.unlike in members else ""
    unlike = answers_unlike(tell_wrong_routes(context, tried), kept)
    examples = _examples(context, members)
    with context.model:
        router, calibration = _fitted(context, examples, unlike)
    _save(context, router, ROUTER)
    candidate = _candidate(
        context, _versions(context, members), router, ROUTER, {"new": challenged.passed, "unlike": unlike}
    )
    right = (
        accuracy(
            router.route(context.base.policy, context.base.renderer, [e.opening for e in calibration]),
            [e.label for e in calibration],
        )
        if calibration
        else None
    )
    return RouteResult(
        candidate=candidate.id,
        version=router.version,
        mode=router.mode,
        tried=sum(len(ids) for ids in tried.values()),
        examples=len(examples) - len(calibration),
        labels={k or "none": v for k, v in Counter(e.label for e in examples).items()},
        threshold=router.certain,
        calibration=len(calibration),
        right=right,
    )


def amend(context: Context, candidate: ReleaseRow, families: Collection[str]) -> ReleaseRow | None:
    """A candidate like this one behind another router, fitted with the examples of `families`, which fell, as what
    answers these today and with many votes each. None where no example is of one of them. What is stored of it says
    which they are."""
    examples = _examples(context, members_of(candidate))
    frame = context.store.trajectory_frame(None, id=[e.id for e in examples], columns=["id", "family"])
    left = set(frame[frame["family"].isin(list(families))]["id"])
    asked = [e for e in examples if e.id in left]
    if not asked:
        return None
    today, base = lineup_of(context, context.incumbent).router, context.base
    with context.model:
        decided = today.route(base.policy, base.renderer, [e.opening for e in asked]) if today else []
        labels = {e.id: d.capability for e, d in zip(asked, decided, strict=True)} if decided else {}
        again = [replace(e, label=labels.get(e.id, "")) if e.id in left else e for e in examples]
        router, _ = _fitted(context, again, str(candidate.evidence.get("unlike", "")), left)
    _save(context, router, AMENDED)
    evidence = {**candidate.evidence, "left": sorted(families)}
    return _candidate(context, candidate.members, router, AMENDED, evidence)


def _save(context: Context, router: Router, name: str) -> None:
    router.save(context.folder / name)
    context.files.put(f"{context.round.id}/{name}")


def _versions(context: Context, members: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Exact versions of the members, with their digests."""
    given = {}
    for capability, identity in sorted(members.items()):
        row = context.store.row(AdapterRow, id=identity)
        assert row is not None, "members are stored adapters"
        given[capability] = {
            "adapter_id": identity,
            "model": str(row.registered_model),
            "version": str(row.registered_version),
            "sha256": row.sha256,
        }
    return given


def _candidate(
    context: Context,
    members: Mapping[str, Mapping[str, str]],
    router: Router,
    folder: str,
    evidence: Mapping[str, Any],
) -> ReleaseRow:
    """The candidate as it is stored, with the router fitted for its members, which lies in a folder of the round."""
    return new_candidate(
        context.store,
        target=context.round.target,
        parent=context.parent,
        round_id=context.round.id,
        base=context.base.identity.base,
        base_revision=context.base.identity.revision,
        data_hash=context.round.data_hash,
        members=members,
        router=router.version,
        router_path=f"{context.round.id}/{folder}",
        evidence=evidence,
    )


def _fitted(
    context: Context, examples: Sequence[Example], unlike: str, insisted: Collection[str] = ()
) -> tuple[Router, list[Example]]:
    """The router, and the examples on which its mode (where `router` is `auto`) and its threshold were chosen. What is
    kept out is of no use to the votes, so it stays out. `unlike` answers what is like none of them, and `insisted` are
    examples that are used whatever their id, with many votes each."""
    out = {e.id for e in examples if kept_out(e.id)} - set(insisted)
    used, held = [e for e in examples if e.id not in out], [e for e in examples if e.id in out]
    if len({e.label for e in used}) < len({e.label for e in examples}):
        logger.info("%d examples are too few to keep a share out: the router's threshold is not fitted", len(examples))
        used, held = list(examples), []
    base = context.base
    labels = [e.label for e in used]
    vectors = np.stack([e.vector for e in used])
    smallest = min(Counter(e.label for e in used if e.id not in insisted).values(), default=FEWEST)
    near = max(FEWEST, min(MOST, smallest))
    router = Router.fit(vectors, labels, [e.id for e in used], near).insisting(insisted)
    rows = [(e.opening, e.label) for e in held]
    mode: str = context.settings.router
    if mode == "auto":
        mode = choose_mode(router, base.policy, base.renderer, rows).mode if rows else "retrieval"
    return replace(calibrated(router.with_mode(mode), base.policy, base.renderer, rows), unlike=unlike), held
