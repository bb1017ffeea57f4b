"""A server that is named and not there is one clear error before a round starts."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from errors import ConfigurationError
from settings import load_settings
from tasks.round.preflight import check_without_loading
from tasks.unattended import servers
from tasks.unattended.servers import SECONDS, Answer, NamedServer, ask, check_servers

API = "http://127.0.0.1:4200/api"


def nobody() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> None:
    for name in ("PREFECT_API_URL", servers.BEGUN_BY_WORKER):
        monkeypatch.delenv(name, raising=False)


def test_the_preflight_refuses_prefect_s_address_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    port, began = nobody(), time.monotonic()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    said = (
        rf"PREFECT_API_URL = 'http://127\.0\.0\.1:{port}/api', which does not answer \(.*refused\); start it .* unset"
    )
    with pytest.raises(ConfigurationError, match=said):
        check_without_loading(load_settings())
    assert time.monotonic() - began < SECONDS <= 5


@pytest.mark.parametrize("chosen_by", ["active", "PREFECT_PROFILE"])
def test_the_address_of_prefect_s_profile_is_asked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen_by: str
) -> None:
    address = f"http://127.0.0.1:{nobody()}/api"
    active = "away" if chosen_by == "active" else "ephemeral"
    (tmp_path / "profiles.toml").write_text(
        f'active = "{active}"\n[profiles.ephemeral]\n[profiles.away]\nPREFECT_API_URL = "{address}"\n'
    )
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    if chosen_by == "PREFECT_PROFILE":
        check_servers(load_settings())  # the active one names no server
        monkeypatch.setenv("PREFECT_PROFILE", "away")
    said = f"profile 'away' = '{address}', which does not answer .*use ephemeral"
    with pytest.raises(ConfigurationError, match=said):
        check_servers(load_settings())


@pytest.mark.parametrize("written", [None, "not toml =", 'active = "gone"\n', 'active = "a"\n[profiles.a]\n'])
def test_a_profile_without_an_address_names_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str | None
) -> None:
    if written is not None:
        (tmp_path / "profiles.toml").write_text(written)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert servers.prefect_server() is None


def test_the_preflight_refuses_mlflow_s_address_and_shows_no_password() -> None:
    port = nobody()
    said = rf"TRACE_TRACKING\) = 'http://127\.0\.0\.1:{port}', which does not answer \(.*refused\); start it .* correct"
    with pytest.raises(ConfigurationError, match=said) as raised:
        check_without_loading(load_settings(tracking=f"http://me:secret@127.0.0.1:{port}"))
    assert "secret" not in str(raised.value)


def test_an_address_without_http_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "127.0.0.1:4200/api")
    with pytest.raises(ConfigurationError, match=r"'127\.0\.0\.1:4200/api', which does not answer"):
        check_servers(load_settings())


def test_without_servers_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ask", lambda server: pytest.fail(f"{server} is asked"))
    check_servers(load_settings())
    check_servers(load_settings(tracking="sqlite:////elsewhere/mlflow.db"))


def test_one_that_takes_the_call_and_says_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answer = ask(NamedServer("X", url, f"{url}/health", "start it"))
    assert (answer.slow, answer.there, answer.well) == (True, True, False)


@pytest.mark.parametrize(("status", "there"), [(200, True), (401, True), (404, False), (503, False)])
def test_a_server_that_fails_is_not_there(monkeypatch: pytest.MonkeyPatch, status: int, there: bool) -> None:
    monkeypatch.setenv("PREFECT_API_URL", API)
    monkeypatch.setattr(servers, "ask", lambda server: Answer(status))
    if there:
        check_servers(load_settings())
    else:
        with pytest.raises(ConfigurationError, match=f"which answers {status}; start it"):
            check_servers(load_settings())


@pytest.mark.parametrize(("api", "there"), [(200, True), (401, True), (404, False)])
def test_an_mlflow_without_a_page_of_health_is_known_by_its_api(
    monkeypatch: pytest.MonkeyPatch, api: int, there: bool
) -> None:
    answers = {"http://mlflow/health": 404, f"http://mlflow{servers.EXPERIMENTS}": api}
    monkeypatch.setattr(servers, "_asked", lambda address, through_proxy: Answer(answers[address]))
    server = servers.mlflow_server(load_settings(tracking="http://mlflow/"))
    assert server is not None
    assert ask(server).there is there


@pytest.mark.parametrize(("through", "status"), [(Answer(200), 200), (Answer(404), 0), (Answer(502), 0)])
def test_a_proxy_is_asked_second_and_its_own_errors_are_not_the_server_s(
    monkeypatch: pytest.MonkeyPatch, through: Answer, status: int
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setattr(servers, "_asked", lambda _, through_proxy: through if through_proxy else Answer(0, "refused"))
    assert ask(NamedServer("X", API, f"{API}/health", "start it")).status == status


@pytest.mark.parametrize(("begun_by", "asked"), [("", 1), ("a-run", 3)])
def test_a_worker_s_run_waits_for_a_service_that_is_started_again(
    monkeypatch: pytest.MonkeyPatch, begun_by: str, asked: int
) -> None:
    answers = [Answer(0, "refused"), Answer(503), Answer(200)]
    monkeypatch.setenv("PREFECT_API_URL", API)
    monkeypatch.setenv(servers.BEGUN_BY_WORKER, begun_by)
    monkeypatch.setattr(servers, "EVERY", 0.0)
    monkeypatch.setattr(servers, "ask", lambda server: answers.pop(0))
    if begun_by:
        check_servers(load_settings())
    else:
        with pytest.raises(ConfigurationError, match="does not answer"):
            check_servers(load_settings())
    assert len(answers) == 3 - asked
