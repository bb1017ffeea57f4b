"""Places in the settings that `trace-agent up` and its services would look for in different folders."""

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
