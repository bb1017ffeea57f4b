"""What a run in MLflow shows: nested, by readable names, with datasets, tables and traces, and the same when logged
again. On a real SQLite store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow.utils.validation import _validate_metric_name

from models.adapters.registry import PARENT_TAG, Registry
from models.adapters.runs import RunLog, as_tag, describe_capability, metric_key, metric_keys, put_on_version
from models.adapters.traces import PlayedSpan, PlayedTrace
from tests.adapters_plain import registered


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    root = tmp_path_factory.mktemp("registry")
    return Registry(f"sqlite:///{root}/mlflow.db", "shop", root / "artifacts")


def trace(key: str, failed: bool = False, **given: Any) -> PlayedTrace:
    spans = (
        PlayedSpan("turn", "LLM", [{"role": "user", "content": "Größe <b>?"}], {"content": "ok"}, 20.0),
        PlayedSpan("tool", "TOOL", {"call": "refund(order=1)"}, {"content": "done"}, 5.0),
    )
    tags = {"capability": "refund", "reward": "0.5"}
    return PlayedTrace(**{
        "key": key, "name": f"refund {key}", "inputs": {"asked": "Größe"}, "outputs": {"reward": 0.5}, "spans": spans,
        "tags": tags, "session": "group-1", "ended": 1_795_000_000_000_000_000, "seconds": 0.5, "failed": failed,
        **given,
    })  # fmt: skip


def test_a_run_is_nested_called_by_its_name_and_found_by_its_key(registry: Registry) -> None:
    whole = registry.start_run("r1-round", {"round": "r1"}, "shop night 3")
    part = registry.start_run("r1-refund", {}, "shop night 3: refund", whole, began=1000)
    assert registry.start_run("r1-refund", {}, "another name", "another parent") == part
    found = registry.client.get_run(part)
    assert (found.info.run_name, found.info.start_time) == ("shop night 3: refund", 1000)
    assert found.data.tags[PARENT_TAG] == whole
    for given, status in (({}, "FINISHED"), ({"failed": True}, "FAILED"), ({"stopped": True}, "KILLED")):
        registry.end_run(part, **given, ended=2000)
        assert (registry.client.get_run(part).info.status, registry.client.get_run(part).info.end_time) == (
            status,
            2000,
        )


def test_logging_again_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    run = registry.start_run("twice")
    adapter = registered(registry, tmp_path, "refund", run)
    frame = pd.DataFrame({"task": ["a", "b"], "family": ["x", "y"]})
    for rank in (8, 16):  # what is there stays
        log = RunLog(registry, run)
        log.params({"rank": rank, "verdict": "better"})
        log.metrics({"gate/points": float(rank), "gate/family/a|b": 1.0}, adapter)
        log.dataset(frame, "shop-test", "test")
        log.table(frame.assign(success=[True, None]), "test.json")
    found = registry.client.get_run(run)
    assert found.data.params == {"rank": "8", "verdict": "better"}
    assert found.data.metrics == {"gate/points": 8.0, "gate/family/a_b": 1.0}
    assert [(d.dataset.name, d.tags[0].value) for d in found.inputs.dataset_inputs] == [("shop-test", "test")]
    model = registry.client.get_logged_model(adapter.model_id)
    assert {m.key: m.value for m in model.metrics} == {"gate/points": 8.0, "gate/family/a_b": 1.0}
    path = registry.client.download_artifacts(run, "test.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert table == {"columns": ["task", "family", "success"], "data": [["a", "x", True], ["b", "y", None]]}


def test_a_version_says_what_it_is(registry: Registry, tmp_path: Path) -> None:
    adapter = registered(registry, tmp_path, "ship", registry.start_run("ship"))
    put_on_version(registry, adapter, {"gate.points": 12.5, "gate.families": as_tag({"a": 1.23456})}, "**Lacked** it.")
    describe_capability(registry, adapter, "To ship.")
    version = registry.client.get_model_version(adapter.name, adapter.version)
    assert version.description == "**Lacked** it."
    assert version.tags["gate.points"] == "12.5"
    assert version.tags["gate.families"] == '{"a": 1.2346}'
    assert registry.client.get_registered_model(adapter.name).description == "To ship."


def test_episodes_are_traces_of_their_run_once(registry: Registry) -> None:
    run = registry.start_run("traced")
    for _ in range(2):
        RunLog(registry, run).traces([trace("e1"), trace("e2", failed=True)])
    RunLog(registry, run).traces([])
    found = registry.client.search_traces(locations=[registry.experiment_id], run_id=run)
    assert {t.info.tags["mlflow.traceName"]: str(t.info.state.value) for t in found} == {
        "refund e1": "OK", "refund e2": "ERROR",
    }  # fmt: skip
    by_tag = registry.client.search_traces(
        locations=[registry.experiment_id], filter_string="tags.capability = 'refund' AND trace.status = 'OK'"
    )
    (one,) = by_tag
    assert [(s.name, s.span_type) for s in one.data.spans] == [
        ("refund e1", "AGENT"),
        ("turn", "LLM"),
        ("tool", "TOOL"),
    ]
    root, turn, tool = one.data.spans
    assert (turn.parent_id, tool.parent_id, root.parent_id) == (root.span_id, root.span_id, None)
    assert turn.inputs == [{"role": "user", "content": "Größe <b>?"}]
    assert root.outputs == {"reward": 0.5}
    assert (root.end_time_ns, root.end_time_ns - root.start_time_ns) == (1_795_000_000_000_000_000, 500_000_000)
    assert tool.start_time_ns == turn.end_time_ns
    assert one.info.trace_metadata["mlflow.trace.session"] == "group-1"


def test_more_traces_than_one_call_links(registry: Registry) -> None:
    run = registry.start_run("many")
    RunLog(registry, run).traces([trace(f"many-{i}", spans=()) for i in range(101)])
    found = registry.client.search_traces(locations=[registry.experiment_id], run_id=run, max_results=200)
    assert len(found) == 101


@pytest.mark.parametrize(("name", "key"), [("gate/family/a|b", "gate/family/a_b"), ("ok-1.x: y", "ok-1.x: y")])
def test_metric_key(name: str, key: str) -> None:
    assert metric_key(name) == key
    assert len(metric_key(name * 100)) == 250


@pytest.mark.parametrize("family", ["/orders/refund", "billing/", "a//b", "../x", "a/./b", ".", "", "x" * 230 + "/..y"])
def test_a_family_that_is_called_like_a_path_is_a_name_of_a_metric(family: str) -> None:
    """Else the stage that logs it ends the round, after all of its trainings."""
    _validate_metric_name(metric_key(f"wrong-route/family/{family}"))


def test_no_two_metrics_share_a_key() -> None:
    """MLflow keeps the last of two metrics with one name, and says nothing of the other."""
    names = ["a/b", "a//b", "a/_/b", "a?", "a!", "y" * 300, "y" * 301]
    keys = metric_keys(names)
    assert keys["a/b"] == "a/b"
    assert len(set(keys.values())) == len(names)
    for key in keys.values():
        _validate_metric_name(key)
