"""A whole round whose home is in a storage, on S3's protocol: the home is lost, and another one on the same databases
answers, tells and goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flows.improve as flow
from db import open_store
from flows.cli.main import app
from settings import Settings, load_settings
from tasks.housekeeping.findings import Level
from tasks.housekeeping.stored_checks import stored_findings
from tasks.reporting.lookup import figures_by_key
from tests.integration.storage.letter_target import target
from tests.storage_served import s3_served
from tests.tasks.housekeeping.test_backup_restore import values_with
from tests.tasks.methods.seeds_made import ACCEPTED
from tests.tasks.serving.test_restored_home import answers
from tests.tokenizers_trained import tiny_policy

pytestmark = pytest.mark.integration
CAPABILITY = "begin_with_a_letter"
# So few tasks cannot show that nothing fell by two points; what is tried here is not the gate.
GIVEN: dict[str, Any] = {
    "profile": "smoke",
    "seed": 1,  # one with which the random model learns to begin with a letter
    "target": target.name,
    "dtype": "float32",
    "train": {
        "groups": 4, "group_size": 8, "rank": 8, "alpha": 32, "upper_layers": 3, "temperature": 1.0, "micro_batch": 32,
        "learning_rate": 0.02, "candidates": 2, "choosing": 16, "steps": 6, "collections": 6, "transfer": 0,
    },
    "rollout": {"max_tokens": 3, "temperature": 0.7, "tasks": 0},
    "selection": {"most": 1, "delta": 0.1},
    "calibration": {"seeds": 4, "samples": 6, "uniform": 1.0, "low": 0.0, "high": 1.0, "informative": 0.0},
    "evaluation": {"trials": 1, "validation_trials": 2, "fresh": 8, "own_tasks": 0, "margin": 100},
}  # fmt: skip


@pytest.fixture
def settings(settings_folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Of a home with its databases elsewhere and its files in a bucket, and of a tiny random model, named by a relative
    folder: draws follow from its name, and are the same in every run."""
    policy, _ = tiny_policy(tiny_tokenizer, context=2048)
    policy.model.save_pretrained(settings_folder / "base")
    tiny_tokenizer.save_pretrained(settings_folder / "base")
    # A scripted policy solves a target so simple.
    monkeypatch.setattr("tasks.synthesis.environments.validate_environment", lambda *_, **__: ACCEPTED)
    with s3_served() as s3:
        places = {name: f"sqlite:///{settings_folder}/{name}.db" for name in ("database", "tracking")}
        given = {**GIVEN, **places, "base_model": "base", "files": f"{s3}/letters"}
        for name, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value)
            monkeypatch.setenv(f"TRACE_{name.upper()}", text)
        yield load_settings(home=settings_folder / "one")


def test_a_round_goes_on_where_nothing_but_storage_and_databases_is_left(
    settings: Settings, settings_folder: Path, prefect: None
) -> None:
    from mlflow.tracking._tracking_service import utils

    outcome = flow.improve(flow.ImproveParameters(home=settings.folder))
    assert outcome.promoted == [CAPABILITY]
    page = Path(outcome.report)
    assert page == settings.folder / outcome.round / "report.html"
    text, said = page.read_text(), answers(settings, CAPABILITY)
    assert said[1].startswith(f"{CAPABILITY}@v1-")
    with open_store(settings.database_url) as store:
        figures = figures_by_key(settings, store)
        ((trained,),) = store.query("SELECT id FROM adapters").to_numpy().tolist()

    shutil.rmtree(settings.folder)
    utils._artifact_repos_cache.clear()  # another process does not know where the files of a model lie
    other = load_settings(home=settings_folder / "two")
    assert answers(other, CAPABILITY) == said
    told = CliRunner().invoke(app, ["report", "--json", "--home", str(other.folder)], catch_exceptions=False)
    assert json.loads(told.stdout) == {"report": str(other.folder / outcome.round / "report.html")}
    assert (other.folder / outcome.round / "report.html").read_text() == text
    assert [f.said for f in stored_findings(other, True) if f.level != Level.OK] == []

    played = flow.until("rollout", flow.ImproveParameters(home=other.folder))
    assert played["release"] == 1
    with open_store(other.database_url) as store:
        assert figures_by_key(other, store, outcome.round) == figures
        acted = store.query(f"SELECT DISTINCT adapter_id FROM trajectories WHERE id IN {tuple(played['trajectories'])}")
    used = set(acted["adapter_id"].dropna())
    assert used == {trained}, "the next round's diagnosis is played by the release, from the other home"

    program = str(Path(flow.__file__).parents[1])
    for place in (str(settings.folder), str(other.folder), program):
        assert [values_with(settings_folder / f"{name}.db", place) for name in ("database", "tracking")] == [[], []]
