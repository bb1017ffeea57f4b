"""Publishing a blend: a weighted sum of champions, registered, proven and promoted as an adapter of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from environments.contract import Message
from errors import ConfigurationError
from models.adapters.blending import QUARTERS, blend, blend_name, blend_parts
from models.adapters.deltas import folder_deltas
from models.adapters.files import AdapterRecord
from models.adapters.fingerprint import TAG, take_fingerprint
from models.adapters.registry import Registry
from models.local.base import load_base
from tasks.round.registry import registry_name
from tasks.serving.gateway import preset_of, serving_settings

PROBE = "Please help me with order 314."


def parse_weights(parts: Sequence[str]) -> dict[str, float]:
    """`capability=weight` texts. Raises `ConfigurationError`."""
    weights: dict[str, float] = {}
    for part in parts:
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ConfigurationError(f"{part!r} is not CAPABILITY=WEIGHT; write such as refund_payment=0.5") from None
    if not weights or not all(0 < w <= 1 for w in weights.values()) or sum(weights.values()) > 1.0001:
        raise ConfigurationError(f"weights {weights} must each be above 0 and together at most 1")
    return weights


def publish_blend(home: Path | None, target: str | None, parts: Sequence[str], most_rank: int = 0) -> str:
    """Blend champions by `parts` (weights are rounded to quarters), register the blend and make it champion of a
    capability of its own, which gateways with blending on then use. Returns its served name."""
    weights = parse_weights(parts)
    settings, store = serving_settings(home, target)
    store.close()
    registry = Registry(settings.tracking_uri, registry_name(settings.target), settings.folder / "mlartifacts")
    champions = registry.champions()
    unknown = sorted(set(weights) - set(champions))
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} has no champion; there are: {', '.join(champions) or 'none'}")
    name, quarters = blend_name(weights), blend_parts(weights)
    if name in champions and name in quarters:
        raise ConfigurationError(f"{list(parts)} rounds to {name!r} alone, which is served already; give two or more")
    base = load_base(settings.base_model, settings.dtype, settings.calls, 1, settings.cache)
    preset = preset_of(settings)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            registry.download(champions[c], settings.folder / "served"): q / QUARTERS for c, q in quarters.items()
        }
        folder = blend(base.policy.model, folders, Path(scratch) / "blend", most_rank)
        digest, deltas = folder_deltas(folder)
        base.policy.load_adapter(name, digest, deltas)
        talk = base.renderer.start(preset.instructions, preset.tools, preset.examples, [Message("user", PROBE)])
        stamp = take_fingerprint(base.policy, talk.ids, name).text()
        sources = ", ".join(f"{champions[c].served_name}*{q / QUARTERS:g}" for c, q in sorted(quarters.items()))
        record = AdapterRecord(
            name,
            base.identity.base,
            base.identity.revision,
            "blend",
            {"weights": sources, "most_rank": most_rank},
            {"dtype": base.identity.dtype, "blend": sources, TAG: stamp},
        )
        run = registry.start_run(f"blend/{name}"[:200])
        version = registry.register(record, folder, run)
        registry.end_run(run)
    return registry.promote(name, version.version).served_name
