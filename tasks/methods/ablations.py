"""TRACE with one thing changed: what each part of the method is worth. Each is a whole round from the seed's diagnosis,
in a home of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What is changed, and where in the settings: by part and field, or by field alone.
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "select-once": ("one run of selection decides", {"selection": {"runs": 1, "required": 1}}),
    "select-always": ("every run of selection must agree", {"selection": {"runs": 10, "required": 10}}),
    "no-retention": ("no retention scenarios", {"calibration": {"retention_share": 0.0}}),
    "half-retention": ("half of the scenarios for retention", {"calibration": {"retention_share": 0.5}}),
    "no-hints": ("no hints", {"train": {"hints": 0.0}}),
    "unscaled": ("advantages not divided by the group's deviation", {"train": {"scaled": False}}),
    "bounded": ("the ratio bounded where advantages are negative", {"train": {"delta": 1.5}}),
    "rank-4": ("LoRA of rank 4", {"train": {"rank": 4, "alpha": 8}}),
    "all-layers": ("LoRA on all layers", {"train": {"upper_layers": None}}),
    "last-step": ("the weights after the last step, whatever they are worth", {"train": {"candidates": 1}}),
    "router-label": ("the router's label alone", {"router": "label"}),
    "router-both": ("the router's label and retrieval", {"router": "both"}),
}


def changed(settings: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `settings` with the changes: a part of them as a whole, with its other fields as they are."""
    return {
        name: getattr(settings, name).model_copy(update=dict(value)) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
