"""The gateway as a process: `trace-agent serve`. Order and parameters only; what is served is
`tasks/serving/gateway.py`."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from errors import ProviderError
from models.serving.fleet.releases import title
from models.serving.gateway.settings import LOOPBACK, GatewaySettings, check_host, check_port
from tasks.serving.gateway import NoRound, Serving, build_gateway, serving_settings

# How long requests that are being answered may go on after the gateway was told to stop.
DRAIN_SECONDS = 30
# How often a gateway that waits looks for a round.
LOOK_SECONDS = 10.0

logger = logging.getLogger("trace")


def keep_loaded() -> None:
    """Exempt what is loaded now from garbage collection: looking through it all (torch, transformers: 440,000 objects)
    stops every request for a third of a second, again and again."""
    gc.collect()
    gc.freeze()


def wait_for_round(home: Path | None, target: str | None, sleep: Callable[[float], object] = time.sleep) -> None:
    """Return when the home has a round (on `target`): a gateway has nothing to serve before."""
    said = False
    while True:
        try:
            serving_settings(home, target)[1].close()
            return
        except NoRound as problem:
            if not said:
                logger.info("waiting for a first round: %s", problem)
        said = True
        sleep(LOOK_SECONDS)


class _Announced(uvicorn.Server):
    """Prints `said` once it can be reached: who waits for that line may ask at once."""

    said = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self.said, flush=True)


def run_gateway(
    home: Path | None,
    target: str | None,
    serving: Serving,
    wanted: GatewaySettings,
    host: str,
    port: int,
    wait: bool = False,
) -> None:
    """Serve until stopped; `wait` for a first round. Raises `ConfigurationError` before anything is loaded for what
    cannot work, and `ProviderError` when the model in this process is gone: whoever started the gateway starts another.
    """
    check_host(host, wanted.keys)
    check_port(host, port, "the gateway", "--port")
    if wait:
        wait_for_round(home, target)
    settings, store = serving_settings(home, target, serving.release)
    ended = threading.Event()
    app = build_gateway(settings, store, serving, wanted, host in LOOPBACK, ended.set)

    async def look() -> None:
        server.should_exit = server.should_exit or ended.is_set()

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=64 << 10,
        callback_notify=look,
        timeout_notify=1,
    )
    server = _Announced(config)
    standing = app.gateway.fleet.standing()
    what = f"{title(standing.serving.number)} of {settings.target}"
    if standing.problem:  # the log has said why
        what += f" ({title(standing.wanted)} cannot be served)"
    server.said = f"serving {what} on http://{host}:{port} (page, /v1, /metrics); stop with Ctrl-C"
    keep_loaded()
    server.run()
    store.close()
    if ended.is_set():
        raise ProviderError("the model in this process is gone, the log says why; start the gateway again")
