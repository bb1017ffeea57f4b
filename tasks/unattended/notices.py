"""Telling people: a Prefect event and, where one is configured, a webhook, for what a scheduled run has come to.

    notify(settings, Notice("promoted", "shop", "release 3 of shop is live: ...", {"release": 3}))

A notice never stops a round. What the webhook's receiver did not take lies in HOME/outbox and is sent again with the
next notice, at the start of every round, by every watch, and by the deployment `housekeeping`. One that cannot be kept,
as on a full disk, is sent all the same, once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from db.values.types import utc_now
from errors import ConfigurationError
from settings import Settings
from settings_parts import shown_variable
from tasks.unattended.servers import prefect_server

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("trace")

Kind = Literal[
    "started", "promoted", "refused", "underpowered", "budget-reached", "failed", "rolled-back", "fell", "hung", "died",
    "approval-asked", "unwell",
]  # fmt: skip
# How long a receiver may take to be reached, how long to answer (one that does its work first takes longer than 5 s: it
# would be sent the same notice again and again, and no other), and after how long the rest waits for the next time.
SECONDS, SECONDS_TO_ANSWER, SECONDS_IN_ALL = 5.0, 30.0, 60.0
# A receiver that is gone for good must not fill the disk; the oldest go first, with a warning. As many
# that were refused are kept beside those that wait.
MOST_KEPT = 500
# What a receiver says of one notice, which it will say again. Any other refusal is of the address, or of all notices: a
# key that was changed, a hook that was deleted (401, 403, 404, 410). They wait until somebody has mended that.
REFUSED, SUFFIX = (400, 413, 422), ".refused"


@dataclass(frozen=True)
class Notice:
    """What happened on a target: one sentence for people, `details` (JSON-able) for programs."""

    kind: Kind
    target: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)


def notify(settings: Settings, notice: Notice) -> None:
    """Emit the event, put the notice in the outbox and empty it as far as the receiver takes it. Never raises."""
    logger.debug("notice (%s): %s", notice.kind, notice.text)
    for way in (_emit_event, _to_webhook):
        try:
            way(settings, notice)
        except Exception as problem:  # whatever it is, the round is worth more than the news of it
            logger.warning("a notice could not be sent (%s): %s", type(problem).__name__, problem)


def _emit_event(settings: Settings, notice: Notice) -> None:
    _emit(notice)


def _to_webhook(settings: Settings, notice: Notice) -> None:
    if not settings.unattended.webhook_variable:
        return
    # Names sort by time, so the oldest is sent first.
    name, body = f"{utc_now():%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:8]}", _body(settings, notice)
    try:
        _keep(outbox(settings), name, body)
    except OSError as problem:
        logger.warning("the outbox cannot be written (%s): a notice is sent once, and not kept", problem.strerror)
        _send_once(settings, name, body)
        return
    deliver(settings)


def outbox(settings: Settings) -> Path:
    """Where notices lie that the webhook's receiver has not taken yet."""
    return settings.folder / "outbox"


def check_webhook(settings: Settings) -> None:
    """Raise `ConfigurationError` for a webhook that cannot work; the address is in no message."""
    name = settings.unattended.webhook_variable
    if not name:
        return
    import httpx

    try:  # by whoever will ask there: a line's end from a file with Windows' ones, or a port that is no number
        address = httpx.URL(os.environ.get(name, ""))
    except httpx.InvalidURL:
        address = httpx.URL("")
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigurationError(
            f"unattended.webhook_variable names the variable {shown_variable(name)}, which holds no http(s) address; "
            "put the webhook's address there, or clear the setting"
        )


