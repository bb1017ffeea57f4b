"""A round's own adapters: their ids, and loading one that was trained."""

from __future__ import annotations

from db import row_id
from models.adapters.loading import load_folder
from tasks.round.context import Context


def adapter_id(round_id: str, capability: str) -> str:
    """Id of a round's adapter for a capability."""
    return row_id(round_id, "adapter", capability)


def load_trained(context: Context, capability: str) -> str:
    """Make a round's trained adapter usable in this process, hash checked. Returns the name to sample with."""
    row = context.store.row("adapters", id=adapter_id(context.round.id, capability))
    assert row is not None
    folder = context.settings.folder / row["path"]
    return load_folder(context.policy, folder, capability, context.round.id, row["sha256"])
