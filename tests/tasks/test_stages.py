"""Stages are done once, calibration is judged by its figures, and what is stored is found by its id."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from db import GENERALIST, EvaluationRow, StageRow
from errors import EnvironmentFault, EpisodesLost, StoreError, TargetBusy
from models.adapters.files import checked_name
from settings import load_settings
from tasks.evaluate import _store_evaluation
from tasks.reporting.lookup import find_row
from tasks.round import stage as stages
from tasks.round.context import Context
from tasks.round.registry import registry_name
from tasks.round.results import GateResult, RegisterResult, SelectResult, SynthesizeResult, TrainResult
from tasks.round.stage import current, forget, open_context, stage
from tasks.select import select
from tasks.synthesis.calibration import calibration_figures, is_mastered, judge
from tasks.synthesis.learning import generalist as learnt_first
from tasks.synthesis.learning.generalist import store_generalist
from tasks.unattended import alive
from tests.db.store_examples import failure, trajectory

RULE = load_settings(profile="laptop").calibration.model_dump() | {"informative_alone": False, "high": 0.6}


def groups(*shares: float, samples: int = 8) -> tuple[list[Any], list[Any]]:
    """Rewards and wins of one group per share of successes."""
    wins = [np.arange(samples) < round(s * samples) for s in shares]
    return [w.astype(float) for w in wins], wins


def test_figures_of_groups() -> None:
    figures = calibration_figures(*groups(0.0, 0.5, 0.5, 1.0))
    assert figures["mean_reward"] == figures["success_rate"] == 0.5
    assert (figures["all_success"], figures["all_zero"], figures["informative"]) == (0.25, 0.25, 0.5)
    assert figures["std_reward"] == 0.5
    assert figures["low"] < 0.5 < figures["high"]


def test_the_interval_is_that_of_scenarios_and_not_of_samples() -> None:
    """Samples of one scenario are alike: more of them tell little, more scenarios tell more."""
    widths = {}
    for samples, times in ((8, 4), (64, 4), (8, 32)):
        figures = calibration_figures(*groups(*[0.0, 1.0] * (times // 2), samples=samples))
        widths[samples, times] = figures["high"] - figures["low"]
    assert widths[64, 4] == pytest.approx(widths[8, 4], rel=0.1)
    assert widths[8, 4] > 0.6  # four scenarios that all agree within themselves are four observations
    assert widths[8, 32] < 0.6 * widths[8, 4]
    # Where the samples of a scenario differ among themselves they do count.
    differing = calibration_figures(*groups(*[0.5] * 4))
    assert differing["high"] - differing["low"] < widths[8, 4]


def test_an_environment_that_is_solved_throughout_is_mastered_and_does_not_train() -> None:
    full = calibration_figures(*groups(1.0, 1.0, 1.0))
    for rule in (RULE, RULE | {"informative_alone": True}):
        accepted, reason = judge(full, rule)
        assert not accepted
        assert reason.startswith("mastered: ")
    assert is_mastered(full)
    nearly = calibration_figures(*groups(1.0, 1.0, 0.875))
    assert not is_mastered(nearly)
    assert "mastered" not in judge(nearly, RULE)[1]


def test_near_misses_count_for_groups_and_not_for_success() -> None:
    rewards = [np.array([0.0, 0.2, 0.0, 0.4])]
    figures = calibration_figures(rewards, [np.zeros(4, dtype=bool)])
    assert (figures["informative"], figures["all_zero"], figures["success_rate"]) == (1.0, 0.0, 0.0)
    assert figures["low"] == 0.0


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.25, 0.5, 0.5), ""),
        ((0.75, 0.75, 0.875), "outside"),
        ((0.125, 0.125, 0.125), "outside"),
        ((0.5, 0.5, 1.0, 0.0, 0.0), "all-zero"),
        ((0.25, 0.25, 0.25, 1.0, 1.0), "all-success"),
        ((1.0, 0.0, 0.0, 0.0), "informative"),
    ],
)
def test_the_band(shares: tuple[float, ...], words: str) -> None:
    accepted, reason = judge(calibration_figures(*groups(*shares)), RULE)
    assert accepted is (not words)
    assert words in reason


def test_the_band_is_inclusive() -> None:
    figures = calibration_figures(*groups(0.25, 0.5, 0.5))
    for value in (RULE["low"], RULE["high"]):
        assert judge(figures | {"mean_reward": value, "success_rate": value}, RULE)[0]


def test_informative_groups_alone_are_accepted_only_where_asked_and_never_silently() -> None:
    rewards = [np.array([0.0, 0.2, 0.0, 0.4]), np.array([0.0, 0.0, 0.3, 0.1])]
    figures = calibration_figures(rewards, [np.zeros(4, dtype=bool)] * 2)
    assert not judge(figures, RULE)[0]
    never, why = judge(figures, RULE | {"informative_alone": True})
    assert not never
    assert not why.startswith("accepted")
    figures = figures | {"success_rate": 1 / 8}  # one success somewhere
    assert not judge(figures, RULE)[0]
    accepted, reason = judge(figures, RULE | {"informative_alone": True})
    assert accepted
    assert "informative groups alone" in reason
    assert "outside" in reason
    easy = calibration_figures(*groups(0.875, 0.75))
    assert not judge(easy, RULE | {"informative_alone": True})[0]  # nothing lacks what succeeds


def test_registry_names() -> None:
    assert registry_name("shop") == "shop"
    assert registry_name("tau2:retail") == "tau2-retail"
    assert registry_name("my.package:make/it") == "my-package-make-it"
    long = [f"reasoning-gym:{','.join([first, *['number_filtering'] * 9])}" for first in ("gcd", "lcm")]
    assert registry_name(long[0]).startswith("reasoning-gym-gcd-number_filtering-")
    assert len({checked_name(registry_name(name), "target") for name in long}) == 2
    assert registry_name("a" * 120) == "a" * 120, "what the registry takes stays as it is"


@pytest.fixture
def context(settings_folder: Path) -> Any:
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


def selecting(*names: str) -> Any:
    """A stage that selects `names` and counts its calls in `calls`."""
    calls: list[int] = []

    @stage("select")
    def work(context: Context) -> SelectResult:
        calls.append(1)
        return SelectResult(selected=list(names))

    work.calls = calls  # type: ignore[attr-defined]
    return work


def test_a_stage_is_done_once_and_read_back_as_its_own_type(context: Context) -> None:
    select = selecting("a", "b")
    first = select.do(context)
    assert isinstance(first, SelectResult)
    assert first.selected == ["a", "b"]
    assert select.do(context) == first == context.result(SelectResult)
    assert select.calls == [1]


def test_a_stage_of_a_capability_is_stored_under_its_name(context: Context) -> None:
    @stage("synthesize", title="synthesize {capability}")
    def work(context: Context, capability: str) -> SynthesizeResult:
        return SynthesizeResult(accepted=capability == "a", reasons=[capability])

    assert work.do(context, "a").goes_on
    assert not work.do(context, capability="b").goes_on
    assert context.result(SynthesizeResult, "b").reasons == ["b"]
    assert context.found(SynthesizeResult, "c") is None
    with pytest.raises(StoreError, match="'synthesize:c' of round 1 is not done"):
        context.result(SynthesizeResult, "c")


def test_a_stage_of_nothing_in_particular_has_the_name_alone(context: Context) -> None:
    """Prefect passes a default on as if it had been given."""

    @stage("train")
    def of(context: Context, capability: str = "") -> TrainResult:
        return TrainResult(adapter=capability, sha256="", steps=0, run="", ending="", chosen=0)

    assert of.do(context, "").adapter == ""
    assert of.do(context, capability="").adapter == ""
    assert of.do(context, "one").adapter == "one"
    names = {row.name for row in context.store.rows(StageRow, round_id=context.round.id)}
    assert names == {"train", "train:one"}
    assert context.found(TrainResult) != context.found(TrainResult, "one")


def test_a_stage_with_nothing_to_do_is_skipped_with_the_reason(context: Context) -> None:
    @stage("gate")
    def work(context: Context) -> GateResult:
        return GateResult(skipped="no capability was trained")

    assert not work.do(context).goes_on
    assert context.result(GateResult) == GateResult(skipped="no capability was trained")
    assert context.store.stage(context.round.id, "gate").row().state == "skipped"


def test_a_result_of_another_version_is_one_clear_error(context: Context) -> None:
    row = context.store.stage(context.round.id, "select")
    assert row.claim()
    row.finish({"selected": "everything"})
    with pytest.raises(StoreError, match=r"'select' of round 1 was stored by another version \(selected .*again"):
        context.result(SelectResult)


def roll_out_by_version_0_1(context: Context) -> None:
    """A stage's result that this version cannot read, so that its round cannot be gone on with."""
    row = context.store.stage(context.round.id, "rollout")
    assert row.claim()
    row.finish({"episodes": 36, "errors": 0, "success": 0.5})


