"""The registry of a target's adapters."""

from __future__ import annotations


def registry_name(target: str) -> str:
    """A target's name as the registry takes it."""
    return target.replace(":", "-").replace("/", "-").replace(".", "-")
