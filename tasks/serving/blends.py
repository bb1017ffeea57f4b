"""Publishing a blend: a weighted sum of members, registered and proven as an adapter of its own, in a candidate."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from db import ReleaseRow
from environments.targets.catalogue import load_target
from errors import ConfigurationError
from models.adapters.blending import QUARTERS, blend, blend_name, blend_parts
from models.adapters.files import AdapterRecord, RegisteredAdapter, adapter_digest
from models.adapters.fingerprint import TAG
from models.adapters.loading import fingerprint_on, load_folder
from models.adapters.registry import Registry
from models.local.base import load_base
from settings import Settings
from tasks.releases.lifecycle import live_release, member_adapters, new_candidate
from tasks.releases.lookup import Basis
from tasks.round.registry import open_registry
from tasks.round.target_prompt import first_opening
from tasks.serving.gateway import serving_settings


def parse_weights(parts: Sequence[str]) -> dict[str, float]:
    """`capability=weight` texts. Raises `ConfigurationError`."""
    weights: dict[str, float] = {}
    for part in parts:
        name, _, weight = part.partition("=")
        if name in weights:
            raise ConfigurationError(
                f"{name!r} is given twice, as {weights[name]:g} and in {part!r}; give it once, with the sum of both if "
                "that is meant"
            )
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ConfigurationError(f"{part!r} is not CAPABILITY=WEIGHT; write such as refund_payment=0.5") from None
    if not weights or not all(0 < w <= 1 for w in weights.values()) or sum(weights.values()) > 1.0001:
        raise ConfigurationError(f"weights {weights} must each be above 0 and together at most 1")
    return weights


def publish_blend(
    home: Path | None, target: str | None, parts: Sequence[str], most_rank: int = 0
) -> tuple[ReleaseRow, str]:
    """Blend members of the live release by `parts` (weights are rounded to quarters) and register the blend. Returns a
    candidate that holds it as a member of its own, beside all others and with their router, and its served name; once
    that release is live, gateways with blending on use it."""
    weights = parse_weights(parts)
    settings, store = serving_settings(home, target)
    with store:
        live = live_release(store, settings.target)
        if live is None:
            raise ConfigurationError(
                f"no release of {settings.target} is live: there is nothing to blend; run 'trace-agent improve' first"
            )
        registry = open_registry(settings, settings.target)
        members = member_adapters(registry, live)
        unknown = sorted(set(weights) - set(members))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]!r} is not a member of the live release {live.number}; it has: {', '.join(members)}"
            )
        name, quarters = blend_name(weights), blend_parts(weights)
        if name in members and name in quarters:
            raise ConfigurationError(
                f"{list(parts)} rounds to {name!r} alone, which is served already; give two or more"
            )
        sorted_parts = [(members[c], q) for c, q in sorted(quarters.items())]
        version, sources = _register(settings, registry, sorted_parts, name, most_rank)
        member = {"adapter_id": "", "model": version.name, "version": version.version, "sha256": version.sha256}
        row = new_candidate(
            store,
            target=settings.target,
            parent=live,
            round_id=None,
            basis=Basis.of(live),
            members={**live.members, name: member},
            router=live.router,
            router_path=live.router_path,
            evidence={"blend": sources},
        )
    return row, version.served_name


def _register(
    settings: Settings, registry: Registry, quarters: Sequence[tuple[RegisteredAdapter, int]], name: str, most_rank: int
) -> tuple[RegisteredAdapter, str]:
    """The registered blend of members by quarters, and what it was made of."""
    base = load_base(settings.base_model, settings.dtype, settings.calls, 1, settings.cache)
    probe = base.renderer.start(*first_opening(load_target(settings.target)))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {registry.download(a, settings.folder / "served"): q / QUARTERS for a, q in quarters}
        folder = blend(base.policy.model, folders, Path(scratch) / "blend", most_rank)
        loaded = load_folder(base.policy, folder, name, "blend", adapter_digest(folder))
        stamp = fingerprint_on(base.policy, probe, loaded).text()
        sources = ", ".join(f"{a.served_name}*{q / QUARTERS:g}" for a, q in quarters)
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
    return version, sources
