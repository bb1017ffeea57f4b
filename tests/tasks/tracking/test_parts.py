"""A round in MLflow: one run, its parts below it with datasets and tables, and versions that tell their story."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from db import Store
from models.adapters.registry import PARENT_TAG, Registry
from tasks.measuring.decisions import CapabilityDecision, GateVerdict
from tasks.measuring.statistics import PairedDifference
from tasks.round.registry import run_name
from tasks.round.results import StartFigures, TrainResult
from tasks.round.stored import StoredRound
from tasks.tracking import parts
from tasks.tracking.parts import log_parts, outcome_table
from tasks.tracking.rounds import log_round
from tasks.tracking.versions import describe_versions, log_decision
from tasks.tracking.wrong_routes import WrongRoute, log_wrong_route
from tests.tasks.episodes.practised_rounds import CAPABILITY, Practised


def practised(store: Store, registry: Registry) -> tuple[Practised, str]:
    """A round whose training has a run under the round's, as the stages make them."""
    parent = registry.start_run("shop-night-1", {}, run_name("shop", 1))
    made = Practised(store, run=registry.start_run("training", {}, run_name("shop", 1, CAPABILITY), parent))
    return made, parent


def difference(points: float, tasks: int = 20) -> PairedDifference:
    return PairedDifference(points=points, low=points - 10, high=points + 10, p=0.01, tasks=tasks, **_rest())


def _rest() -> dict[str, Any]:
    known = {"points", "low", "high", "p", "tasks"}
    return {name: 0 for name in PairedDifference.__dataclass_fields__ if name not in known}


