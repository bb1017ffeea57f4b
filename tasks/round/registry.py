"""The registry of a target's adapters, and what a round's runs are called there."""

from __future__ import annotations

import re

from models.adapters.registry import Registry
from settings import Settings


def registry_name(target: str) -> str:
    """A target's name as the registry takes it."""
    return re.sub(r"[:/.,]", "-", target)


def open_registry(settings: Settings, target: str) -> Registry:
    """The registry that holds the adapters of `target`, where the settings say that it is."""
    return Registry(settings.tracking_uri, registry_name(target), settings.folder / "mlartifacts")


def round_key(round_id: str) -> str:
    """What the run of a round is found by."""
    return f"{round_id}-round"


def run_name(target: str, number: int | None, part: str = "") -> str:
    """What a run is called: the target, the night, and the part of it ("": the whole round)."""
    return f"{target} night {number or '?'}{f': {part}' if part else ''}"