def test_a_round_that_another_version_began_is_closed_and_another_begins(
    context: Context, settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An upgrade in the middle of a round must not stop a schedule."""
    roll_out_by_version_0_1(context)
    with caplog.at_level("WARNING", logger="trace"):
        again = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    assert again.round.id != context.round.id
    closed = context.store.round(context.round.id)
    assert closed.state == "failed"
    assert "'rollout' of round 1 was stored by another version" in closed.reason
    assert "round 1 is closed, and another begins" in caplog.text
    selecting("kept").do(again)
    assert open_context(load_settings(profile="smoke", home=settings_folder / "home")).round.id == again.round.id


def test_a_round_that_cannot_be_joined_is_not_closed_under_the_process_that_works_on_it(
    context: Context, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_out_by_version_0_1(context)
    monkeypatch.setattr(alive, "is_own_or_ended", lambda owner: False)
    context.store.presence(context.round.id, 3600.0).beat()
    with pytest.raises(TargetBusy, match="round 1 of shop goes on in another process"):
        open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    assert context.store.round(context.round.id).state == "running"


def test_a_stage_returns_the_result_of_its_name() -> None:
    with pytest.raises(TypeError, match="returns SelectResult, the result of 'select'"):

        @stage("gate")
        def work(context: Context) -> SelectResult:
            return SelectResult(selected=[])


def test_a_stage_stores_what_the_model_and_the_environment_took(context: Context) -> None:
    @stage("select")
    def work(context: Context) -> SelectResult:
        with context.model:
            time.sleep(0.02)
        return SelectResult(selected=[])

    context.model.seconds = 5.0  # of another stage
    result = work.do(context)
    assert 0.02 <= result.model_seconds < 1.0
    assert result.environment_seconds == 0.0


def test_a_rate_says_of_how_many_finished_episodes_it_is(context: Context) -> None:
    found = [trajectory(context.round.id, name, task_id=name[0], trial=int(name[1])) for name in ("a0", "a1", "b0")]
    found[:2] = [replace(t, success=True) for t in found[:2]]
    found += [failure(context.round.id, "b1")]
    context.store.add_trajectories(found)
    rate = _store_evaluation(context, "test", "live", [t.id for t in found], (2, 2))
    assert rate is not None
    assert (rate.n, rate.tasks) == (3, 2)
    (row,) = context.store.rows(EvaluationRow)
    assert (row.success, list(row.detail.values())) == (0.5, [0.5]), "of the one family as of all"


def test_a_side_that_lost_every_episode_is_one_error(context: Context) -> None:
    context.store.add_trajectories([failure(context.round.id, "lost")])
    with pytest.raises(EpisodesLost, match="all 1 episodes of live on the test split were lost to errors") as problem:
        _store_evaluation(context, "test", "live", ["lost"], (1, 1))
    assert problem.value.transient, "the round is gone on with"
    assert _store_evaluation(context, "test", "noop", ["lost"], (1, 1)) is None, "it decides nothing"


def test_a_stage_that_failed_is_done_again(context: Context) -> None:
    @stage("select")
    def fails(context: Context) -> SelectResult:
        raise EnvironmentFault("no")

    with pytest.raises(EnvironmentFault):
        fails.do(context)
    row = context.store.stage(context.round.id, "select")
    assert not row.finished
    assert "no" in str(row.row().error)
    assert selecting("second").do(context).selected == ["second"]


def test_a_stage_whose_process_died_is_taken_over(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = context.store.stage(context.round.id, "select")
    assert dead.claim(owner="dead", lease_seconds=0.5)  # and no heartbeat follows
    slept: list[float] = []
    real = stages.time.sleep
    monkeypatch.setattr(stages.time, "sleep", lambda seconds: (slept.append(seconds), real(0.3)))
    assert selecting("the second").do(context).selected == ["the second"]
    assert slept


def test_a_round_may_play_some_tasks_of_each_split(context: Context) -> None:
    everything = list(context.target.tasks("diagnosis"))
    some = context.tasks("diagnosis")
    assert len(some) == context.settings.rollout.tasks < len(everything)
    assert len({t.id for t in some}) == len(some)
    assert {t.family for t in some} == {t.family for t in everything}
    assert some == context.tasks("diagnosis")


def test_the_same_settings_find_the_same_round(context: Context, settings_folder: Path) -> None:
    home = settings_folder / "home"
    selecting("first").do(context)
    again = open_context(load_settings(profile="smoke", home=home))
    assert again.round.id == context.round.id
    assert selecting("another").do(again).selected == ["first"]
    assert open_context(load_settings(profile="smoke", home=home, seed=1)).round.id != context.round.id
    assert open_context(load_settings(profile="smoke", home=home), fresh=True).round.id != context.round.id
    assert current(context.round.id).round.id == context.round.id


def test_another_process_opens_a_round_by_its_id(
    context: Context, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(context.round.id)
    monkeypatch.setenv("TRACE_HOME", str(settings_folder / "home"))
    opened = current(context.round.id)
    assert opened is not context
    assert opened.settings.identity() == context.settings.identity()


def test_changed_data_begins_another_round(
    context: Context, settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unfinished round on other data cannot be gone on with, and must not stop a schedule."""

    class Changed:
        name, data_hash, licence = "shop", "f" * 16, "none"

        def tasks(self, split: str) -> tuple[()]:
            return ()

    monkeypatch.setattr("tasks.round.traffic.load_target", lambda *given: Changed())
    with caplog.at_level("WARNING", logger="trace"):
        again = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    assert again.round.number == 2
    closed = context.store.round(context.round.id)
    assert closed.state == "failed"
    assert f"changed from {context.round.data_hash} to {'f' * 16}" in closed.reason


def test_the_seed_of_a_round_is_decided_by_seed_and_number(context: Context, settings_folder: Path) -> None:
    assert context.seed == context.settings.seed, "the first round draws by the seed itself"
    again = open_context(load_settings(profile="smoke", home=settings_folder / "home"), fresh=True)
    assert again.seed != context.seed
    assert {again.seed % 1000, context.seed % 1000} == {0, 3}, "training scenarios are those of other seeds, too"


def test_each_round_draws_new_tasks_and_test_stays_sealed(context: Context, settings_folder: Path) -> None:
    again = open_context(load_settings(profile="smoke", home=settings_folder / "home"), fresh=True)
    target: Any = context.target
    contents = {
        (n, split): {target.content(t) for t in opened.tasks(split)}
        for n, opened in ((1, context), (2, again))
        for split in ("diagnosis", "validation", "test")
    }
    assert contents[1, "test"] == contents[2, "test"]
    drawn = [contents[n, split] for n in (1, 2) for split in ("diagnosis", "validation")] + [contents[1, "test"]]
    assert sum(map(len, drawn)) == len(set().union(*drawn)), "no content twice"
    assert context.tasks("diagnosis") == Context(context.settings, context.store, context.round).tasks("diagnosis")
    # The first round goes on, and draws what the second has drawn meanwhile: the second keeps its tasks.
    row = context.drawing._drawn_row(target.content(again.tasks("diagnosis")[0]), context.tasks("diagnosis")[0])
    context.store.put([replace(row, task_id="drawn later")])
    assert Context(again.settings, again.store, again.round).tasks("diagnosis") == again.tasks("diagnosis")


def test_rows_are_found_by_the_beginning_of_their_id(context: Context) -> None:
    found = find_row(context.store, context.round.id[:8])
    assert found is not None
    assert found[0] == "rounds"
    assert found[1]["id"] == context.round.id
    assert find_row(context.store, "nothing-like-it") is None


@pytest.mark.parametrize("first", [True, False])
def test_where_nothing_is_lacking_only_a_generalist_that_came_first_is_selected(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    try:
        if first:
            store_generalist(context, rank=None)
            monkeypatch.setattr(learnt_first, "comes_first", lambda context: True)
            monkeypatch.setattr(Context, "found", lambda self, kind, name="": kind is RegisterResult)
        assert select.do(context).selected == ([GENERALIST] if first else [])
    finally:
        monkeypatch.undo()
        forget(context.round.id)
