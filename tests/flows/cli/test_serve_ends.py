"""A gateway whose model is gone: its process ends, so that whoever started it starts another."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from db import open_store
from errors import ProviderError
from flows import serve
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.local_engine import LocalEngine
from models.serving.upstreams.rendered import RenderedUpstream
from settings import load_settings
from tasks.serving.gateway import Serving
from tests.models.serving.gateway_servers import HandMadeFleet


def test_a_gateway_ends_with_an_error_once_the_thread_of_its_model_has_ended(
    tiny_model: Any, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, renderer = tiny_model
    home = load_settings(home=settings_folder, target="shop"), open_store(f"sqlite:///{settings_folder / 'trace.db'}")

    def build(*given: Any) -> GatewayApp:
        engine = LocalEngine(policy, given[-1])
        engine.start()
        engine.call(sys.exit)
        return GatewayApp(Gateway(given[3], RenderedUpstream(engine, renderer), HandMadeFleet()))

    for name, stand_in in (("serving_settings", lambda *_: home), ("build_gateway", build), ("keep_loaded", int)):
        monkeypatch.setattr(serve, name, stand_in)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def reached(said: str, **_: Any) -> None:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        told.append(said)

    told: list[str] = []
    monkeypatch.setattr(serve, "print", reached, raising=False)
    with pytest.raises(ProviderError, match="start the gateway again"):
        serve.run_gateway(settings_folder, "shop", Serving(), GatewaySettings(), "127.0.0.1", port)
    assert told == [f"serving release 1 of shop on http://127.0.0.1:{port} (page, /v1, /metrics); stop with Ctrl-C"]
