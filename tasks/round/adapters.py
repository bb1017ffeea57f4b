"""A round's own adapters: their ids and rows, storing one, what it is about, and loading it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from db import GENERALIST, AdapterRow, AdapterState, EnvironmentRow, Store, row_id
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.fingerprint import TAG, Fingerprint, read_fingerprint
from models.adapters.loading import load_folder
from models.objects import HomeFiles
from models.policy import TrainablePolicy
from tasks.round.context import Context
from tasks.round.results import RegisterResult, SelectResult, TrainResult
from tasks.round.stored import StoredRound

# Of what is stored of an adapter the part that says how its weights were found to be live.
PROOF = "proof"
# What the weights are stored as that a generalist practises from (`train.practice`).
BEFORE_PRACTICE = f"{GENERALIST}-learnt"


def adapter_id(round_id: str, capability: str, version: int = 1) -> str:
    """Id of a round's adapter for a capability; `version` is that of the environment it was trained in."""
    return row_id(round_id, "adapter", capability, *([version] if version > 1 else []))


def begin_adapter(
    context: Context, identity: str, capability_id: str | None, environment_id: str | None, config: Mapping[str, Any]
) -> None:
    """Store the row of an adapter whose training begins; one that is stored stays as it is."""
    row = AdapterRow(
        id=identity,
        round_id=context.round.id,
        capability_id=capability_id,
        environment_id=environment_id,
        base=context.base.identity.base,
        base_revision=context.base.identity.revision,
        state=AdapterState.TRAINING,
        config=config,
    )
    context.store.put([row])


def finish_adapter(context: Context, identity: str, weights: Path, folder: Path) -> str:
    """Export `weights` to `folder`, a folder of the home, and store the adapter as trained. Returns its digest."""
    context.still_ours()  # what another process has stored there is what its digest says
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that died between export and the end of the stage
    export_adapter(weights, folder)
    digest, path = adapter_digest(folder), str(folder.relative_to(context.settings.folder))
    context.files.put(path)
    context.store.set_state(AdapterRow, identity, AdapterState.TRAINED, sha256=digest, path=path)
    return digest


def before_practice(store: Store, round_id: str) -> AdapterRow | None:
    """What the round's generalist practised from; None where it did not practise."""
    row = store.row(AdapterRow, id=adapter_id(round_id, BEFORE_PRACTICE))
    return row if row is not None and row.path else None


def own_adapter(stored: StoredRound, capability: str) -> str:
    """Id of the adapter that the round trained for a capability."""
    return stored.result(TrainResult, capability).adapter


def registered(stored: StoredRound) -> list[str]:
    """The selected capabilities whose adapters are registered, in order of selection."""
    return [c for c in stored.result(SelectResult).selected if stored.goes_on(RegisterResult, c)]


def families_about(store: Store, adapter: AdapterRow) -> tuple[str, ...]:
    """The families that an adapter's environment is about; none where it is not known (a blend, an imported home)."""
    environment = store.row(EnvironmentRow, id=adapter.environment_id) if adapter.environment_id else None
    if environment is None:
        return ()
    spec = environment.spec.get("environment", environment.spec)
    return tuple(spec.get("families", ()))


def keep_proof(store: Store, adapter: AdapterRow, proof: Fingerprint) -> None:
    """Keep how an adapter was found to be live, with the digest of the weights that were probed."""
    kept = {"sha256": adapter.sha256, TAG: proof.text()}
    store.set_state(AdapterRow, adapter.id, adapter.state, metrics={**adapter.metrics, PROOF: kept})


def kept_proof(adapter: AdapterRow) -> Fingerprint | None:
    """What `keep_proof` kept of these very weights; None where they were not probed yet."""
    kept = adapter.metrics.get(PROOF)
    if not kept or kept["sha256"] != adapter.sha256:
        return None
    return read_fingerprint(kept, adapter.id)


def load_trained(stored: StoredRound, policy: TrainablePolicy, files: HomeFiles, capability: str) -> str:
    """Make a round's trained adapter usable by `policy`, hash checked. Returns the name to sample with.

    `files` are those of all rounds, in which the store's paths lie."""
    row = stored.store.row(AdapterRow, id=own_adapter(stored, capability))
    assert row is not None
    return load_folder(policy, files.fetch(row.path), capability, stored.round.id, row.sha256)
