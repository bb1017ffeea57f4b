"""Two real trainings at once, in processes of their own, come to what they come to one after the other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from db import AdapterRow, CapabilityRow, EnvironmentRow, EnvironmentState, row_id
from flows import train_apart as apart
from flows.train_apart import train_together
from models.adapters.files import adapter_digest
from settings import Settings, load_settings
from tasks import train as stage_file
from tasks.round.context import Context
from tasks.round.results import SynthesizeResult, TrainResult
from tasks.round.stage import forget, open_context, stage
from tests.flows.trainings import toy_stage
from tests.tasks.test_train import TRAIN, Quiet

ROOT = Path(__file__).parents[3]
CAPABILITIES = ["ask_for_it", "say_it"]


@pytest.fixture
def prepared(settings_folder: Path, tiny_model: Any) -> Settings:
    """Settings of a home whose round has environments for both, and a base of random weights."""
    policy, renderer = tiny_model
    policy.model.save_pretrained(settings_folder / "base")
    renderer.tokenizer.save_pretrained(settings_folder / "base")
    settings = load_settings(
        profile="smoke",
        home=settings_folder / "home",
        base_model=str(settings_folder / "base"),
        dtype="float32",
        train=TRAIN | {"candidates": 2, "choosing": 4, "steps": 2},
        rollout={"max_tokens": 6, "temperature": 0.5},
        selection={"most": 2},
        devices={"trainings": 2},
    )
    context = open_context(settings)
    for name in CAPABILITIES:
        given: Any = {"round_id": context.round.id}
        capability = CapabilityRow(id=row_id(context.round.id, name), name=name, analyst="checks", **given)
        environment = EnvironmentRow(
            id=name, capability_id=capability.id, version=1, kind="generators", state=EnvironmentState.DRAFT, **given
        )
        context.store.put([capability])
        context.store.put([environment])
        synthesized.do(context, name)
    forget(context.round.id)
    return settings


@stage("synthesize")
def synthesized(context: Context, capability: str) -> SynthesizeResult:
    return SynthesizeResult(accepted=True, environment=capability)


def episodes(context: Context) -> dict[str, tuple[Any, ...]]:
    """Everything that was played, by id: what for, by which weights, which tokens, to what reward."""
    return {
        row.id: (
            row.purpose,
            row.policy_id,
            row.adapter_id,
            row.task_id,
            tuple(row.token_ids if row.token_ids is not None else ()),
            row.reward,
        )
        for row in context.store.trajectories(context.round.id, with_blobs=True)
    }


@pytest.mark.usefixtures("prefect")
def test_trainings_at_once_make_the_adapters_of_trainings_in_turn(
    prepared: Settings, settings_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(prepared.folder, settings_folder / "copy")  # the same round, so that the same ids are expected
    (settings_folder / "meet").mkdir()
    spec_of = apart.spec_of

    def toy(context: Context, capability: str) -> dict[str, Any]:
        spec = spec_of(context, capability)
        here = {"meet": str(settings_folder / "meet"), "trainings": len(CAPABILITIES)}
        return spec | {"lead": "tests.flows.trainings.toy_stage:lead", "order": spec["order"] | here}

    monkeypatch.setattr(apart, "spec_of", toy)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    together = open_context(prepared)
    results = train_together(together, CAPABILITIES)
    assert list(results) == CAPABILITIES
    lines = capfd.readouterr().err
    for name in CAPABILITIES:
        assert f"[round 1 train {name}] train {name}: 2 of 2 steps" in lines, "whose line it is"

    monkeypatch.setattr(stage_file, "stored_environment", toy_stage.made)
    in_turn = open_context(prepared.model_copy(update={"home": settings_folder / "copy"}))
    assert in_turn.round.id == together.round.id
    in_turn.__dict__["registry"] = Quiet()
    for name in CAPABILITIES:
        expected = stage_file.train.do(in_turn, name)
        assert results[name].sha256 == expected.sha256
        assert results[name].choice == expected.choice
        assert results[name] == together.result(TrainResult, name)
        row = together.store.row(AdapterRow, id=results[name].adapter)
        assert row is not None
        assert adapter_digest(together.settings.folder / row.path) == expected.sha256
    assert len({result.sha256 for result in results.values()}) == 2
    played = episodes(together)
    assert played == episodes(in_turn)
    assert {purpose for purpose, *_ in played.values()} == {"training", "evaluation"}

    # MLflow: one run of the round, which the jobs left open, and one of each training under it.
    client = together.registry.client
    runs = {run.info.run_id: run for run in client.search_runs([together.registry.experiment_id])}
    parents = [run.data.tags.get("mlflow.parentRunId") for run in runs.values()]
    assert sorted(parents, key=str) == sorted([None, together.run, together.run], key=str)
    assert runs[together.run].info.status == "RUNNING"
    for name in CAPABILITIES:
        steps = client.get_metric_history(results[name].run, "train/own_success")
        assert [metric.step for metric in steps] == [1, 2]
        assert runs[results[name].run].data.tags["capability"] == name
    for context in (together, in_turn):
        forget(context.round.id)
