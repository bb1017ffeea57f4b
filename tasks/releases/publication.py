"""MLflow is made to say what the store says; a release's adapters and router are checked against the digests there."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from db import ReleaseRow, Store
from errors import AdapterError, StoreError
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import Registry
from models.adapters.releases import (
    answering,
    drop_champion,
    put_release,
    read_aliases,
    registered_version,
    set_champion,
    set_live,
)
from models.objects import HomeFiles
from tasks.releases.lookup import live_release, releases_of

if TYPE_CHECKING:
    from models.router.router import Router

logger = logging.getLogger("trace")


def publish(store: Store, registry: Registry, target: str) -> list[str]:
    """Make MLflow agree with the store, and say what was changed; nothing the second time.

    This is how a death between the transaction and MLflow heals. An alias that a person moved in MLflow is put back,
    with a warning. Where the store has no release of the target at all MLflow is left alone, with a warning when it
    has champions. Raises `AdapterError` when a member's version was deleted in MLflow, `StoreError` when MLflow does
    not answer.
    """
    changes: list[str] = []
    while True:
        live = live_release(store, target)
        with answering(registry, f"what is live on {target}"):
            changes += _publish(store, registry, target, live)
        after = live_release(store, target)
        # Another process may have promoted in between, and these aliases would be older than its own.
        if (after and after.id) == (live and live.id):
            return changes


def member_adapters(registry: Registry, release: ReleaseRow) -> dict[str, RegisteredAdapter]:
    """A release's adapters by capability. Raises `AdapterError` when the registry lacks one or has another digest."""
    found = {}
    for capability, member in release.members.items():
        adapter = registered_version(registry, capability, member["version"])
        if adapter.sha256 != member["sha256"] or adapter.name != member["model"]:
            raise AdapterError(
                f"release {release.number} of {release.target} holds {member['model']} version {member['version']} "
                f"with SHA-256 {member['sha256'][:16]}..., the registry has {adapter.name} with "
                f"{adapter.sha256[:16]}...; its version was replaced: go back with "
                "'trace-agent rollback', or train it again"
            )
        found[capability] = adapter
    return found


def check_files(registry: Registry, release: ReleaseRow) -> None:
    """Raise `AdapterError` unless the registry has the bytes of all members as they were registered."""
    with tempfile.TemporaryDirectory() as place:
        for adapter in member_adapters(registry, release).values():
            registry.download(adapter, Path(place))


def release_router(home_folder: Path, release: ReleaseRow, files: str = "") -> Router | None:
    """The router that was fitted for a release; None when it has none. It is fetched from the address `files` where the
    home lacks it. Raises `StoreError` when its files are gone or it is another than the one that was released; a
    release of an older home may not know the version."""
    from models.router.router import Router

    if not release.router_path:
        return None
    router = Router.load(HomeFiles(home_folder, files).fetch(release.router_path))
    if release.router and router.version != release.router:
        raise StoreError(
            f"release {release.number} of {release.target} has router {release.router}, but "
            f"{home_folder / release.router_path} holds {router.version}: its files were changed; restore them, or go "
            "back with 'trace-agent rollback'"
        )
    return router


def _publish(store: Store, registry: Registry, target: str, live: ReleaseRow | None) -> list[str]:
    aliases = read_aliases(registry)
    known = releases_of(store, target)
    if not known:
        if aliases.champions:
            logger.warning(
                "MLflow has champions of %s (%s), the store has no release of it: they are left alone and not served",
                target,
                ", ".join(sorted(aliases.champions)),
            )
        return []
    # The alias `live` is moved last: where it is right, all were right once.
    whole = aliases.live == (None if live is None else live.id)
    ours = {m["model"] for row in known for m in row.members.values()}
    wanted = {} if live is None else {m["model"]: m["version"] for m in live.members.values()}
    version = put_release(registry, live.id, _tags(live), asdict(live)) if live is not None and not whole else None
    changes = []
    for model in sorted(wanted.keys() | aliases.champions.keys()):
        before, after = aliases.champions.get(model), wanted.get(model)
        if before == after:
            continue
        if after is None:
            drop_champion(registry, model)
        else:
            set_champion(registry, model, after)
        changes.append(f"champion of {model}: {before or 'none'} -> {after or 'none'}")
        if whole or model not in ours:
            logger.warning(
                "the alias champion of %s was on version %s, not by a release: put back to %s, as %s has it",
                model,
                before or "none",
                after or "none",
                "the bare base" if live is None else f"release {live.number}",
            )
    if not whole:
        set_live(registry, version)
        changes.append(f"live: {aliases.live or 'none'} -> {'none' if live is None else f'release {live.number}'}")
    return changes


def _tags(release: ReleaseRow) -> dict[str, str]:
    members = {f"member.{c}": f"{m['model']}/{m['version']} {m['sha256']}" for c, m in release.members.items()}
    plain = ("number", "base", "base_revision", "data_hash", "router", "router_path")
    return {name: str(getattr(release, name)) for name in plain} | {"round": release.round_id or ""} | members
