"""What docker/.env comes to in the containers: the settings that rounds and the gateway read there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import boto3
import pytest
import yaml

from flows.services import Ports, Services
from models.objects import files_of
from settings import Settings, load_settings
from settings_parts import LimitSettings, UnattendedSettings
from tasks.unattended.notices import check_webhook

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SERVICES = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "docker" / ".env.example").read_text(), re.MULTILINE))


def filled(text: str, known: Mapping[str, str]) -> str:
    """As compose fills the variables in: an empty one counts as none."""
    return re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda found: known.get(found[1]) or found[2], text)


def settings_in(service: str, monkeypatch: pytest.MonkeyPatch, **given: str) -> Settings:
    """What compose gives a service; a variable without a value is handed on or is not there."""
    known = EXAMPLE | {"POSTGRES_PASSWORD": "secret"} | given
    for name, value in SERVICES[service]["environment"].items():
        if value is None:
            monkeypatch.setenv(name, known[name]) if name in known else monkeypatch.delenv(name, raising=False)
            continue
        value = filled(value, known)
        assert "${" not in value
        monkeypatch.setenv(name, value)
    return load_settings()


def test_the_example_is_a_laptop_without_a_gpu_and_the_gpu_profile_with_one(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = settings_in("worker", monkeypatch)
    assert (small.profile, small.target, small.base_model) == ("laptop", "shop", "/models/smollm2-135m")
    assert (small.policy.backend, small.asks_a_model) == ("local", False)
    large = settings_in("worker-gpu", monkeypatch)
    assert (large.profile, large.base_model) == ("gpu", "/models/smollm2-135m")
    assert (large.policy.backend, large.policy.urls) == ("vllm", ("http://vllm:8000",))


def test_model_target_and_analyst_reach_the_worker(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "BASE_MODEL": "owner/name", "TRACE_TARGET": "bfcl:single", "TRACE_PROFILE": "smoke",
        "TRACE_ANALYST__KIND": "llm", "TRACE_ANALYST__MODEL": "openai/x", "TRACE_ANALYST__API_BASE": "http://llm:1/v1",
        "TRACE_SYNTHESIZER__KIND": "llm",
    }  # fmt: skip
    found = settings_in("worker", monkeypatch, **given)
    assert (found.base_model, found.target, found.profile) == ("/models/owner/name", "bfcl:single", "smoke")
    assert (found.analyst.model, found.analyst.api_base, found.author) == ("openai/x", "http://llm:1/v1", "openai/x")
    assert (found.analyst.api_key_variable, found.analyst.max_dollars) == ("ANALYST_API_KEY", 20.0)
    assert "ANALYST_API_KEY" in SERVICES["worker"]["environment"], "the variable that the settings name"


def test_limits_notices_approval_and_the_simulated_user_reach_rounds_alone(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docker" / ".env.example").read_text()
    parts = {"LIMITS": LimitSettings, "UNATTENDED": UnattendedSettings}
    names = {f"TRACE_{part}__{field}".upper() for part, kind in parts.items() for field in kind.model_fields}
    names |= {"TRACE_TARGET_USER", "WEBHOOK", "OPENAI_API_KEY"}
    shown = dict(re.findall(r"^#(\w+)=(.*)$", text, re.MULTILINE))
    assert names <= shown.keys()
    for service in ("worker", "worker-gpu"):
        plain = settings_in(service, monkeypatch)
        assert (plain.limits, plain.unattended) == (LimitSettings(), UnattendedSettings())
        found = settings_in(service, monkeypatch, **shown)
        assert (found.limits.hours, found.limits.rollouts, found.target_user) == (8.0, 5000, shown["TRACE_TARGET_USER"])
        assert (found.unattended.approve, found.unattended.roll_back) == (True, True)
        check_webhook(found)
    others = SERVICES.keys() - {"worker", "worker-gpu"}
    assert not [name for name in others if names & SERVICES[name].get("environment", {}).keys()]


def test_worker_and_gateway_share_store_and_registry(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for service in ("worker", "gateway", "worker-gpu", "gateway-gpu"):
        found = settings_in(service, monkeypatch)
        places.add((found.database_url, found.tracking_uri, found.base_model))
    assert places == {("postgresql://trace@postgres:5432/trace", "http://mlflow:5000", "/models/smollm2-135m")}


def test_the_storage_reaches_whoever_needs_files_and_is_off_by_itself(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_ENDPOINT_URL_S3": "https://minio:9000"}
    for service in ("worker", "gateway", "worker-gpu", "gateway-gpu"):
        assert settings_in(service, monkeypatch).files == ""
        client = boto3.client("s3")  # empty variables count as none
        assert client.meta.endpoint_url == "https://s3.amazonaws.com"
        found = settings_in(service, monkeypatch, TRACE_FILES="s3://trace/shop", **keys)
        assert found.files == files_of(found).address == "s3://trace/shop"
        client = boto3.client("s3")
        assert (client.meta.endpoint_url, client.meta.region_name) == ("https://minio:9000", "us-east-1")
    given = SERVICES["mlflow"]["environment"]
    assert {name: given[name] for name in keys} == {name: f"${{{name}:-}}" for name in keys}
    assert "--artifacts-destination=${MLFLOW_ARTIFACTS:-/artifacts}" in SERVICES["mlflow"]["command"]
    assert EXAMPLE["MLFLOW_ARTIFACTS"] == "/artifacts"
    others = SERVICES.keys() - {"worker", "gateway", "worker-gpu", "gateway-gpu", "mlflow"}
    assert not [name for name in others if keys.keys() & SERVICES[name].get("environment", {}).keys()]


def test_each_gateways_memory_holds_the_bases_that_its_profile_is_for() -> None:
    """It loads the whole base, in two bytes a parameter with a GPU: up to nine billion of them."""
    gib = {}
    for service in ("gateway", "gateway-gpu"):
        limits = SERVICES[service]["deploy"]["resources"]["limits"]
        for given, memory in (({}, "default"), ({"GATEWAY_MEMORY": "7g"}, "given")):
            gib[service, memory] = int(filled(limits["memory"], EXAMPLE | given).removesuffix("g"))
        assert limits == SERVICES["gateway"]["deploy"]["resources"]["limits"] | {"memory": limits["memory"]}
    assert gib["gateway-gpu", "default"] * 2**30 >= 2 * 9e9
    assert gib["gateway", "default"] <= 8, "a laptop's"
    assert gib["gateway", "given"] == gib["gateway-gpu", "given"] == 7


def test_the_image_installs_what_a_storage_needs() -> None:
    """The line that names the image's dependencies, as the build runs it."""
    (line,) = re.findall(r"^RUN python3 -c '(import tomllib.*)' > \S+ \\$", DOCKERFILE.read_text(), re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {re.split(r"[^\w-]", text)[0] for text in done.stdout.splitlines()}
    assert {"s3fs", "boto3", "prefect", "mlflow"} <= names


def test_an_update_brings_the_database_that_mlflow_has_here_to_its_schema() -> None:
    """MLflow's server does not start on an older schema, and the worker waits for that server."""
    page = (ROOT / "docs" / "1-running.md").read_text()
    (url,) = re.findall(r"^    docker compose \.\.\. run --rm mlflow mlflow db upgrade (\S+)", page, re.MULTILINE)
    assert url == SERVICES["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]
    assert page.index(url) < page.index("run --rm worker trace-agent db upgrade")


def test_every_worker_plays_one_run_at_a_time(settings_folder: Path) -> None:
    """A round takes the cores and the memory of its machine for its own: two at once would each expect all."""
    (line,) = re.findall(r"^CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    in_image = json.loads(line)
    by_up = Services(load_settings(), Ports()).programs()["worker"]
    assert by_up[2:] == in_image
    assert in_image[-3:-1] == ["--limit", "1"]
    page = (ROOT / "docs" / "1-running.md").read_text()
    assert re.findall(r"^    \.venv/bin/(prefect worker start .*)$", page, re.MULTILINE) == [" ".join(in_image)]
    assert not any("command" in SERVICES[name] for name in ("worker", "worker-gpu"))
