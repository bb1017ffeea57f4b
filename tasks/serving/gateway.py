"""What the gateway serves: the champions of a home's registry, routed by the router of its newest round."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from db import Round, Store, open_store
from environments.targets.catalogue import load_target
from errors import ConfigurationError
from models.adapters.limits import ServerLimits, linear_modules
from models.local.base import BaseModel, load_base
from models.router.router import Router
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.hosts import Host, VllmHost
from models.serving.fleet.lifecycle import Reconciler
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import RouteMaker
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings, Preset
from models.serving.gateway.traffic_log import TrafficLog
from models.serving.upstreams.contract import Upstream
from models.serving.upstreams.http import HttpTokens, HttpUpstream, Pool, Servers
from models.serving.upstreams.local_engine import EngineHost, LocalEngine
from models.serving.upstreams.rendered import RenderedUpstream
from settings import Settings, load_settings
from tasks.round.policies import open_servers
from tasks.round.registry import open_registry
from tasks.round.target_prompt import first_opening
from tasks.round.traffic import TRAFFIC

logger = logging.getLogger("trace")
# Turns sampled at once, and the longest conversation, of the model in this process: both decide its memory.
ROWS, CONTEXT = 8, 2048
# What is in memory as weights is bounded by the model, not by the rank.
LOCAL_RANK = 512


@dataclass(frozen=True)
class Serving:
    """The options of `trace-agent serve`. `servers` answer with their models (empty: those of the policy settings when
    their backend is vllm, else the model in this process). `rendered`: servers get token ids rendered as in training;
    else they get the request as it came. `plain`: requests without instructions are not put behind the target's own."""

    servers: tuple[str, ...] = ()
    rendered: bool = True
    plain: bool = False
    mode: str = "auto"
    fixed: str = ""


def serving_settings(home: Path | None, target: str | None) -> tuple[Settings, Store]:
    """The settings of the home's newest round (of `target`), and its store: what was trained is what is served."""
    settings = load_settings(home=home, target=target)
    store = open_store(settings.database_url)
    served = [r for r in store.rows(Round) if r.target == target or (not target and r.target != TRAFFIC)]
    row = max(served, key=lambda r: r.number, default=None)
    if row is None:
        what = f"no round on {target!r}" if target else "no round"
        raise ConfigurationError(f"there is {what} in {store.url}; run 'trace-agent improve' first")
    where = {"home": settings.home, "database": settings.database, "tracking": settings.tracking}
    return load_settings(**{**row.config, **where}), store


def stored_router(settings: Settings, store: Store) -> Router | None:
    """The router of the newest round of the target that fitted one; None when there is none."""
    for row in sorted(store.rows(Round, target=settings.target), key=lambda r: -r.number):
        folder = settings.folder / row.id / "router"
        if (folder / "router.json").is_file():
            return Router.load(folder)
    return None


def chosen_router(settings: Settings, store: Store, serving: Serving) -> Router | None:
    """The stored router in the mode that is asked for; `auto` leaves the mode that the round chose."""
    if serving.mode == "off":
        return Router.always()
    if serving.mode == "fixed":
        if not serving.fixed:
            raise ConfigurationError("mode fixed needs a capability; give --fixed CAPABILITY")
        return Router.always(serving.fixed)
    router = stored_router(settings, store)
    if router is None:
        logger.warning("no round of %s has a router: the base answers, adapters are reached by name", settings.target)
        return None
    return router if serving.mode == "auto" else router.with_mode(serving.mode)


def preset_of(settings: Settings) -> Preset:
    """The target's own instructions, tools and worked examples."""
    target = load_target(settings.target)
    return Preset(target.name, first_opening(target)[0])


def build_gateway(
    settings: Settings, store: Store, serving: Serving, wanted: GatewaySettings, loopback: bool = True
) -> GatewayApp:
    """Everything between a socket and a model, ready to be run. The first reconciliation is done when this returns."""
    router, preset = chosen_router(settings, store, serving), preset_of(settings)
    base = load_base(settings.base_model, settings.dtype, settings.calls, ROWS, settings.cache)
    base.policy.context = min(base.policy.context, CONTEXT)
    registry = open_registry(settings, settings.target)
    engine = LocalEngine(base.policy)
    engine.start()
    if serving.servers:
        policy = settings.policy.model_copy(update={"backend": "vllm", "url": ",".join(serving.servers)})
        settings = settings.model_copy(update={"policy": policy})
    remote = settings.policy.backend == "vllm"
    wanted = replace(wanted, target=settings.target, base=settings.policy.model if remote else wanted.base)
    upstream, hosts = _servers(settings, serving, base) if remote else _this_process(engine, base)
    modules = linear_modules(base.policy.model)
    rank = settings.policy.max_lora_rank if remote else LOCAL_RANK
    limits = ServerLimits(base.identity.base, base.identity.revision, rank, modules)
    fleet = Fleet(registry, hosts, settings.lora_folder if remote else settings.folder / "served", limits)
    maker = RouteMaker(engine, base.renderer, router, preset.prompt) if router is not None else None
    gateway = Gateway(wanted, upstream, fleet, maker, None, None if serving.plain else preset)
    if wanted.sample > 0:
        identity = base.identity
        gateway.log = TrafficLog(store, identity, settings.target, wanted.sample, gateway.metrics.logged)
    for change in fleet.reconcile():
        logger.info("adapters: %s", change)
    if maker is not None:
        maker.warm()
    return GatewayApp(gateway, Reconciler(fleet), loopback)


def _this_process(engine: LocalEngine, base: BaseModel) -> tuple[Upstream, list[Host]]:
    """The model in this process answers, and holds the adapters."""
    return RenderedUpstream(engine, base.renderer), [EngineHost(engine)]


def _servers(settings: Settings, serving: Serving, base: BaseModel) -> tuple[Upstream, list[Host]]:
    """The servers answer; each holds the adapters."""
    servers, policy = open_servers(settings), settings.policy
    context = min(server.check() for server in servers)
    key = os.environ.get(policy.api_key_env, "") if policy.api_key_env else ""
    pool = Pool(Servers(policy.urls, key))
    hosts: list[Host] = [VllmHost(server, policy.server_folder) for server in servers]
    if serving.rendered:
        return RenderedUpstream(HttpTokens(pool, policy.model, context, base.renderer.stop_ids), base.renderer), hosts
    return HttpUpstream(pool, policy.model), hosts
