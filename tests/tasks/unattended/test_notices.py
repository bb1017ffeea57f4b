"""Notices reach the webhook, wait while nobody takes them, and never show its address."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errors import ConfigurationError
from settings import Settings, load_settings
from tasks.unattended import notices
from tasks.unattended.notices import Notice, check_webhook, deliver, notify, outbox

SECRET = "T000-secret-path"
STARTED = Notice("started", "shop", "round 1 on shop began", {"round": 1})


class Receiver:
    """A webhook's receiver that answers with `status` and keeps what it took."""

    def __init__(self) -> None:
        self.status, self.taken, self.seconds = 200, list[dict[str, Any]](), 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if receiver.status == 200:
                    receiver.taken.append(body)
                time.sleep(receiver.seconds)
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def settings(settings_folder: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("HOOK", receiver.url)
    monkeypatch.setattr(notices, "_emit", lambda notice: None)
    return load_settings(home=settings_folder, unattended={"webhook_variable": "HOOK"})


def texts(receiver: Receiver) -> list[str]:
    return [body["text"] for body in receiver.taken]


def test_a_notice_arrives_as_json_for_people_and_programs(settings: Settings, receiver: Receiver) -> None:
    notify(settings, STARTED)
    (body,) = receiver.taken
    assert body.pop("at")
    assert body == {
        "text": "[trace] round 1 on shop began",
        "event": "trace.started",
        "target": "shop",
        "details": {"round": 1},
    }
    assert list(outbox(settings).iterdir()) == []


def test_slack_gets_the_text_alone(settings: Settings, receiver: Receiver) -> None:
    notify(settings.model_copy(update={"unattended": settings.unattended.model_copy(
        update={"webhook_format": "slack"})}), STARTED)  # fmt: skip
    assert receiver.taken == [{"text": "[trace] round 1 on shop began"}]


def test_what_a_receiver_did_not_take_is_sent_again_in_order(
    settings: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.status = 503
    notify(settings, STARTED)
    notify(settings, Notice("failed", "shop", "round 1 was stopped"))
    assert receiver.taken == []
    assert "2 wait in the outbox" in caplog.text
    receiver.status = 200
    assert deliver(settings) == 2
    assert texts(receiver) == ["[trace] round 1 on shop began", "[trace] round 1 was stopped"]
    assert deliver(settings) == 0
    assert SECRET not in caplog.text


def test_a_receiver_that_is_down_stops_nothing(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:1/{SECRET}")
    notify(settings, STARTED)
    assert len(list(outbox(settings).glob("*.json"))) == 1
    assert "ConnectError" in caplog.text
    assert SECRET not in caplog.text
    monkeypatch.setenv("HOOK", receiver.url)
    assert deliver(settings) == 1


def test_a_receiver_that_works_before_it_answers_gets_each_notice_once(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer to answer than to be reached: it was sent the first notice with each other one, and no other."""
    monkeypatch.setattr(notices, "SECONDS", 0.2)
    receiver.seconds = 0.5
    notify(settings, STARTED)
    notify(settings, Notice("promoted", "shop", "release 1 is live"))
    assert texts(receiver) == ["[trace] round 1 on shop began", "[trace] release 1 is live"]
    assert list(outbox(settings).iterdir()) == []


def test_many_notices_and_a_slow_receiver_hold_no_round_up(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 503
    for number in range(4):
        notify(settings, Notice("started", "shop", str(number)))
    receiver.status = 200
    monkeypatch.setattr(notices, "SECONDS_IN_ALL", 0.0)
    assert deliver(settings) == 1
    assert "(more than 0 s): 3 wait in the outbox" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_notices_wait_while_the_address_is_wrong(settings: Settings, receiver: Receiver, status: int) -> None:
    """A hook that was deleted or has another key refuses every notice: none of them is to be lost for it."""
    receiver.status = status
    notify(settings, STARTED)
    notify(settings, Notice("failed", "shop", "round 1 was stopped"))
    receiver.status = 200
    assert deliver(settings) == 2
    assert texts(receiver) == ["[trace] round 1 on shop began", "[trace] round 1 was stopped"]
    assert list(outbox(settings).iterdir()) == []


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_refused_for_good_holds_up_nothing(settings: Settings, receiver: Receiver, status: int) -> None:
    receiver.status = status
    notify(settings, STARTED)
    receiver.status = 200
    notify(settings, Notice("promoted", "shop", "release 1 is live"))
    assert texts(receiver) == ["[trace] release 1 is live"]
    assert [path.suffix for path in outbox(settings).iterdir()] == [".refused"]


def test_the_outbox_is_bounded(settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MOST_KEPT", 2)
    receiver.status = 500
    for number in range(4):
        notify(settings, Notice("started", "shop", str(number)))
    receiver.status = 200
    deliver(settings)
    assert texts(receiver) == ["[trace] 2", "[trace] 3"]
    receiver.status = 400
    for number in range(4):
        notify(settings, Notice("started", "shop", str(number)))
    refused = [json.loads(path.read_bytes())["text"] for path in sorted(outbox(settings).glob("*.refused"))]
    assert refused == ["[trace] 2", "[trace] 3"]


@pytest.mark.parametrize("status", [200, 500])
def test_what_cannot_be_kept_is_sent_once(
    settings: Settings,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    receiver.status = status
    notify(settings, STARTED)
    assert texts(receiver) == ["[trace] round 1 on shop began"] * (status == 200)
    assert "outbox cannot be written (No space left on device)" in caplog.text
    assert ("(status 500): it is lost" in caplog.text) == (status == 500)
    assert SECRET not in caplog.text
    assert list(outbox(settings).iterdir()) == []


def test_an_event_that_cannot_be_given_keeps_no_webhook_from_it(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(notice: Notice) -> None:
        raise ConnectionError("Prefect is being restarted")

    monkeypatch.setattr(notices, "_emit", down)
    notify(settings, STARTED)
    assert texts(receiver) == ["[trace] round 1 on shop began"]


@pytest.mark.parametrize("active", ["server", "none"])
def test_the_server_of_prefect_s_profile_gets_the_event_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: str
) -> None:
    """As of a rollback by hand, in a process that has not imported Prefect."""
    server = '[profiles.server]\nPREFECT_API_URL = "http://prefect:4200/api"\n'
    (tmp_path / "profiles.toml").write_text(f'active = "{active}"\n{server}[profiles.none]\n')
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(notices, "sys", SimpleNamespace(modules={}))
    there = SimpleNamespace(api=SimpleNamespace(url="http://prefect:4200/api"))
    monkeypatch.setattr("prefect.settings.get_current_settings", lambda: there)
    told: list[str] = []
    monkeypatch.setattr("prefect.events.emit_event", lambda name, **given: told.append(name))
    notices._emit(Notice("rolled-back", "shop", "the bare base answers again"))
    assert told == (["trace.rolled-back"] if active == "server" else [])


def test_a_variable_without_an_address_is_refused_and_not_shown(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_webhook(settings)
    monkeypatch.setenv("HOOK", SECRET)
    with pytest.raises(ConfigurationError, match="'HOOK', which holds no http") as raised:
        check_webhook(settings)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("end", ["\r", "\n", ":port"])
def test_an_address_that_nobody_can_ask_is_refused_before_a_round(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """As one from a file with Windows' line ends: each notice would fail, and with those that wait watch and
    housekeeping."""
    address = f"http://127.0.0.1{end}/{SECRET}" if end == ":port" else f"http://127.0.0.1/{SECRET}{end}"
    monkeypatch.setenv("HOOK", address)
    with pytest.raises(ConfigurationError, match="'HOOK', which holds no http") as raised:
        check_webhook(settings)
    assert SECRET not in str(raised.value)


def test_a_refused_notice_that_another_process_puts_aside_stops_nothing(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, others = Path.rename, list[Path]()

    def late(path: Path, aside: Path) -> Path:
        if path.suffix == ".json":
            others.append(rename(path, aside))
        return rename(path, aside)

    receiver.status = 503
    notify(settings, STARTED)
    receiver.status = 400
    monkeypatch.setattr(Path, "rename", late)
    assert deliver(settings) == 0
    assert list(outbox(settings).iterdir()) == others


def test_without_a_webhook_nothing_is_stored(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_emit", lambda notice: None)
    settings = load_settings(home=settings_folder)
    notify(settings, STARTED)
    check_webhook(settings)
    assert not outbox(settings).exists()
