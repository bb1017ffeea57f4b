"""A round's own adapters: their ids, which were registered, and loading one that was trained."""

from __future__ import annotations

from db import AdapterRow, row_id
from models.adapters.loading import load_folder
from tasks.round.context import Context
from tasks.round.results import RegisterResult, SelectResult


def adapter_id(round_id: str, capability: str) -> str:
    """Id of a round's adapter for a capability."""
    return row_id(round_id, "adapter", capability)


def registered(context: Context) -> list[str]:
    """The selected capabilities whose adapters are registered, in order of selection."""
    return [c for c in context.result(SelectResult).selected if context.found(RegisterResult, c)]


def load_trained(context: Context, capability: str) -> str:
    """Make a round's trained adapter usable in this process, hash checked. Returns the name to sample with."""
    row = context.store.row(AdapterRow, id=adapter_id(context.round.id, capability))
    assert row is not None
    folder = context.settings.folder / row.path
    return load_folder(context.policy, folder, capability, context.round.id, row.sha256)
