"""The registry of a target's adapters."""

from __future__ import annotations

from models.adapters.registry import Registry
from settings import Settings


def registry_name(target: str) -> str:
    """A target's name as the registry takes it."""
    return target.replace(":", "-").replace("/", "-").replace(".", "-")


def open_registry(settings: Settings, target: str) -> Registry:
    """The registry that holds the adapters of `target`, where the settings say that it is."""
    return Registry(settings.tracking_uri, registry_name(target), settings.folder / "mlartifacts")