def test_the_parts_of_a_round_lie_under_its_run_and_are_the_same_when_logged_again(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    made, parent = practised(store, registry)
    made.judged(registry, tmp_path)
    for _ in range(2):
        log_parts(registry, made.stored, parent)
    runs = {run.info.run_name: run for run in registry.client.search_runs([registry.experiment_id])}
    names = ["diagnosis", "gate", CAPABILITY, "test"]
    assert sorted(runs) == ["shop night 1", *(f"shop night 1: {name}" for name in names)]
    part = {name: runs[f"shop night 1: {name}"] for name in names}
    assert {run.data.tags[PARENT_TAG] for run in part.values()} == {parent}
    assert {run.info.status for run in part.values()} == {"FINISHED"}
    assert part["diagnosis"].data.metrics == {"success": 0.5, "lost": 0.0, "release": 0.0, "selected": 1.0}
    assert part["gate"].data.metrics == {
        "look": 1.0, "alpha": 0.05, "passed": 1.0, "gate/points": 22.2, "gate/p": 0.001, "gate/mde": 8.0,
    }  # fmt: skip
    assert part["gate"].data.params == {"verdict": "promoted", "passed": CAPABILITY}
    datasets = {name: [d.dataset.name for d in run.inputs.dataset_inputs] for name, run in part.items()}
    assert datasets == {
        "diagnosis": ["shop-diagnosis"], "gate": ["shop-validation"], CAPABILITY: [f"{CAPABILITY}-scenarios"],
        "test": ["shop-test"],
    }  # fmt: skip
    path = registry.client.download_artifacts(part["gate"].info.run_id, "validation.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == {
        "columns": ["task", "family", "trial", "live before", "candidate", CAPABILITY],
        "data": [["refund-v", "refund", 0, False, True, True], ["status-v", "status", 0, False, False, None]],
    }


def test_a_round_that_stopped_early_has_the_parts_that_it_came_to(store: Store, registry: Registry) -> None:
    from tasks.round.stored import StoredRound

    empty = StoredRound(store, store.start_round("shop", "data-one", 7, "laptop", {}))
    log_parts(registry, empty, registry.start_run("empty"))
    assert len(registry.client.search_runs([registry.experiment_id])) == 1


def test_a_table_has_what_sides_differ_on_first_and_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Practised(store)
    one = [made.episode("one", f"f-{i}", 9, 0, 1.0) for i in range(4)]
    two = [made.episode("two", f"f-{i}", 9, 0, None if i == 1 else float(i != 2)) for i in range(4)]
    frame = outcome_table(store, {"one": one, "two": two})
    assert frame["task"].tolist() == ["f-2", "f-0", "f-1", "f-3"]
    assert frame["two"].tolist() == [False, True, None, True]
    monkeypatch.setattr(parts, "MOST_ROWS", 1)
    assert outcome_table(store, {"one": one, "two": two})["task"].tolist() == ["f-2"]


def test_the_gates_figures_stand_on_the_version_and_on_its_run(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    made, _ = practised(store, registry)
    adapter = made.judged(registry, tmp_path)
    decision = CapabilityDecision(
        CAPABILITY, GateVerdict.BETTER, (), difference(37.5), 0.0002, 27.0, 0.05, 1, 1
    )  # fmt: skip
    cost = WrongRoute(difference(-6.25, 30), {"swap delivered": difference(-37.5, 4)}, "", 0.5)
    for _ in range(2):
        log_decision(registry, CAPABILITY, adapter.version, decision)
        log_wrong_route(registry, CAPABILITY, adapter.version, cost)
    expected = {
        "gate/points": 37.5, "gate/p": 0.01, "gate/p_holm": 0.0002, "gate/low": 27.5, "gate/high": 47.5,
        "gate/mde": 27.0, "gate/tasks": 20.0, "wrong-route/all": -6.25, "wrong-route/family/swap delivered": -37.5,
    }  # fmt: skip
    assert registry.client.get_run(made.run).data.metrics == expected
    model = registry.client.get_logged_model(adapter.model_id)
    assert {m.key: m.value for m in model.metrics} == expected
    tags = registry.client.get_model_version(adapter.name, adapter.version).tags
    assert (tags["gate"], tags["gate.points"], tags["gate.p_holm"]) == ("better", "37.5", "0.0002")
    assert json.loads(tags["wrong-route.families"]) == {"swap delivered": -37.5}


def test_a_version_tells_its_story(store: Store, registry: Registry, tmp_path: Path) -> None:
    made, _ = practised(store, registry)
    adapter = made.judged(registry, tmp_path)
    for _ in range(2):
        describe_versions(registry, made.stored, made.figures())
    version = registry.client.get_model_version(adapter.name, adapter.version)
    lines = dict(line.removeprefix("**").split("** ", 1) for line in version.description.split("\n\n"))
    assert list(lines) == ["Lacked", "Trained", "Won", "Costs", "Beat"]
    assert lines["Lacked"].startswith("`refund_payment`: missing in 50.0 % of the failures of night 1, contrast 0.60")
    assert lines["Trained"] == "2 GRPO steps (steps), weights of step 1, from zero."
    assert lines["Won"].startswith("10.0 % to 90.0 % on fresh seeds of its environment; +37.5 points on its own")
    assert lines["Costs"].startswith("16 training episodes, 144 sampled tokens")
    assert lines["Beat"] == "release 2, alone: better. Release 3, which has it: promoted, +22.2 points as a whole."
    assert version.tags["verdict"] == "promoted"
    run = registry.client.get_run(made.run)
    assert run.data.params == {
        "night": "1", "trained from": "zero", "against": "release 2", "verdict alone": "better", "verdict": "promoted",
        "release": "3",
    }  # fmt: skip
    assert (run.data.metrics["cost/episodes"], run.data.metrics["cost/tokens"]) == (16.0, 144.0)


def test_a_rounds_run_has_the_report_the_pages_and_says_how_it_ended(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    made, _ = practised(store, registry)
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "index.html").write_text("<p>episodes</p>")
    run = log_round(registry, made.figures(), "<p>report</p>", tmp_path / "episodes")
    listed = {f.path for f in registry.client.list_artifacts(run)}
    assert listed == {"report.html", "episodes"}
    assert [f.path for f in registry.client.list_artifacts(run, "episodes")] == ["episodes/index.html"]
    note = registry.client.get_run(run).data.tags["mlflow.note.content"]
    assert note.startswith("Release 3 is live")
    assert "episodes/index.html" in note


def test_a_version_tells_whose_weights_it_began_from(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = practised(store, registry)
    adapter = made.judged(registry, tmp_path)
    begun = StartFigures(capability="cancel_order", adapter="x", success=0.5, reward=0.6, chosen=True)
    trained = made.stored.result(TrainResult, CAPABILITY).model_copy(update={"start": "digest", "starts": [begun]})
    found = StoredRound.found

    def given(stored: StoredRound, kind: Any, *of: str) -> Any:
        return trained if kind is TrainResult else found(stored, kind, *of)

    monkeypatch.setattr(StoredRound, "found", given)
    describe_versions(registry, made.stored, made.figures())
    told = registry.client.get_model_version(adapter.name, adapter.version).description
    assert "weights of step 1, on from the adapter for cancel_order." in told
    assert registry.client.get_run(made.run).data.params["trained from"] == "the adapter for cancel_order"
