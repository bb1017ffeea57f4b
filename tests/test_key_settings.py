"""A key that stands where its variable's name belongs: it is refused, and nothing that people read shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from settings import Settings, load_settings
from tasks.operations import announcements
from tasks.operations.announcements import failure_announced
from tasks.round.analyst import models_of
from tasks.round.policies import open_servers
from tasks.round.preflight import check_model
from tasks.unattended.notices import Notice, check_webhook

FIELDS = (
    ("analyst", "api_key_variable"), ("synthesizer", "api_key_variable"), ("policy", "api_key_env"),
    ("unattended", "webhook_variable"),
)  # fmt: skip
NO_NAMES = ("sk-ant-api03-CANARY", "https://hooks.example.com/services/CANARY", "8CANARY", "CANARY\n")
ASKS = {"analyst": {"kind": "llm", "model": "openai/x"}, "synthesizer": {"kind": "llm", "model": "openai/y"}}


def given(part: str, field: str, value: object) -> dict[str, Any]:
    return {**ASKS, part: {**ASKS.get(part, {}), field: value}}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Notice]:
    notices: list[Notice] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: notices.append(notice))
    return notices


@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_a_key_or_an_address_instead_of_a_variables_name_is_refused_and_not_shown(
    settings_folder: Path, said: list[Notice], part: str, field: str
) -> None:
    for value in (*NO_NAMES, ["CANARY"]):
        with (
            pytest.raises(ConfigurationError, match=rf"setting {part}\.{field} = \(not shown\)") as raised,
            failure_announced(load_settings(), scheduled=True),
        ):
            load_settings(**given(part, field, value))
        assert "CANARY" not in f"{raised.value} {said[-1]}"
    assert "put the key into a variable and its name here" in said[0].text
    assert len(said) == len(NO_NAMES) + 1
    assert load_settings(**given(part, field, "")) == load_settings(**ASKS)


@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_a_key_that_could_be_a_name_is_not_shown_where_no_such_variable_is_set(
    settings_folder: Path, said: list[Notice], part: str, field: str
) -> None:
    def checked(settings: Settings) -> None:
        for name, how in models_of(settings):
            check_model(settings, name, how)
        open_servers(settings)
        check_webhook(settings)

    for value, shown in (("gsk_0Canary", False), ("THE_VARIABLE", True)):
        settings = load_settings(**given(part, field, value))
        with (
            pytest.raises(ConfigurationError, match=rf"{part}\.{field} names") as raised,
            failure_announced(settings, scheduled=True),
        ):
            checked(settings)
        assert (value in str(raised.value), value in said[-1].text) == (shown, shown)
