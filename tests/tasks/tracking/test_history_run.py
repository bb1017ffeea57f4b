"""Rounds in MLflow: a run of each, and one run of the target's history with a step a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.adapters.registry import Registry
from tasks.tracking.rounds import history_metrics, log_round, round_metrics
from tests.tasks.reporting.report_samples import full_round, later_round, refused_round


def test_the_history_run_has_a_step_a_round_and_is_the_same_when_done_again(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "shop", tmp_path / "artifacts")
    fourth = refused_round().model_copy(update={"round": "r4"})
    log_round(registry, fourth, "<p>four</p>")
    log_round(registry, later_round(), "<p>five</p>")
    log_round(registry, later_round(), "<p>five</p>")

    client = MlflowClient(registry.tracking_uri)
    runs = {run.info.run_name: run for run in client.search_runs([registry.experiment_id])}
    assert set(runs) == {"shop night 4", "shop night 5", "shop: all nights"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    history = runs["shop: all nights"].info.run_id

    def steps(name: str) -> list[tuple[int, float]]:
        return [(m.step, round(m.value, 4)) for m in client.get_metric_history(history, name)]

    # Rounds 1 and 3 come from the store's history: the registry never saw them.
    assert steps("test/routed") == [(1, 0.52), (3, 0.55), (4, 0.55), (5, 0.6125)]
    assert steps("test/base") == [(1, 0.38), (3, 0.425), (4, 0.425), (5, 0.425)]
    assert steps("lineage") == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert steps("release") == [(1, 1), (3, 2), (4, 2), (5, 5)]
    assert steps("test/gain_points") == [(4, 0.0), (5, 6.25)]
    assert client.get_metric_history(runs["shop night 5"].info.run_id, "test/live")[0].value == 0.55
    assert runs["shop: all nights"].data.tags["kind"] == "history"


def test_a_round_that_goes_on_after_a_later_one_has_the_seconds_of_its_own_report(tmp_path: Path) -> None:
    """What is logged for a step stays: not the seconds that it had when another seed's round told of all nights."""
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "shop", tmp_path / "artifacts")
    fifth = later_round()
    stopped = {"after": None, "test": None, "base": None, "seconds": 100.0, "verdict": "interrupted"}
    history = [row.model_copy(update=stopped if row.round == 4 else {}) for row in fifth.history]
    failed = {**stopped, "seconds": 7.0, "verdict": "failed"}
    history = [row.model_copy(update=failed if row.round == 2 else {}) for row in history]
    log_round(registry, fifth.model_copy(update={"history": history}), "<p>five</p>")
    fourth = refused_round().model_copy(update={"round": "r4", "number": 4, "history": fifth.history[:4]})
    log_round(registry, fourth, "<p>four</p>")
    runs = registry.client.search_runs([registry.experiment_id], "tags.kind = 'history'")
    told = registry.client.get_metric_history(runs[0].info.run_id, "seconds/total")
    seconds = {m.step: m.value for m in told}
    assert (seconds[2], seconds[4]) == (7.0, fourth.seconds["total"])


def test_metrics_of_a_round_without_releases() -> None:
    metrics = round_metrics(full_round())
    assert metrics["test/points"] == 18.75
    assert metrics["test/routed_low"] == 0.512
    assert metrics["seconds/train"] == 702.3
    assert not {"release", "test/live", "test/gain_points"} & set(metrics)
    assert history_metrics(full_round()) == {}


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_releases_that_no_round_made_have_no_step(number: int) -> None:
    assert number in history_metrics(later_round())
    assert len(history_metrics(later_round())) == 5
