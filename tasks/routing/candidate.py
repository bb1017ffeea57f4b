"""The candidate release as it is stored: its members' versions and its router, as it was fitted first, or amended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from db import AdapterRow, ReleaseRow
from models.adapters.blending import parts_named
from models.router.router import Router
from tasks.measuring.lineup import lineup_of, members_of
from tasks.releases.lifecycle import new_candidate
from tasks.releases.lookup import Basis
from tasks.round.context import Context
from tasks.routing.examples import Example, definitions_of, examples_of
from tasks.routing.fitting import fitted

# Folders of the round: the router as it was fitted, and with families left to what answers them today.
ROUTER, AMENDED = "router", "router-amended"


def amend(context: Context, candidate: ReleaseRow, families: Collection[str]) -> ReleaseRow | None:
    """A candidate like this one behind another router, fitted with the examples of `families`, which fell, as what
    answers these today and with many votes each. None where no example is of one of them, or where the candidate has
    renewed all that answers them: then nobody is left who could. What is stored of it says which they are."""
    members = routed_members(candidate)
    examples = examples_of(context, members)
    frame = context.store.trajectory_frame(None, id=[e.id for e in examples], columns=["id", "family"])
    fell = set(frame[frame["family"].isin(list(families))]["id"])
    asked = [e for e in examples if e.id in fell and e.label is not None]
    labels = _answering_today(context, candidate, asked)
    if not labels:
        return None
    unlike, definitions = str(candidate.evidence.get("unlike", "")), definitions_of(context, members)
    with context.model:
        again = [replace(e, label=labels.get(e.id, e.label)) for e in examples]
        router = fitted(context, again, unlike, labels, definitions).router
    # By its content: an attempt of the stage that was broken off may have made another candidate, which keeps its own.
    folder = f"{AMENDED}-{router.version[:8]}"
    save_router(context, router, folder)
    evidence = {**candidate.evidence, "left": sorted(families)}
    return stored_candidate(context, candidate.members, router, folder, evidence)


def _answering_today(context: Context, candidate: ReleaseRow, asked: Sequence[Example]) -> dict[str, str]:
    """What answers these examples today, by their ids ("": the base); without those that an adapter answers which the
    candidate has in another version, or no longer."""
    today, base = lineup_of(context, context.incumbent).router, context.base
    if today is None:
        return {e.id: "" for e in asked}
    with context.model:
        decided = today.route(base.policy, base.renderer, [e.opening for e in asked]) if asked else []
    before, after = members_of(context.incumbent), members_of(candidate)
    kept = {"", *(c for c in after if after[c] == before.get(c))}
    # What the live router names and the live release does not hold is answered by the base.
    named = {e.id: d.capability if d.capability in before else "" for e, d in zip(asked, decided, strict=True)}
    return {i: capability for i, capability in named.items() if capability in kept}


def save_router(context: Context, router: Router, name: str) -> None:
    router.save(context.folder / name)
    context.files.put(f"{context.round.id}/{name}")


def routed_members(release: ReleaseRow | None) -> dict[str, str]:
    """Adapter ids of the members among which a router chooses: not of blends, which no round trained and which a
    gateway alone answers with."""
    return {capability: identity for capability, identity in members_of(release).items() if identity}


def member_versions(context: Context, own: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Exact versions of the members, with their digests: the parent's as they stand, blends among them, and in place of
    those that the round renewed its `own` adapters; without the blends of those."""
    before, old = context.parent.members if context.parent else {}, old_blends(context.parent, own)
    given = {c: dict(member) for c, member in before.items() if c not in old}
    for capability, identity in own.items():
        row = context.store.row(AdapterRow, id=identity)
        assert row is not None, "the round's own adapters are stored"
        given[capability] = {
            "adapter_id": identity,
            "model": str(row.registered_model),
            "version": str(row.registered_version),
            "sha256": row.sha256,
        }
    return given


def old_blends(parent: ReleaseRow | None, own: Mapping[str, str]) -> list[str]:
    """The parent's blends that hold the weights of a member which the round renewed: beside its new adapter they would
    answer as it was. They are left out until somebody publishes them again."""
    blends = [c for c, member in parent.members.items() if not member["adapter_id"]] if parent else []
    return sorted(name for name in blends if own.keys() & parts_named(name).keys())


def stored_candidate(
    context: Context,
    members: Mapping[str, Mapping[str, str]],
    router: Router,
    folder: str,
    evidence: Mapping[str, Any],
) -> ReleaseRow:
    """The candidate as it is stored, with the router fitted for its members, which lies in a folder of the round."""
    identity = context.base.identity
    return new_candidate(
        context.store,
        target=context.round.target,
        parent=context.parent,
        round_id=context.round.id,
        basis=Basis(identity.base, identity.revision, context.round.data_hash),
        members=members,
        router=router.version,
        router_path=f"{context.round.id}/{folder}",
        evidence=evidence,
    )
