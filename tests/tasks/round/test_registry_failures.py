"""That MLflow fails is one clear error with its cause, which another run may not meet."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from db import StageState
from errors import StoreError
from settings import load_settings
from tasks.round.results import RolloutResult
from tasks.round.stage import forget, open_context, stage


@stage("rollout")
def on_a_full_disk(context: object) -> RolloutResult:
    try:
        raise sqlite3.OperationalError("database or disk is full")
    except sqlite3.OperationalError as problem:
        raise MlflowException("(raised as a result of Query-invoked autoflush)\n[SQL: INSERT ...]") from problem


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
