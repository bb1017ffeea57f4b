"""A round's own adapters: their ids, and loading one that was trained."""

from __future__ import annotations

from db import AdapterRow, row_id
from errors import AdapterError
from tasks.round.context import Context
from tasks.round.policies import load_adapter


def adapter_id(round_id: str, capability: str) -> str:
    """Id of a round's adapter for a capability."""
    return row_id(round_id, "adapter", capability)


def load_trained(context: Context, capability: str) -> str:
    """Make a round's trained adapter usable in this process, hash checked. Returns the name to sample with."""
    row = context.store.row(AdapterRow, id=adapter_id(context.round.id, capability))
    assert row is not None
    folder = context.settings.folder / row.path
    name, digest = load_adapter(context.policy, context.settings, folder, capability, context.round.id)
    if digest != row.sha256:
        raise AdapterError(
            f"adapter {capability!r} has hash {digest[:12]}, stored is {row.sha256[:12]}; train it again with --fresh"
        )
    return name
