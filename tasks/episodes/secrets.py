"""What must not be read on a page or in a trace: the keys and passwords that the settings know of.

Episodes hold what a target and its tools say. That is not expected to be a key of ours; where it is one all the same
(an environment that prints its variables), it is taken out before anything is written.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlparse

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from settings import Settings
from tasks.episodes.shown import Hide
from tasks.reporting.figures import RoundFigures

HIDDEN = "(hidden)"
# Shorter values stand in ordinary words: to hide them would tear texts apart and hide nothing.
SHORTEST = 8


def secrets_of(settings: Settings) -> list[str]:
    """The keys and passwords of a round's settings, also as JSON writes them, longest first."""
    keys = settings.analyst.api_key_variable, settings.synthesizer.api_key_variable, settings.policy.api_key_env
    named = (*keys, settings.unattended.webhook_variable)
    found = {os.environ.get(name, "") for name in named if name}
    found |= {key.strip() for key in settings.gateway_keys.get_secret_value().split(",")}
    models = settings.analyst.api_base, settings.synthesizer.api_base, *settings.policy.urls
    for address in (settings.database, settings.tracking, settings.runner_address, *models):
        parts = urlparse(address)
        # PostgreSQL takes it from the query, too, where addresses are shown without it as well.
        asked = [value for name, _, value in (p.partition("=") for p in parts.query.split("&")) if name == "password"]
        with suppress(
            ArgumentError, ValueError
        ):  # a server's address is no database's, whose password may hold a slash
            asked.append(make_url(address).password or "")
        for password in (parts.password or "", *asked):
            found |= {password, unquote(password)}
    return sorted(_as_written({secret for secret in found if len(secret) >= SHORTEST}), key=len, reverse=True)


def _as_written(secrets: set[str]) -> set[str]:
    """The secrets, and what becomes of them in a JSON document, which escapes quotes, backslashes and perhaps what is
    not ASCII, and in one inside another: calls are shown as JSON, and what is called takes and gives such documents."""
    for _ in range(2):
        secrets = secrets | {json.dumps(s, ensure_ascii=escaped)[1:-1] for s in secrets for escaped in (False, True)}
    return secrets


def hiding(settings: Settings) -> Hide:
    """What takes these secrets out of a text."""
    secrets = secrets_of(settings)

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return text

    return hide


def without_secrets(figures: RoundFigures, hide: Hide) -> RoundFigures:
    """A round's figures with every text as `hide` gives it: definitions and reasons quote what checks and servers
    said."""

    def hidden(told: Any) -> Any:
        if isinstance(told, dict):
            return {name: hidden(value) for name, value in told.items()}
        if isinstance(told, list):
            return [hidden(value) for value in told]
        return hide(told) if isinstance(told, str) else told

    return RoundFigures.model_validate(hidden(figures.as_json()))
