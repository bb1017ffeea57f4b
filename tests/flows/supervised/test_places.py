"""Places that `trace-agent up` and its services would look for in different folders, and ports that two would share."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from errors import ConfigurationError
from flows import services as services_file
from flows.services import Ports, Services
from settings import load_settings
from tests.integration.servers import free_port


@pytest.mark.parametrize(
    "given",
    [{"database": "sqlite:///own.db"}, {"tracking": "sqlite+pysqlite:///own.db"}, {"base_model": "small"}],
)
def test_a_place_that_the_services_would_look_for_elsewhere_is_refused(
    settings_folder: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the project's folder: `up` would wait for rounds in another database than the worker's."""
    (settings_folder / "small").mkdir()
    ((name, place),) = given.items()
    with pytest.raises(ConfigurationError, match=f"{name} is '{re.escape(place)}'; .*; give a whole path"):
        Services(load_settings(**given), Ports()).check()
    monkeypatch.setattr(services_file, "PROJECT", settings_folder)
    Services(load_settings(**given), Ports()).check()


def test_two_services_on_one_port_are_refused(settings_folder: Path) -> None:
    """The one that listens would answer for both when they are asked whether they are well."""
    ports = Ports(*(free_port() for _ in range(3)), worker=0)
    with pytest.raises(ConfigurationError, match=f"mlflow and worker have the same port, {ports.mlflow}; give each"):
        Services(load_settings(home=settings_folder), replace(ports, worker=ports.mlflow)).check()
