"""A release's evaluation that is resumed: its router may decide otherwise beside other tasks; no task counts twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from db import open_store
from environments.contract import TargetTask
from errors import EnvironmentFault
from models.policy import Sampling
from settings import load_settings
from tasks.measuring.figures import EvaluationRow
from tasks.measuring.outcomes import Outcomes, outcomes_of
from tasks.measuring.policy_names import LoadedPolicy, PolicyName, PolicyOptions, load_policy
from tasks.measuring.targets import EvaluateRequest, evaluate_targets
from tests.adapters_made import make_adapter
from tests.tasks.counting_target import Counting

TARGET = "tests.tasks.counting_target:target"


@pytest.fixture
def release(tiny_model: Any, tmp_path: Path, settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose router gives all tasks its one adapter where it sees more than four of them at once."""
    policy, renderer = tiny_model
    policy.load_adapter("made", "made", make_adapter(policy.model, tmp_path / "made", layers=(1, 2)))

    def choose(tasks: Sequence[TargetTask]) -> list[str | None]:
        return ["made" if len(tasks) > 4 else None] * len(tasks)

    def load(name: PolicyName, *given: Any) -> LoadedPolicy:
        if name.kind != "release":
            return load_policy(name, *given)
        how: dict[str, Any] = {"choose": choose, "adapters": ("made",), "acting": policy.identity(), "release": 1}
        return LoadedPolicy(name, policy, Sampling(1.0, 4), renderer, **how)

    monkeypatch.setattr("tasks.measuring.targets.load_policy", load)


def evaluated(limit: int | None = None, trials: int = 2) -> tuple[EvaluationRow, Outcomes]:
    request = EvaluateRequest(TARGET, "test", "release", trials=trials, limit=limit)
    row = evaluate_targets(request, PolicyOptions())[0]
    with open_store(load_settings().database_url) as store:
        return row, outcomes_of(store, row.evaluation, TARGET)


@pytest.mark.usefixtures("release")
def test_a_task_stays_with_the_adapter_that_has_played_it_under_another_limit() -> None:
    few, _ = evaluated(limit=3)
    whole, outcomes = evaluated()
    assert few.evaluation == whole.evaluation
    assert (whole.earlier, whole.owed) == (6, 0), "what the first run has played is played again"
    assert len(outcomes.frame) == 16
    again, _ = evaluated(limit=3)
    assert again.earlier == 6
    assert again.scored == few.scored
    with open_store(load_settings().database_url) as store:
        acted = {(t.task_id, t.policy_id) for t in store.trajectories(None, group_id=whole.evaluation)}
    assert len(acted) == 8
    assert len({policy for _, policy in acted}) == 2, "the other tasks are the router's to choose"


@pytest.mark.usefixtures("release")
def test_an_episode_that_was_lost_counts_once_when_another_adapter_has_played_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def down(environment: Counting, task: TargetTask) -> None:
        raise EnvironmentFault("away")

    with monkeypatch.context() as away:
        away.setattr(Counting, "reset", down)
        lost, _ = evaluated(limit=3)
    assert lost.owed == 6
    whole, outcomes = evaluated()
    assert whole.owed == 0
    assert len(outcomes.frame) == 16
    assert outcomes.frame["success"].notna().all()