def deliver(settings: Settings) -> int:
    """Send what lies in the outbox, oldest first, until the receiver does not take one, or `SECONDS_IN_ALL` are over;
    how many were sent. A notice that the receiver refuses for what it is (`REFUSED`) is put aside, so that it does not
    hold up the rest."""
    waiting = sorted(outbox(settings).glob("*.json"))
    if not waiting or not settings.unattended.webhook_variable:
        return 0
    check_webhook(settings)
    import httpx

    sent, until = 0, time.monotonic() + SECONDS_IN_ALL
    with _client() as client:
        for number, path in enumerate(waiting):
            if number and time.monotonic() > until:
                _later(f"more than {SECONDS_IN_ALL:g} s", len(waiting) - sent)
                break
            try:
                answer = _post(client, settings, path.stem, path.read_bytes())
            except FileNotFoundError:  # another process has sent it
                continue
            except httpx.HTTPError as problem:
                _later(type(problem).__name__, len(waiting) - sent)
                break
            if answer.is_success:
                path.unlink(missing_ok=True)
                sent += 1
            elif answer.status_code in REFUSED:
                aside = path.with_suffix(SUFFIX)
                logger.warning("the webhook refuses a notice with status %d: it stays as %s", answer.status_code, aside)
                with suppress(FileNotFoundError):  # another process has put it aside
                    path.rename(aside)
                _bound(path.parent, SUFFIX)
            else:
                _later(f"status {answer.status_code}", len(waiting) - sent)
                break
    return sent


def left_lying(settings: Settings, days: float) -> tuple[int, int]:
    """How many notices were refused, and how many have waited for longer than so many days."""
    before, moments = time.time() - 86_400 * days, list[float]()
    for path in outbox(settings).glob("*.json"):
        with suppress(FileNotFoundError):  # sent meanwhile
            moments.append(path.stat().st_mtime)
    return len(list(outbox(settings).glob(f"*{SUFFIX}"))), sum(moment < before for moment in moments)


def _later(why: str, left: int) -> None:
    logger.warning("the webhook does not take all notices (%s): %d wait in the outbox, to be sent again", why, left)


def _client() -> httpx.Client:
    import httpx

    # The address is a secret, and httpx would log it with every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return httpx.Client(timeout=httpx.Timeout(SECONDS, read=SECONDS_TO_ANSWER))


def _post(client: httpx.Client, settings: Settings, name: str, body: bytes) -> httpx.Response:
    return client.post(
        os.environ[settings.unattended.webhook_variable],
        content=body,
        headers={"Content-Type": "application/json", "Idempotency-Key": name},
    )


def _send_once(settings: Settings, name: str, body: bytes) -> None:
    check_webhook(settings)
    import httpx

    with _client() as client:
        try:
            answer = _post(client, settings, name, body)
            why = "" if answer.is_success else f"status {answer.status_code}"
        except httpx.HTTPError as problem:  # what it says may hold the address
            why = type(problem).__name__
    if why:
        logger.warning("the webhook did not take a notice that could not be kept (%s): it is lost", why)


def _body(settings: Settings, notice: Notice) -> bytes:
    """The notice as the receiver gets it."""
    body: dict[str, Any] = {"text": f"[trace] {notice.text}"}
    if settings.unattended.webhook_format == "json":
        about = {"target": notice.target, "at": utc_now().isoformat(), "details": notice.details}
        body |= {"event": event_name(notice), **about}
    return json.dumps(body, default=str).encode()


def _keep(folder: Path, name: str, body: bytes) -> None:
    """Write the notice whole or not at all: a temporary name, then the final one."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.part"
    try:
        part.write_bytes(body)
        part.rename(folder / f"{name}.json")
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _bound(folder, ".json")


def _bound(folder: Path, suffix: str) -> None:
    """Keep the newest notices of a kind."""
    for old in sorted(folder.glob(f"*{suffix}"))[:-MOST_KEPT]:
        logger.warning("the webhook did not take more than %d notices: %s is given up", MOST_KEPT, old.name)
        old.unlink(missing_ok=True)


def event_name(notice: Notice) -> str:
    """The name of its Prefect event, for automations: `trace.promoted` and so on."""
    return f"trace.{notice.kind}"


def _emit(notice: Notice) -> None:
    # Without a server the event would start one: outside of a flow, and with no server named, it is left out.
    if "prefect" not in sys.modules and prefect_server() is None:
        return
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.events import emit_event
    from prefect.settings import get_current_settings

    if not (FlowRunContext.get() or TaskRunContext.get() or get_current_settings().api.url):
        return

    resource = {"prefect.resource.id": f"trace.target.{notice.target}", "prefect.resource.name": notice.target}
    emit_event(event_name(notice), resource=resource, payload={"text": notice.text, **notice.details})
