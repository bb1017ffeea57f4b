"""MLflow's run of a round: begun once, over all processes, and ended as what the round then is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from db import RoundState
from models.adapters.registry import PARENT_TAG
from settings import load_settings
from tasks.round.stage import forget, open_context


@pytest.mark.parametrize(
    ("state", "status"),
    [(RoundState.DONE, "FINISHED"), (RoundState.FAILED, "FAILED"), (RoundState.INTERRUPTED, "KILLED")],
)
def test_a_rounds_run_ends_as_the_round_does(settings_folder: Path, state: RoundState, status: str) -> None:
    settings = load_settings(profile="smoke", home=settings_folder / "home")
    context = open_context(settings)
    registry, run = context.registry, context.run
    part = context.part_run("a-part", "refund", capability="refund")
    context.store.finish_round(context.round.id, state)
    forget(context.round.id)
    found = registry.client.get_run(run)
    assert (found.info.run_name, found.info.status) == ("shop night 1", status)
    nested = registry.client.get_run(part)
    assert (nested.info.run_name, nested.data.tags[PARENT_TAG]) == ("shop night 1: refund", run)
    if state == RoundState.INTERRUPTED:  # gone on with: the same run goes on
        again = open_context(settings)
        assert again.run == run
        assert registry.client.get_run(run).info.status == "RUNNING"
        forget(again.round.id)


def test_a_round_ends_also_while_mlflow_does_not_answer(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    _ = context.run
    (settings_folder / "home" / "mlflow.db").write_bytes(b"no database")
    context.registry.client._tracking_client.store.engine.dispose()
    with caplog.at_level(logging.WARNING, "trace"):
        forget(context.round.id)
    assert "cannot be told how the round ended" in caplog.text


def test_a_round_that_trained_nothing_makes_no_run(settings_folder: Path) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    forget(context.round.id)
    assert not (settings_folder / "home" / "mlflow.db").exists()
