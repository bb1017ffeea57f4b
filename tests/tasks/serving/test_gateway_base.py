"""Who answers behind the gateway, and where its own base lies: on the GPU where it answers, in the machine's memory
where servers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from db import open_store
from errors import ConfigurationError
from models.serving.gateway.settings import GatewaySettings
from settings import load_settings
from tasks.serving import gateway
from tasks.serving.gateway import Serving, build_gateway, serving_settings


class Loaded(Exception):
    """The base would be loaded now."""


@pytest.mark.parametrize(
    ("backend", "servers", "host"),
    [("local", (), False), ("local", ("http://127.0.0.1:8000",), True), ("vllm", (), True)],
)
def test_a_base_that_only_routes_stays_off_the_gpu_that_a_server_fills(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, servers: tuple[str, ...], host: bool
) -> None:
    given: list[dict[str, Any]] = []

    def load(*_: Any, **named: Any) -> Any:
        given.append(named)
        raise Loaded

    monkeypatch.setattr(gateway, "load_base", load)
    policy = {"backend": backend} | ({"url": "http://127.0.0.1:8001"} if backend == "vllm" else {})
    settings = load_settings(home=settings_folder, policy=policy)
    store: Any = None  # it is not reached
    with pytest.raises(Loaded):
        build_gateway(settings, store, Serving(servers=servers), GatewaySettings())
    assert given == [{"host": host}]


def test_requests_can_be_passed_on_to_servers_alone(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "load_base", lambda *_, **__: pytest.fail("the base is loaded"))
    store: Any = None  # it is not reached
    with pytest.raises(
        ConfigurationError, match=r"--server-chat .* policy\.backend = 'local' .*; give --server ADDRESS"
    ):
        build_gateway(load_settings(home=settings_folder), store, Serving(rendered=False), GatewaySettings())


@pytest.mark.parametrize("trained", ["local", "vllm"])
def test_the_backend_of_the_round_serves_unless_file_or_environment_name_another(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, trained: str
) -> None:
    def served() -> str:
        settings, store = serving_settings(settings_folder, None)
        store.close()
        return settings.policy.backend

    made = load_settings(home=settings_folder, policy={"backend": trained})
    with open_store(made.database_url) as store:
        store.start_round("shop", "d", 0, "laptop", made.identity())
    assert served() == trained
    monkeypatch.setenv("TRACE_PROFILE", "gpu")  # which is not a word about this round
    assert served() == trained
    for wanted in ("local", "vllm"):
        monkeypatch.setenv("TRACE_POLICY__BACKEND", wanted)
        assert served() == wanted
