"""MLflow's run of a round: begun once, over all processes, and ended as what the round then is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from db import RoundState
from models.adapters.registry import PARENT_TAG
from settings import load_settings
from tasks.round.registry import round_key
from tasks.round.stage import adopt, forget, open_context


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (RoundState.DONE, "FINISHED"),
        (RoundState.FAILED, "FAILED"),
        (RoundState.INTERRUPTED, "KILLED"),
        (RoundState.RUNNING, "RUNNING"),  # a training in a process of its own, say
    ],
)
def test_a_rounds_run_ends_as_the_round_does(settings_folder: Path, state: RoundState, status: str) -> None:
    settings = load_settings(profile="smoke", home=settings_folder / "home")
    context = open_context(settings)
    registry, run = context.registry, context.run
    part = context.part_run("a-part", "refund", capability="refund")
    if state != RoundState.RUNNING:
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


def test_a_process_that_does_a_part_of_a_round_does_not_end_its_run(settings_folder: Path) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    part = adopt(context.settings, context.store, context.round)
    run = part.run
    forget(context.round.id)
    assert part.registry.client.get_run(run).info.status == "RUNNING"
    context.close()


def test_a_round_ends_also_while_mlflow_does_not_answer(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    _ = context.run
    context.store.finish_round(context.round.id, RoundState.DONE)
    (settings_folder / "home" / "mlflow.db").write_bytes(b"no database")
    context.registry.client._tracking_client.store.engine.dispose()
    with caplog.at_level(logging.WARNING, "trace"):
        forget(context.round.id)
    assert "cannot be told how the round ended" in caplog.text


def test_a_round_that_trained_nothing_makes_no_run(settings_folder: Path) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    forget(context.round.id)
    assert not (settings_folder / "home" / "mlflow.db").exists()


def test_a_round_of_a_home_that_was_made_anew_does_not_go_on_in_the_old_ones_runs(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids of rounds are the same in every home, and MLflow's server may know another one's: what is logged stays."""
    settings = load_settings(profile="smoke", home=settings_folder / "home")
    context = open_context(settings)
    registry, hour, history = context.registry, 3_600_000, f"{context.registry.target}-history"
    began = int(context.round.started_at.timestamp() * 1000) - hour
    old = [
        registry.start_run(key, tags, began=began)
        for key, tags in (
            (round_key(context.round.id), {"round": context.round.id, "kind": "round"}),
            (f"{context.round.id}-refund", {"round": context.round.id, "kind": "training"}),
            (history, {"kind": "history"}),
        )
    ]
    for run in old:
        registry.log_steps(run, {1: {"test/routed": 0.2}})
    with caplog.at_level(logging.WARNING, "trace"):
        own = [context.run, context.part_run(f"{context.round.id}-refund", "refund"), registry.start_run(history)]
    assert not {*own} & {*old}
    assert "3 runs of another home's round 1" in caplog.text
    assert registry.log_steps(own[2], {1: {"test/routed": 0.9}}) == 1
    assert registry.client.get_run(old[0]).data.metrics == {"test/routed": 0.2}
    forget(context.round.id)
    again = open_context(settings)  # another process of the round
    assert [again.run, again.part_run(f"{again.round.id}-refund", "refund")] == own[:2]
    forget(again.round.id)
