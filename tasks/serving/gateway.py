"""What the gateway serves: a release of a home, with the router that was fitted for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from db import ReleaseRow, Round, Store, open_store
from db.copies import check_there
from environments.targets.catalogue import load_target
from errors import ConfigurationError, NoHome
from models.adapters.limits import ServerLimits, linear_modules
from models.local.base import BaseModel, load_base, weights_of
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.hosts import Host
from models.serving.fleet.lifecycle import RECONCILE_SECONDS, Reconciler
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import RouteMaker
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings, Preset
from models.serving.gateway.traffic_log import TrafficLog
from models.serving.upstreams.contract import TokenEngine, Upstream
from models.serving.upstreams.http import HttpTokens, HttpUpstream
from models.serving.upstreams.local_engine import EngineHost, LocalEngine
from models.serving.upstreams.rendered import LONGEST, RenderedUpstream
from settings import MachineSettings, Settings, load_settings
from settings_parts import PolicySettings
from tasks.releases.lifecycle import live_release, release_numbered
from tasks.releases.lookup import served_round, set_target
from tasks.round.registry import open_registry
from tasks.round.target_prompt import first_opening
from tasks.serving.releases import HomeReleases, Routing
from tasks.serving.replicas import open_replicas

logger = logging.getLogger("trace")
# Turns sampled at once, and the longest conversation, of the model in this process: both decide its memory.
ROWS, CONTEXT = 8, 2048
# What a request may take beyond its deadline: adapters of a release that was replaced stay loaded for as long.
GRACE_SECONDS = 5.0
# What is in memory as weights is bounded by the model, not by the rank.
LOCAL_RANK = 512


@dataclass(frozen=True)
class Serving:
    """The options of `trace-agent serve`. `servers` answer with their models (empty: those of the policy settings when
    their backend is vllm, else the model in this process). `rendered`: servers get token ids rendered as in training;
    else they get the request as it came. `plain`: requests without instructions are not put behind the target's own.
    `release` pins one by its number; 0 follows the live one."""

    servers: tuple[str, ...] = ()
    rendered: bool = True
    plain: bool = False
    routing: Routing = field(default_factory=Routing)
    release: int = 0


class NoRound(ConfigurationError):
    """A home has nothing to serve, yet."""


class _SaidSettings(MachineSettings):
    """What `trace.toml` and the environment say of the policy themselves: no profile's values stand in for the rest."""

    policy: PolicySettings = PolicySettings()


def serving_settings(home: Path | None, target: str | None, release: int = 0) -> tuple[Settings, Store]:
    """The settings of the round that made what is to be served (of `target`, else of the target that is set, else of
    the newest round's), and the home's store: what was trained is what is served. `policy.backend` is the round's, too,
    unless file or environment say another themselves. Raises `NoRound` for a home without a round, `StoreError` for a
    `release` that it does not have."""
    settings = load_settings(home=home, target=target)
    try:
        check_there(settings.database_url)
    except NoHome as problem:
        raise NoRound(str(problem)) from None
    store, wanted_target = open_store(settings.database_url), set_target(settings)
    row = served_round(store, wanted_target)
    if row is None:
        what = f"no round on {wanted_target!r}" if wanted_target else "no round"
        store.close()
        raise NoRound(f"there is {what} in {store.url}; run 'trace-agent improve' first")
    wanted = release_numbered(store, row.target, release) if release else live_release(store, row.target)
    made = _round_of(store, wanted) or row
    where = {name: getattr(settings, name) for name in ("home", "files", "database", "tracking")}
    said = _SaidSettings().policy.model_dump(include={"backend"}, exclude_unset=True)
    policy = {**made.config.get("policy", {}), **said}
    return load_settings(**{**made.config, **where, "policy": policy}), store


def _round_of(store: Store, release: ReleaseRow | None) -> Round | None:
    """The round that made a release, or its nearest ancestor that a round made."""
    while release is not None:
        if release.round_id is not None:
            return store.round(release.round_id)
        release = store.row(ReleaseRow, id=release.parent_id) if release.parent_id else None
    return None


