"""A gateway that is started before there is anything to serve."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from db import open_store
from errors import ConfigurationError
from flows import serve
from models.serving.gateway.settings import GatewaySettings
from settings import load_settings
from tasks.serving.gateway import NoRound, Serving


def add_round(home: Path, target: str) -> None:
    with open_store(f"sqlite:///{home / 'trace.db'}") as store:
        store.start_round(target, "data", 0, "smoke", load_settings(home=home, target=target).identity())


def test_it_waits_for_a_round_on_its_target(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        add_round(settings_folder, "other" if len(looks) == 1 else "shop")

    home = settings_folder / "mistyped"
    with pytest.raises(NoRound, match=rf"no home in {home}"):
        serve.run_gateway(home, "shop", Serving(), GatewaySettings(), "127.0.0.1", 0)
    assert not home.exists(), "who only looks makes no home"
    with caplog.at_level(logging.INFO, "trace"):
        serve.wait_for_round(settings_folder, "shop", sleep)
    assert looks == [serve.LOOK_SECONDS] * 2, "a round on another target is not its own"
    assert [m for m in caplog.messages if "waiting for a first round" in m] == caplog.messages, "said once"
    assert len(caplog.messages) == 1


def test_without_keys_it_does_not_wait_to_refuse(settings_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="keys"):
        serve.run_gateway(settings_folder, "shop", Serving(), GatewaySettings(), "0.0.0.0", 8900, wait=True)


@pytest.mark.parametrize("wait", [False, True])
def test_a_port_that_is_taken_is_said_before_anything_is_loaded(settings_folder: Path, wait: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of the gateway .*in use.* another with --port"):
            serve.run_gateway(settings_folder, "shop", Serving(), GatewaySettings(), "127.0.0.1", port, wait)
