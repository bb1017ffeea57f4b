"""A release as a policy for `trace-agent evaluate`: its router chooses among its adapters, task by task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from db import AdapterRow, ReleaseRow, Store, open_store
from environments.contract import Target, TargetTask, content_hash
from errors import AdapterError, ConfigurationError
from models.adapters.loading import load_folder
from models.local.base import load_base
from models.objects import files_of
from models.policy import Sampling
from models.router.first_observation import openings_by_task
from settings import Settings
from tasks.measuring.policy_names import LoadedPolicy, PolicyName, PolicyOptions
from tasks.releases.lifecycle import live_release, member_adapters, release_numbered, release_router
from tasks.round.policies import check_policy, open_backend
from tasks.round.registry import open_registry
from tasks.round.target_prompt import first_opening

_NAME = re.compile(r"release(?:@(?P<number>[0-9]+))?")


def release_named(store: Store, target: str, name: str) -> ReleaseRow:
    """The release that `release` (the live one) or `release@N` names. Raises `ConfigurationError` or `StoreError`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(f"policy {name!r} names no release; write release, or release@N")
    if match["number"]:
        return release_numbered(store, target, int(match["number"]))
    live = live_release(store, target)
    if live is None:
        raise ConfigurationError(
            f"no release of {target!r} is live in {store.url}: the bare base answers; run 'trace-agent improve', or "
            "name one with release@N"
        )
    return live


def load_release(name: PolicyName, options: PolicyOptions, settings: Settings, target: Target) -> LoadedPolicy:
    """The release's base, its adapters (digests checked) and its router, ready to play.

    Raises `ConfigurationError` for a release of another base or of other data of the target, `AdapterError` for a
    member whose folder is gone or was changed."""
    check_policy(settings)
    with open_store(settings.database_url) as store:
        release = release_named(store, settings.target, name.text)
        if release.data_hash != target.data_hash:
            raise ConfigurationError(
                f"release {release.number} was proven on data {release.data_hash} of {settings.target}, which is now "
                f"{target.data_hash}: figures on it cannot be compared; evaluate a release of the present data"
            )
        trained = {c: str(m["adapter_id"]) for c, m in release.members.items() if m["adapter_id"]}
        rows = {c: store.row(AdapterRow, id=identity) for c, identity in trained.items()}
    how = settings.dtype, settings.calls, settings.rollout.rows, settings.cache, settings.devices.shard
    base = load_base(settings.base_model, *how)
    if (release.base, release.base_revision) != (base.identity.base, base.identity.revision):
        raise ConfigurationError(
            f"release {release.number} stands on {release.base} ({release.base_revision}), the settings' base is "
            f"{base.identity.base} ({base.identity.revision}); set base_model"
        )
    policy, router = open_backend(settings, base).policy, release_router(settings.folder, release, settings.files)
    names = {
        capability: load_folder(policy, folder, capability, origin, release.members[capability]["sha256"])
        for capability, origin, folder in _folders(settings, release, rows)
    }

    def choose(tasks: Sequence[TargetTask]) -> list[str | None]:
        if router is None:
            return [None] * len(tasks)
        given = openings_by_task(target.environment, base.renderer, tasks, first_opening(target)[0])
        decisions = router.route(base.policy, base.renderer, list(given.values()))
        chosen = {task: names.get(d.capability) for task, d in zip(given, decisions, strict=True)}
        return [chosen.get(task.id) for task in tasks]

    rollout = settings.rollout
    temperature = rollout.temperature if options.temperature is None else options.temperature
    what = content_hash([release.number, {c: m["sha256"] for c, m in release.members.items()}, release.router])
    return LoadedPolicy(
        name,
        policy,
        Sampling(temperature, options.max_tokens or rollout.max_tokens),
        base.renderer,
        window=2 * policy.rows,
        context=policy.context,
        choose=choose,
        adapters=tuple(names.values()),
        acting=replace(policy.identity(), adapter=f"release-{release.number}-{what}"),
        release=release.number,
        close=policy.close,
    )


def _folders(
    settings: Settings, release: ReleaseRow, rows: Mapping[str, AdapterRow | None]
) -> Iterator[tuple[str, str, Path]]:
    """Capability, origin and folder of each member: of those with `rows` where their round left them; of the others,
    blends, which no round trained, from the registry, as the gateway has them."""
    for capability, row in rows.items():
        folder = files_of(settings).fetch(row.path) if row is not None else None
        if row is None or folder is None or not folder.is_dir():
            raise AdapterError(
                f"the adapter for {capability!r} of release {release.number} is gone ({folder}); restore its folder"
            )
        yield capability, row.round_id, folder
    blends = {c: m for c, m in release.members.items() if c not in rows}
    if blends:
        registry = open_registry(settings, settings.target)
        for capability, adapter in member_adapters(registry, replace(release, members=blends)).items():
            yield capability, "blend", registry.download(adapter, settings.folder / "adapters")
