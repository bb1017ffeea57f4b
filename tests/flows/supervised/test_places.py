"""Places that `trace-agent up` and its services would look for in different folders, and ports that two would share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from errors import ConfigurationError
from flows import services as services_file
from flows.services import Ports, Services
from settings import load_settings


@pytest.mark.parametrize(
    "given",
    [
        {"database": "sqlite:///own.db"}, {"tracking": "sqlite+pysqlite:///own.db"}, {"base_model": "small"},
        {"toolsandbox": "small"}, {"tau2_tasks": "small"},
    ],
)  # fmt: skip
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
    with pytest.raises(ConfigurationError, match="prefect and worker have the same port, 8080; give each its own"):
        Services(load_settings(home=settings_folder), Ports(prefect=8080)).check()
