"""Publishing a blend: a weighted sum of champions, registered, proven and promoted as an adapter of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from environments.targets.catalogue import load_target
from errors import ConfigurationError
from models.adapters.blending import QUARTERS, blend, blend_name, blend_parts
from models.adapters.files import AdapterRecord, adapter_digest
from models.adapters.fingerprint import TAG
from models.adapters.loading import fingerprint_on, load_folder
from models.adapters.releases import set_champion
from models.local.base import load_base
from tasks.round.registry import open_registry
from tasks.round.target_prompt import first_opening
from tasks.serving.gateway import serving_settings


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
    registry = open_registry(settings, settings.target)
    champions = registry.champions()
    unknown = sorted(set(weights) - set(champions))
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} has no champion; there are: {', '.join(champions) or 'none'}")
    name, quarters = blend_name(weights), blend_parts(weights)
    if name in champions and name in quarters:
        raise ConfigurationError(f"{list(parts)} rounds to {name!r} alone, which is served already; give two or more")
    base = load_base(settings.base_model, settings.dtype, settings.calls, 1, settings.cache)
    probe = base.renderer.start(*first_opening(load_target(settings.target)))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            registry.download(champions[c], settings.folder / "served"): q / QUARTERS for c, q in quarters.items()
        }
        folder = blend(base.policy.model, folders, Path(scratch) / "blend", most_rank)
        loaded = load_folder(base.policy, folder, name, "blend", adapter_digest(folder))
        stamp = fingerprint_on(base.policy, probe, loaded).text()
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
    set_champion(registry, version.name, version.version)
    return version.served_name
