"""That MLflow fails is one clear error with its cause, which another run may not meet."""

from __future__ import annotations

import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from db import StageState
from errors import StoreError
from settings import load_settings
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.stage import forget, open_context, stage


@stage("rollout")
def on_a_full_disk(context: object) -> RolloutResult:
    try:
        raise sqlite3.OperationalError("database or disk is full")
    except sqlite3.OperationalError as problem:
        raise MlflowException("(raised as a result of Query-invoked autoflush)\n[SQL: INSERT ...]") from problem


@stage("rollout")
def with_a_wrong_password(context: Context) -> RolloutResult:
    MlflowClient(context.settings.tracking_uri).search_experiments()
    raise AssertionError("it was let in")


@stage("rollout")
def with_a_defect(context: object) -> RolloutResult:
    raise KeyError("a defect")


def test_the_cause_is_said_and_it_may_pass(settings_folder: Path) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    try:
        with pytest.raises(StoreError) as caught:
            on_a_full_disk.do(context)
        assert str(caught.value).startswith(
            f"MLflow at {context.settings.tracking_uri} failed while stage 'rollout' was"
        )
        assert "OperationalError: database or disk is full; what is stored stays" in str(caught.value)
        assert "SQL" not in str(caught.value)
        assert caught.value.transient
        assert context.store.stage(context.round.id, "rollout").row().state != StageState.DONE
        with pytest.raises(KeyError, match="a defect"):
            with_a_defect.do(context)
    finally:
        forget(context.round.id)


@pytest.mark.parametrize(("status", "passes"), [(401, False), (403, False), (500, True)])
def test_a_refusal_is_not_waited_for(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, passes: bool
) -> None:
    """A round waits minutes for a server that is away; a wrong password is as wrong then."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"You are not authenticated.")

        do_POST = do_GET

        def log_message(self, format: str, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    address = f"http://somebody:wrong@127.0.0.1:{server.server_address[1]}"
    context.settings = context.settings.model_copy(update={"tracking": address})
    try:
        with pytest.raises(StoreError, match=f"MLflow at http://.*127.0.0.1.* failed .* {status}") as caught:
            with_a_wrong_password.do(context)
    finally:
        server.shutdown()
        forget(context.round.id)
    assert "wrong@" not in str(caught.value)
    assert caught.value.transient == passes
    assert ("give a user and a password that it takes" in str(caught.value)) == (not passes)
