"""The door of the compose stack: the repository's Caddyfile in a real Caddy, in front of servers that tell what they
were asked."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.servers import free_port, running, status

pytestmark = pytest.mark.integration
CADDY = shutil.which("caddy")
FILE = Path(__file__).parents[2] / "docker" / "Caddyfile"
PASSWORD = "a-password-for-this-test"


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    def do_GET(self) -> None:
        told = {"path": self.path, "host": self.headers["host"], "authorization": self.headers["authorization"]}
        body = json.dumps({"port": self.server.server_address[1], **told}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *given: Any) -> None: ...


@dataclass
class Door:
    """Ports that Caddy answers on, by what is behind, and the ports of these servers."""

    front: dict[str, int]
    behind: dict[str, int]

    def ask(self, what: str, path: str = "/", password: str | None = PASSWORD, method: str = "GET") -> httpx.Response:
        headers = {}
        if password is not None:
            headers["authorization"] = "Basic " + base64.b64encode(f"trace:{password}".encode()).decode()
        return httpx.request(method, f"http://127.0.0.1:{self.front[what]}{path}", headers=headers, trust_env=False)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    if CADDY is None:
        pytest.skip("Caddy is not installed; tests/ensure_caddy.sh brings it")
    folder, servers = tmp_path_factory.mktemp("door"), []
    found = Door({}, {})
    text, environment = FILE.read_text(), {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for name, port in (("prefect", 4200), ("mlflow", 5000), ("vllm", 8000), ("health", 2020)):
        found.front[name] = free_port()
        assert f":{port} {{" in text
        text = text.replace(f":{port} {{", f":{found.front[name]} {{")
        if name != "health":
            server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            found.behind[name] = server.server_port
            environment[f"{name.upper()}_UPSTREAM"] = f"127.0.0.1:{server.server_port}"
    (folder / "Caddyfile").write_text(text)
    command = [CADDY, "hash-password", "--plaintext", PASSWORD]
    environment["PROXY_HASH"] = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    run = [CADDY, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    health = f"http://127.0.0.1:{found.front['health']}/"
    with running(run, environment, folder / "log", lambda: status(health) == 204):
        yield found
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("what", ["prefect", "mlflow", "vllm"])
def test_nothing_is_answered_without_the_password(door: Door, what: str) -> None:
    for password in (None, "", "another-password"):
        refused = door.ask(what, "/api/health", password)
        assert (refused.status_code, refused.text) == (401, "")
        assert refused.headers["www-authenticate"].startswith("Basic")
    path = "/v1/models?x=1" if what == "vllm" else "/api/flows?x=1"
    told = door.ask(what, path).json()
    assert (told["port"], told["path"]) == (door.behind[what], path)
    assert told["authorization"] is None, "what is behind never sees the password"
    assert told["host"] == f"127.0.0.1:{door.front[what]}", "MLflow looks at it"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/load%5Flora_ADAPTER",
        "//sleep?level=1",
        "/collective_rpc",
        "/adapters",
        "/adapters/refund@v1-aaaaaaaa",
        "/adapters/%2E%2E/v1/models",
        "/v1/%2E%2E/adapters",
        "//adapters",
        "/invocations",
        "/update_weights",
        "/",
    ],
)
def test_nobody_loads_adapters_through_the_door(door: Door, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert door.ask("vllm", path, method=method).status_code == 403
    assert door.ask("vllm", path, None).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/chat/completions?x=1", "/health", "/metrics"])
def test_who_has_the_password_may_ask_the_model(door: Door, path: str) -> None:
    for method in ("GET", "POST"):
        assert door.ask("vllm", path, method=method).json()["path"] == path


def test_without_a_password_it_does_not_start(tmp_path: Path) -> None:
    if CADDY is None:
        pytest.skip("Caddy is not installed; tests/ensure_caddy.sh brings it")
    command = [CADDY, "validate", "--config", str(FILE), "--adapter", "caddyfile"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "password cannot be empty" in refused.stderr
