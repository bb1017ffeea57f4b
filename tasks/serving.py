"""What the gateway serves: the champions of a home's registry, routed by the router of its newest round."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from db import Store, open_store
from environments.catalogue import load_target
from errors import ConfigurationError
from models.adapter_limits import ServerLimits, linear_modules
from models.base import BaseModel, load_base
from models.fleet import Fleet
from models.fleet_hosts import Host, VllmHost
from models.gateway import Gateway
from models.gateway_app import GatewayApp
from models.gateway_settings import GatewaySettings
from models.http_upstream import HttpTokens, HttpUpstream, Pool, Servers
from models.lifecycle import Reconciler
from models.local_engine import EngineHost, LocalEngine
from models.registry import Registry
from models.router import Router
from models.routing import RouteMaker
from models.traffic_log import TrafficLog
from models.upstream import Preset, RenderedUpstream, Upstream
from models.vllm_server import VllmServer
from settings import Settings, load_settings
from tasks.context import registry_name
from tasks.traffic import TRAFFIC

logger = logging.getLogger("trace")
# Turns sampled at once, and the longest conversation, of the model in this process: both decide its memory.
ROWS, CONTEXT = 8, 2048


@dataclass(frozen=True)
class Serving:
    """What `trace-agent serve` is told. `servers` empty: the model in this process answers. `rendered`: servers get
    token ids rendered as in training; else they get the request as it came. `plain`: requests without instructions are
    not put behind the target's own."""

    servers: tuple[str, ...] = ()
    server_key: str = ""
    server_base: str = "base"
    adapters_folder: str = ""
    most_rank: int = 64
    rendered: bool = True
    plain: bool = False
    mode: str = "auto"
    fixed: str = ""


def serving_settings(home: Path | None, target: str | None) -> tuple[Settings, Store]:
    """The settings of the home's newest round (of `target`), and its store: what was trained is what is served."""
    settings = load_settings(home=home, target=target)
    store = open_store(settings.database_url)
    served = [r for r in store.rows("rounds") if r["target"] == target or (not target and r["target"] != TRAFFIC)]
    row = max(served, key=lambda r: r["number"], default=None)
    if row is None:
        what = f"no round on {target!r}" if target else "no round"
        raise ConfigurationError(f"there is {what} in {store.url}; run 'trace-agent improve' first")
    where = {"home": settings.home, "database": settings.database, "tracking": settings.tracking}
    return load_settings(**{**row["config"], **where}), store


def stored_router(settings: Settings, store: Store) -> Router | None:
    """The router of the newest round of the target that fitted one; None when there is none."""
    for row in sorted(store.rows("rounds", target=settings.target), key=lambda r: -r["number"]):
        folder = settings.folder / row["id"] / "router"
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
    environment = target.environment()
    try:
        environment.reset(target.tasks("diagnosis")[0])
        return Preset(target.name, environment.instructions, list(environment.tools), tuple(environment.examples))
    finally:
        environment.close()


def build_gateway(
    settings: Settings, store: Store, serving: Serving, wanted: GatewaySettings, loopback: bool = True
) -> GatewayApp:
    """Everything between a socket and a model, ready to be run. The first reconciliation is done when this returns."""
    router, preset = chosen_router(settings, store, serving), preset_of(settings)
    base = load_base(settings.base_model, settings.dtype, settings.calls, ROWS)
    base.policy.context = min(base.policy.context, CONTEXT)
    registry = Registry(settings.tracking_uri, registry_name(settings.target), settings.folder / "mlartifacts")
    engine = LocalEngine(base.policy)
    engine.start()
    name = serving.server_base if serving.servers else wanted.base
    wanted = replace(wanted, target=settings.target, base=name)
    upstream, hosts = _behind(serving, engine, base, name)
    modules = linear_modules(base.policy.model)
    limits = ServerLimits(base.identity.base, base.identity.revision, serving.most_rank, modules)
    fleet = Fleet(registry, hosts, settings.folder / "served", limits)
    maker = RouteMaker(engine, base.renderer, router, preset) if router is not None else None
    gateway = Gateway(wanted, upstream, fleet, maker, None, None if serving.plain else preset)
    if wanted.sample > 0:
        identity = base.identity
        gateway.log = TrafficLog(store, identity, settings.target, wanted.sample, gateway.metrics.logged)
    for change in fleet.reconcile():
        logger.info("adapters: %s", change)
    if maker is not None:
        maker.warm()
    return GatewayApp(gateway, Reconciler(fleet), loopback)


def _behind(serving: Serving, engine: LocalEngine, base: BaseModel, name: str) -> tuple[Upstream, list[Host]]:
    """Who answers, and what holds the adapters."""
    if not serving.servers:
        return RenderedUpstream(engine, base.renderer), [EngineHost(engine)]
    servers = [VllmServer(url, name, serving.server_key) for url in serving.servers]
    context = min(server.check() for server in servers)
    pool = Pool(Servers(serving.servers, serving.server_key))
    hosts: list[Host] = [VllmHost(server, serving.adapters_folder) for server in servers]
    if serving.rendered:
        return RenderedUpstream(HttpTokens(pool, name, context, base.renderer.stop_ids), base.renderer), hosts
    return HttpUpstream(pool, name), hosts
