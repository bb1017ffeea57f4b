"""What is learnt from: successes alone, never what measures, of every scenario and family only so many, and what was
shown advice behind the target's own prompt; and the adapter that learns from them is made once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from db import AdapterRow, AdapterState, CapabilityRow, TrajectoryRow, row_id
from environments.contract import Message, Prompt, ToolCall
from environments.synthesized.hints import advised, is_advised
from errors import Untrainable
from models.episodes import Episode
from models.training import recall
from tasks.measuring.lineup import TRIED
from tasks.methods.seed.seed_run import close_round, diagnose, pay
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.round.target_prompt import first_opening
from tasks.synthesis.calibration import HINT
from tasks.synthesis.learning import recalling
from tasks.synthesis.learning.recalling import EACH, FAMILY, conversation_of, learn, successes
from tasks.synthesis.learning.training import training_settings
from tests.tasks.methods.seeds_made import seed_run, without_prefect

EARLY = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def context(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    without_prefect(monkeypatch)
    run = seed_run(settings_folder, tiny_model)
    diagnose(run)
    yield run.context
    close_round(run.context)


def stored(context: Context, name: str, task: str = "task", **changes: Any) -> str:
    """A trajectory of the round that succeeded, unless `changes` say otherwise; what was said is its name."""
    said = changes.pop("said", name)
    row = TrajectoryRow(
        **{
            "id": row_id(name), "round_id": context.round.id, "purpose": "calibration", "target": context.round.target,
            "data_hash": context.round.data_hash, "environment": "made", "task_id": task, "family": "made",
            "split": "training", "seed": 0, "trial": 0, "policy_id": "p", "base": "b", "termination": "done",
            "reward": 1.0, "success": True, "created_at": EARLY, "token_ids": [5, 6, 7], "logprobs": [0.0, -1.0, -1.0],
            "sampled_mask": [False, True, True],
            "messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": said}],
            **changes,
        }
    )  # fmt: skip
    context.store.add_trajectories([row])
    return row.id


def learnt_from(context: Context) -> set[str]:
    """Ids of what is learnt from, without the real diagnosis of the round."""
    return {row.id for row in successes(context) if row.base == "b"}


def adapter(context: Context, name: str, capability: str | None) -> str:
    identity = adapter_id(context.round.id, name)
    if capability is not None:
        row = CapabilityRow(id=capability, round_id=context.round.id, name=name, definition="", analyst="checks")
        context.store.put([row])
    made = AdapterRow(id=identity, round_id=context.round.id, capability_id=capability, base="b", base_revision="r",
                      state=AdapterState.TRAINING, config={})  # fmt: skip
    context.store.put([made])
    return identity


def test_successes_count_and_what_measures_does_not(context: Context) -> None:
    mine, rival = adapter(context, "mine", row_id("capability")), adapter(context, "grpo-target", None)
    wanted = {
        stored(context, "calibrated"),
        stored(context, "diagnosed", purpose="diagnosis"),
        stored(context, "trained", purpose="training", adapter_id=mine),
        stored(context, "tried", purpose=TRIED, adapter_id=mine),
    }
    stored(context, "failed", success=False, reward=0.4)
    stored(context, "lost", success=None, reward=None, error="x", error_boundary="sandbox")
    stored(context, "fresh seeds", purpose="evaluation", adapter_id=mine)
    stored(context, "validation", purpose="evaluation", split="validation")
    stored(context, "another method's", purpose="training", adapter_id=rival)
    stored(context, "without ids", token_ids=None, sampled_mask=None, logprobs=None)
    assert learnt_from(context) == wanted
    diagnosis = {row.id for row in successes(context)} - wanted
    assert {row.purpose for row in context.store.trajectories(None, id=list(diagnosis))} <= {"diagnosis"}
    solved = outcomes(context.store, [row.id for row in context.store.trajectories(context.round.id, base="tiny")])
    assert len(diagnosis) <= solved["success"].sum()


def test_so_many_of_a_scenario_and_of_a_family_the_latest_and_no_two_alike(context: Context) -> None:
    for k in range(EACH + 3):
        stored(context, f"one-{k}", "one", created_at=EARLY + timedelta(seconds=k))
    stored(context, "again", "one", said=f"one-{EACH + 2}", created_at=EARLY)
    assert learnt_from(context) == {row_id(f"one-{k}") for k in range(3, EACH + 3)}
    for k in range(2 * FAMILY):
        stored(context, f"wide-{k}", f"scenario-{k % FAMILY}", family="wide")
    found = [row for row in successes(context) if row.family == "wide"]
    assert len(found) == FAMILY
    assert set(Counter(row.task_id for row in found).values()) == {1}, "of as many scenarios as there are"


def test_what_was_shown_advice_is_learnt_behind_the_targets_own_prompt(context: Context) -> None:
    """The very turns that were played, behind the prompt that the scenario has by itself."""
    from environments.synthesized.hints import Advised

    task = context.tasks("diagnosis")[0]
    advice = (Message("user", "b?"), Message("assistant", "", (ToolCall("x", {}),)), Message("tool", "1"),
              Message("assistant", "yes"))  # fmt: skip
    ground = replace(context.ground("calibration"), make=lambda: Advised(context.target.environment()), group=HINT)
    told = advised(task, advice[:1] + advice[3:])
    assert is_advised(told)
    (shown,) = context.engine.play(replace(ground, scope="shown"), [Episode("", told, 1, 0)], "shown")
    row = next(iter(context.store.trajectories(None, with_blobs=True, id=shown)))
    environment = context.target.environment()
    first = environment.reset(task).messages
    prompt, renderer = Prompt.of(environment), context.base.renderer
    plain = renderer.start(prompt, first)
    made = conversation_of(row, renderer, prompt)
    assert made.ids[: len(plain.ids)] == plain.ids
    assert row.token_ids is not None
    assert row.sampled_mask is not None
    assert len(made.ids) < len(row.token_ids)
    turns = [i for i, s in zip(made.ids, made.sampled, strict=True) if s]
    assert turns == list(np.asarray(row.token_ids)[np.asarray(row.sampled_mask)])
    as_played = conversation_of(replace(row, group_id=None), renderer, prompt)
    assert as_played.ids == list(row.token_ids)


def test_advice_behind_a_prompt_of_the_tasks_own_is_not_learnt_from(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """What such a task shows without it is not known, and behind another's prompt it is another task."""
    plain = context.base.renderer.start(*first_opening(context.target))
    ids = [*plain.ids[: plain.shared], 5, 6, 7]
    given: dict[str, Any] = {
        "group_id": HINT, "sampled_mask": [False] * (len(ids) - 1) + [True], "logprobs": [0.0] * len(ids)
    }  # fmt: skip
    known = stored(context, "known", token_ids=ids, **given)
    stored(context, "of its own", "other", token_ids=[ids[1], *ids[1:]], **given)
    assert learnt_from(context) == {known}
    assert "1 successes with advice are not learnt from" in caplog.text


