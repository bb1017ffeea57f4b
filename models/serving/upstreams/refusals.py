"""What a server behind the gateway answered, and what a client learns where that is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from models.serving.openai_api.errors import KINDS, ApiError, too_long
from models.serving.upstreams.contract import AdapterGone, Turn

LONGEST_MESSAGE = 500
BROKEN_OFF = "the server behind the gateway broke off its answer; ask again"


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        raise ApiError(502, "the server behind the gateway answered something that is not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(502, "the server behind the gateway answered something that is no answer")
    return body


def part_of(raw: bytes) -> dict[str, Any]:
    """An answer, or a part of one. Raises `ApiError` for an error in its place: the status was sent before."""
    body = _json(raw)
    if error := body.get("error"):
        code = error.get("code") if isinstance(error, dict) else None
        raise refusal_of(code if isinstance(code, int) else 502, raw)
    return body


def check_model(body: Mapping[str, Any], asked: str) -> None:
    """Raises `ApiError` (502) for an answer of another model: a proxy in between may fall back without a word."""
    if body.get("model") != asked:
        raise ApiError(502, f"the server answered as {body.get('model')!r:.80}, asked was {asked!r}")


def problem_of(status: int, raw: bytes, turn: Turn, address: str) -> Exception:
    """What a client learns of a server's refusal. The server's own words are passed on only where the client's
    request is at fault: others may tell of machines and paths."""
    if status == 404 and turn.adapter is not None:
        return AdapterGone(address)
    return refusal_of(status, raw)


def refusal_of(status: int, raw: bytes) -> ApiError:
    try:
        said = json.loads(raw)
        error = said.get("error") or said
        message = str(error.get("message") or "")[:LONGEST_MESSAGE]
    except (ValueError, AttributeError):
        message = ""
    if status == 400 and "context" in message and "length" in message:
        return too_long(message)
    if status in (400, 413, 422):
        return ApiError(400, message or "the server behind the gateway refused the request")
    if status == 429:
        return ApiError(429, "the servers behind the gateway are busy; ask again")
    return ApiError(
        status if status in KINDS and status >= 500 else 502, "the server behind the gateway failed; ask again"
    )
