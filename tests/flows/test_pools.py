"""The base job templates of the work pools: whole, and what Kubernetes makes of one is a job by its own schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from prefect.client.base import PrefectHttpxSyncClient
from prefect.settings import PREFECT_CLIENT_RETRY_EXTRA_CODES, temporary_settings
from prefect.utilities.templating import apply_values

from flows.deploy import KINDS, POOLS

ROOT = Path(__file__).parents[2]
# Kubernetes versions that are served today.
VERSIONS = ("1.33", "1.36")


def template(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((POOLS / f"{kind}.json").read_text())
    return found


def rendered(kind: str, **given: Any) -> dict[str, Any]:
    """What a worker makes of the template: its own values, what a deployment gives, and the defaults."""
    made = template(kind)
    properties = made["variables"]["properties"]
    defaults = {name: p["default"] for name, p in properties.items() if "default" in p}
    values = defaults | {"name": "improve", "command": "prefect flow-run execute", "labels": {"a": "b"}} | given
    jsonschema.validate(values, made["variables"])
    found: dict[str, Any] = apply_values(made["job_configuration"], values, remove_notset=True)
    return found


def test_there_are_pools_for_a_machine_docker_and_kubernetes() -> None:
    assert KINDS == ("docker", "kubernetes", "process")


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_is_used_and_every_place_has_one(kind: str) -> None:
    made = template(kind)
    jsonschema.Draft202012Validator.check_schema(made["variables"])
    places = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(made["job_configuration"])))
    assert places == set(made["variables"]["properties"])


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_as_quiet_as_the_deployments(kind: str) -> None:
    definitions = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]
    quiet = definitions["pool"]["job_variables"]["env"]
    assert template(kind)["variables"]["properties"]["env"]["default"] == quiet


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", [{}, {"gpus": 1, "node_selector": {"gpu": "h200"}, "service_account_name": "trace"}])
def test_kubernetes_takes_the_job(version: str, given: dict[str, Any]) -> None:
    made = rendered("kubernetes", **given)
    job = made["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    # The worker turns these two into lists before it creates the job.
    container["env"] = [{"name": k, "value": v} for k, v in container["env"].items()]
    container["args"] = container["args"].split()
    kubernetes_validate.validate(job, version, strict=True)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == given.get("gpus", 0)
    assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 10001


def test_a_wrong_job_is_found() -> None:
    """Or the test above could not fail."""
    job = rendered("kubernetes")["job_manifest"]
    job["spec"]["template"]["spec"]["parallelism"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_a_server_whose_disk_is_full_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 500, which Prefect's client takes for the last word: the run would be one that runs for ever."""
    answers = iter([500, 200])
    waits = list[float]()
    monkeypatch.setattr("prefect.client.base.time.sleep", waits.append)
    codes = template("process")["variables"]["properties"]["env"]["default"]["PREFECT_CLIENT_RETRY_EXTRA_CODES"]
    with temporary_settings({PREFECT_CLIENT_RETRY_EXTRA_CODES: codes}):
        transport = httpx.MockTransport(lambda request: httpx.Response(next(answers), request=request))
        client = PrefectHttpxSyncClient(transport=transport, base_url="http://prefect")
        assert client.get("/").status_code == 200
    assert len(waits) == 1