def test_an_adapter_learns_once_and_keeps_no_step_but_the_last(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in context.store.trajectories(None, with_blobs=True) if row.sampled_mask is not None][:5]
    made = learn(context, "learner", rows, training_settings(context.settings), 2)
    row = made.adapter
    assert (row.state, row.capability_id) == (AdapterState.TRAINED, None)
    assert row.config["successes"] == 5
    assert row.config["learnt"] == sorted({r.family for r in rows})
    folder = context.settings.folder / row.path
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert [p.name for p in folder.parent.iterdir() if p.name != "final"] == []
    assert "nll" in context.registry.client.get_run(made.run).data.metrics
    monkeypatch.setattr(recalling, "recall_adapter", lambda *given: pytest.fail("it was learnt already"))
    assert learn(context, "learner", rows, training_settings(context.settings), 2).adapter.sha256 == row.sha256


def test_the_seconds_of_learning_are_kept_where_the_process_is_killed(context: Context) -> None:
    """Nothing is played, so nothing is charged: what was learnt in an earlier process would have taken no time."""
    rows = [row for row in context.store.trajectories(None, with_blobs=True) if row.sampled_mask is not None][:5]
    account = pay(context, "demonstrations", 50, ())
    working = account.working()
    working.__enter__()  # a process that is killed leaves no block
    before = time.monotonic()
    learn(context, "learner", rows, training_settings(context.settings), 2)
    assert 0 < account.row.seconds <= time.monotonic() - before + 1
    assert account.counts() == {}


def test_an_adapter_whose_last_update_tore_it_apart_is_not_made(context: Context) -> None:
    rows = [row for row in context.store.trajectories(None, with_blobs=True) if row.sampled_mask is not None][:5]
    wanted = replace(training_settings(context.settings), learning_rate=1e39)
    with pytest.raises(Untrainable, match=r"the adapter after step 1 .* not finite"):
        learn(context, "torn", rows, wanted, 1)
    row = context.store.row(AdapterRow, id=adapter_id(context.round.id, "torn"))
    assert row is not None
    assert (row.state, row.path) == (AdapterState.TRAINING, "")


def test_demonstrations_are_learnt_beside_successes(context: Context) -> None:
    rows = [row for row in context.store.trajectories(None, with_blobs=True) if row.sampled_mask is not None][:2]
    shown = [conversation_of(row, context.base.renderer, Prompt()) for row in rows]
    made = learn(
        context, "beside", rows, training_settings(context.settings), 2, demonstrations=shown, of=("new", "low")
    )
    assert (made.adapter.config["successes"], made.adapter.config["demonstrations"]) == (2, 2)
    assert set(made.adapter.config["learnt"]) >= {"new", "low"}
    assert made.steps == recall.recall_steps(4, 2, training_settings(context.settings))


def test_few_conversations_are_learnt_in_more_passes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four conversations learnt once are one step of four rows, which teaches next to nothing."""
    rows = [row for row in context.store.trajectories(None, with_blobs=True) if row.sampled_mask is not None][:4]
    wanted = replace(training_settings(context.settings), groups=2, group_size=2)
    train = context.settings.train
    for least, passes, steps in ((3, 1, 3), (1, 2, 2)):
        settings = context.settings.model_copy(update={"train": train.model_copy(update={"recall_steps": least})})
        monkeypatch.setattr(context, "settings", settings)
        assert learn(context, f"often-{least}", rows, wanted, passes).steps == steps


def test_steps_are_passes_over_all(context: Context) -> None:
    settings = training_settings(context.settings)
    rows = settings.groups * settings.group_size
    assert [recall.recall_steps(n, 3, settings) for n in (1, rows, rows + 1)] == [1, 3, 4]