def preset_of(settings: Settings) -> Preset:
    """The target's own instructions, tools and worked examples."""
    return Preset(settings.target, first_opening(load_target(settings.target))[0])


def build_gateway(
    settings: Settings,
    store: Store,
    serving: Serving,
    wanted: GatewaySettings,
    loopback: bool = True,
    ended: Callable[[], object] = lambda: None,
) -> GatewayApp:
    """Everything between a socket and a model, ready to be run. The first reconciliation is done when this returns.
    `ended` is called, by another thread, when the model in this process is gone for good. Raises `ConfigurationError`,
    before anything is loaded, where requests are to be passed on and there are no servers."""
    if serving.servers:
        policy = settings.policy.model_copy(update={"backend": "vllm", "url": ",".join(serving.servers)})
        settings = settings.model_copy(update={"policy": policy})
    remote = settings.policy.backend == "vllm"
    if not (remote or serving.rendered):
        raise ConfigurationError(
            f"--server-chat passes requests on to vLLM servers, and with policy.backend = {settings.policy.backend!r} "
            "the model in this process answers; give --server ADDRESS, or leave --server-chat out"
        )
    preset = preset_of(settings)
    # Before servers the base only routes: a server on this machine fills the GPU.
    base = load_base(settings.base_model, settings.dtype, settings.calls, ROWS, settings.cache, host=remote)
    base.policy.context = min(base.policy.context, CONTEXT)
    engine = LocalEngine(base.policy, ended)
    engine.start()
    base_name = settings.policy.model if remote else wanted.base
    wanted = replace(wanted, target=settings.target, base=base_name, pinned=serving.release)
    upstream, hosts = _servers(settings, serving, base) if remote else _this_process(settings, engine, base)
    modules = linear_modules(base.policy.model)
    rank = settings.policy.max_lora_rank if remote else LOCAL_RANK
    limits = ServerLimits(base.identity.base, base.identity.revision, rank, modules)
    maker = RouteMaker(engine, base.renderer, preset.prompt)
    registry = open_registry(settings, settings.target)
    releases = HomeReleases(
        store,
        registry,
        settings.folder,
        settings.target,
        base.identity,
        maker.warm,
        serving.routing,
        serving.release,
        settings.files,
    )
    releases.heal()
    folder = settings.lora_folder if remote else settings.folder / "served"
    # Other gateways may share the servers, and hear later of a release.
    linger = RECONCILE_SECONDS + GRACE_SECONDS if remote else 0.0
    fleet = Fleet(releases, hosts, folder, limits, wanted.deadline + GRACE_SECONDS, linger)
    gateway = Gateway(wanted, upstream, fleet, maker, None, None if serving.plain else preset)
    if wanted.sample > 0:
        identity = base.identity
        gateway.log = TrafficLog(store, identity, settings.target, wanted.sample, gateway.metrics.logged)
    for change in fleet.reconcile():
        logger.info("adapters: %s", change)
    return GatewayApp(gateway, Reconciler(fleet), loopback)


def _rendered(settings: Settings, engine: TokenEngine, base: BaseModel) -> RenderedUpstream:
    """What renders and samples as the release was proven, where a request does not say otherwise."""
    longest = max(LONGEST, settings.rollout.max_tokens)
    return RenderedUpstream(engine, base.renderer, longest, settings.rollout.temperature)


def _this_process(settings: Settings, engine: LocalEngine, base: BaseModel) -> tuple[Upstream, list[Host]]:
    """The model in this process answers, and holds the adapters."""
    return _rendered(settings, engine, base), [EngineHost(engine)]


def _servers(settings: Settings, serving: Serving, base: BaseModel) -> tuple[Upstream, list[Host]]:
    """The servers answer; each holds the adapters."""
    found, name = open_replicas(settings, weights_of(base, settings.cache)), settings.policy.model
    if serving.rendered:
        engine = HttpTokens(found.pool, name, found.context, base.renderer.stop_ids)
        return _rendered(settings, engine, base), found.hosts
    return HttpUpstream(found.pool, name), found.hosts
