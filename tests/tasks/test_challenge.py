"""How many tasks a challenge draws, which settle a fall, and what it counts as a look."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import tasks.challenge as challenge_file
import tasks.rollout as rollout_file
import tasks.synthesis.environments as environments_file
import tasks.synthesize as synthesize_file
from db import LookRow, ReleaseRow, ReleaseState
from environments.contract import Draw, Environment, Target, TargetTask
from errors import ConfigurationError, EpisodesLost, TargetError
from models.scripted import NoopPolicy, OraclePolicy
from settings import load_settings
from tasks.challenge import _further, _gains, _own_tasks
from tasks.evaluate import _settling
from tasks.gating.judging import look_at, rules_of
from tasks.measuring.decisions import CapabilityDecision
from tasks.measuring.statistics import tasks_needed
from tasks.round.context import Context
from tasks.round.drawing import RoundTasks
from tasks.round.results import RegisterResult, StartFigures, TrainResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import forget, open_context
from tasks.synthesis.environments import families_of

OWN = {"ask_missing_fact": ("cancel_without_number",)}


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("TRACE_EVALUATION__OWN_TASKS", "40")
    monkeypatch.setenv("TRACE_ROLLOUT__TASKS", "0")
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


def registered(
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    after: float,
    champion: float | None = None,
    starts: dict[str, float] | None = None,
) -> None:
    result = RegisterResult(
        version="1",
        served_name="a@v1",
        base_success=before,
        champion_success=champion,
        adapter_success=after,
        liveness=1.0,
    )
    figures = [
        StartFigures(capability=name, adapter=name, success=0.0, own=own, reward=0.0)
        for name, own in (starts or {}).items()
    ]
    trained = TrainResult(adapter="a", sha256="", steps=1, run="", ending="steps", chosen=1, starts=figures)
    results = {RegisterResult: result, TrainResult: trained}
    monkeypatch.setattr(Context, "result", lambda self, kind, *of: results[kind])


def test_a_small_family_gets_the_tasks_that_its_gain_needs(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tasks give a p-value below 0.05 only where six of them are won and none is lost."""
    there = [t for t in context.tasks("validation") if t.family == "cancel_without_number"]
    assert len(there) == 8
    registered(monkeypatch, 0.1, 0.7)
    look = look_at(context, "validation")
    further = _further(context, OWN, look)
    assert 0 < further["cancel_without_number"] <= 32
    more = context.drawing.further(further)
    assert len(more) == further["cancel_without_number"]
    assert {t.family for t in more} == {"cancel_without_number"}
    assert {t.split for t in more} == {"validation"}
    registered(monkeypatch, 0.1, 0.9)
    assert _further(context, OWN, look)["cancel_without_number"] < further["cancel_without_number"]
    registered(monkeypatch, 0.1, 0.11)
    assert _further(context, OWN, look)["cancel_without_number"] == 32, "never more than the setting allows"


def test_names_of_a_modules_own_scenarios_take_none_of_the_further_tasks(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that a model wrote is about the target's families, and has scenarios under its own name."""
    about = ("ask_missing_fact", "cancel_without_number", "named_by_the_module")
    written = SimpleNamespace(spec=SimpleNamespace(families=about))
    monkeypatch.setattr(environments_file, "stored_environment", lambda *given: written)
    own = {"ask_missing_fact": families_of(context, "ask_missing_fact")}
    assert own == OWN
    registered(monkeypatch, 0.1, 0.7)
    look = look_at(context, "validation")
    further = _further(context, own, look)
    assert further == _further(context, OWN, look)
    assert len(context.drawing.further(further)) == sum(further.values())


def test_further_tasks_of_some_families_do_not_judge_what_is_about_all(context: Context) -> None:
    split, more = context.tasks("validation"), context.drawing.further({"cancel_other": 3})
    families = {t.family for t in split}
    assert _own_tasks(["cancel_other"], split, more)[-3:] == more
    assert _own_tasks(sorted(families), split, more) == _own_tasks([], split, more) == split
    one = [t for t in split if t.family == "cancel_other"]
    assert _own_tasks(["cancel_other"], one, more) == [*one, *more], "all that there is, all of it enlarged"


def test_nothing_is_drawn_for_what_gained_nothing(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    look = look_at(context, "validation")
    for before, after in ((0.5, 0.5), (0.5, 0.2)):
        registered(monkeypatch, before, after)
        assert _further(context, OWN, look) == {}
    registered(monkeypatch, 0.1, 0.9)
    assert _further(context, {"unknown": ()}, look) == {}
    assert _further(context, OWN, LookRow(**{**vars(look), "draw": 0})) == {}, "a fixed split has no further tasks"


def test_a_fall_is_settled_by_tasks_that_nobody_played(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    played = {t.id for t in context.tasks("validation")} | {t.id for t in context.drawing.further({"refund_all": 4})}
    (settling,) = _settling(context, {"refund_all": 4}, ["refund_all", "cancel_other"])
    assert [t.family for t in settling.tasks] == ["cancel_other"] * 40 + ["refund_all"] * 40
    assert not played & {t.id for t in settling.tasks}
    assert (settling.each, settling.first) == (context.settings.evaluation.validation_trials, 0)
    assert _settling(context, {}, []) == []
    assert _settling(context, {}, ["refund_all", "cancel_other", "item_price", "move_pending"]) == [], "no accident"
    assert rules_of(context).settling == 40


def test_a_fall_is_not_settled_by_the_few_tasks_that_are_left(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of one's own gives one task more where forty are asked for: two of eight may have been lost, and a fall
    of at most one task passes."""
    draw, split = context.target.further, context.tasks("validation")
    left = {"refund_all": 40, "cancel_other": 1}
    monkeypatch.setattr(context.target, "further", lambda how, f, n: draw(how, f, min(n, left[f])), raising=False)
    drawn, again = _settling(context, {}, ["refund_all", "cancel_other"])
    assert [t.family for t in drawn.tasks] == ["refund_all"] * 40
    assert again.tasks == [t for t in split if t.family == "cancel_other"]
    trials = context.settings.evaluation.validation_trials
    assert (again.each, again.first) == (2 * 40 * trials // 8, trials)


def test_a_fall_on_a_fixed_split_is_settled_by_trials_that_nobody_played(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the episodes of forty further tasks; a large family is played once more, as often as before."""
    monkeypatch.setattr(RoundTasks, "draws", lambda self, split: False)
    before, there = context.settings.evaluation.validation_trials, context.tasks("validation")
    mine = {f: [t for t in there if t.family == f] for f in ("cancel_other", "refund_all")}
    owed = _settling(context, {}, ["refund_all", "cancel_other"])
    assert [(o.tasks, o.each, o.first) for o in owed] == [(m, 2 * 40 * before // 8, before) for m in mine.values()]
    monkeypatch.setattr(Context, "tasks", lambda self, split: mine["refund_all"] * 40)
    (large,) = _settling(context, {}, ["refund_all"])
    assert (len(large.tasks), large.each, large.first) == (320, before, before), "fewer would give no task its pass^k"


def test_a_family_that_runs_out_of_questions_ends_no_round(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draw is there, and no more: what is there decides, and settles a fall by being played again."""
    plain = type(context.target).further

    def few(self: Target, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        if family == "refund_all" and count > 4:
            raise TargetError("family 'refund_all' has 4 questions left for the validation split")
        return plain(self, draw, family, count)

    monkeypatch.setattr(type(context.target), "further", few)
    assert [t.family for t in context.drawing.further({"refund_all": 5, "cancel_other": 2})] == ["cancel_other"] * 2
    split, trials = context.tasks("validation"), context.settings.evaluation.validation_trials
    for there, more in (({}, []), ({"refund_all": 4}, context.drawing.further({"refund_all": 4}))):
        mine = [t for t in [*split, *more] if t.family == "refund_all"]
        drawn, again = _settling(context, there, ["refund_all", "cancel_other"])
        assert [t.family for t in drawn.tasks] == ["cancel_other"] * 40
        assert (again.tasks, again.each, again.first) == (mine, 2 * 40 * trials // len(mine), trials)


def test_what_no_validation_task_can_prove_is_not_trained(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = SimpleNamespace(spec=SimpleNamespace(families=("refund_all",)))
    monkeypatch.setattr(synthesize_file, "_composed", lambda context, capability: (composed, ""))
    others = [t for t in context.tasks("validation") if t.family != "refund_all"]
    monkeypatch.setattr(Context, "tasks", lambda self, split: others)
    assert synthesize_file._unprovable(context, ["refund_all"]) == "", "such tasks may be drawn"
    monkeypatch.setattr(RoundTasks, "draws", lambda self, split: False)
    assert synthesize_file._unprovable(context, ["refund_all", "cancel_other"]) == ""
    made = synthesize_file.synthesize._work(context, "refund_payment")
    assert not made.accepted
    assert "validation has no task of its families (refund_all)" in made.reasons[0]


def test_an_adapter_without_a_task_is_told_so_and_the_other_is_judged(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"refund_payment": ["gone"], "cancel_order": ["refund_all"], "use_coupon": ["use_coupon"]}
    split = [t for t in context.tasks("validation") if t.family in ("refund_all", "use_coupon")]
    live, good = ({f"{side}{t.id}": (t, side) for t in split} for side in (False, True))
    stored, alone = dict[str, CapabilityDecision](), list[str]()

    def frame(_: object, ids: Sequence[str], lost: bool = False) -> pd.DataFrame:
        """Every coupon was lost to errors."""
        rows = [(i, t.id, t.family, 0, side) for i, (t, side) in (live | good).items() if i in ids]
        found = pd.DataFrame(rows, columns=["id", "task", "family", "trial", "success"]).astype({"success": float})
        found.loc[found["family"] == "use_coupon", "success"] = float("nan")
        return found if lost else found.dropna()

    monkeypatch.setattr(challenge_file, "registered", lambda stored: list(own))
    monkeypatch.setattr(challenge_file, "families_of", lambda context, capability: own[capability])
    monkeypatch.setattr(challenge_file, "_further", lambda *given: {})
    monkeypatch.setattr(challenge_file, "_gains", lambda *given: {})
    monkeypatch.setattr(challenge_file, "play_lineup", lambda *given: SimpleNamespace(ids=list(live)))
    monkeypatch.setattr(challenge_file, "outcomes", frame)
    monkeypatch.setattr(challenge_file, "_alone", lambda context, name, *_: alone.append(name) or list(good))
    monkeypatch.setattr(challenge_file, "_store", lambda context, name, decision: stored.update({name: decision}))
    monkeypatch.setattr(challenge_file, "create_table_artifact", lambda **given: json.dumps(given, allow_nan=False))
    monkeypatch.setattr(Context, "tasks", lambda self, split_: split)
    result = challenge_file.challenge._work(context)
    assert result.verdicts == dict.fromkeys(own, "underpowered") | {"cancel_order": "better"}
    assert (result.passed, alone) == (["cancel_order"], ["cancel_order", "use_coupon"])
    assert stored["cancel_order"].tried == 1
    assert "Validation has no task of its families (gone)" in stored["refund_payment"].reasons[0]
    assert "Both sides finished no validation task of its families" in stored["use_coupon"].reasons[0]
    assert "left out" not in stored["cancel_order"].reasons[0], "the tasks of others are none that it lost"


def test_what_an_outage_took_is_no_verdict_on_an_adapter(context: Context) -> None:
    """The service behind the target dies: the stage is tried again, however it was played. What an environment to train
    on loses is its own, and doing nothing decides nothing."""

    def down() -> Environment:
        raise OSError("the shop's database does not answer")

    ground = replace(context.ground("evaluation"), make=down)
    tasks = context.tasks("validation")
    said = "4 of 4 episodes .alone. were lost to errors of the environment; .*the shop's database does not answer"
    with pytest.raises(EpisodesLost, match=said) as problem:
        context.engine_of(OraclePolicy()).play(ground, episodes_for(tasks[:4], 1, context.seed), "alone")
    assert problem.value.transient
    learnt = replace(ground, environment="an environment to train on")
    for policy, where in ((OraclePolicy(), learnt), (NoopPolicy(), ground)):
        ids = context.engine_of(policy).play(where, episodes_for(tasks[:4], 1, context.seed), "alone")
        assert outcomes(context.store, ids).empty


def test_a_task_that_cannot_be_played_to_its_end_is_no_outage(context: Context) -> None:
    """A router may leave an adapter one task: what the environment fails at there it fails at whenever it is played."""

    def down() -> Environment:
        raise OSError("no such order")

    ground, tasks = replace(context.ground("evaluation"), make=down), context.tasks("validation")
    engine = context.engine_of(OraclePolicy())
    for count in (1, 2):
        ids = engine.play(ground, episodes_for(tasks[:count], 3, context.seed), "refunds on validation")
        assert len(ids) == 3 * count
        assert outcomes(context.store, ids, lost=True)["success"].isna().all()
    with pytest.raises(EpisodesLost, match="9 of 9 episodes"):
        engine.play(ground, episodes_for(tasks[:3], 3, context.seed), "refunds on validation")


def test_a_gain_is_counted_from_what_was_trained_on(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, 0.1, 0.9)
    assert _gains(context, ["a"]) == {"a": 80.0}
    registered(monkeypatch, 0.1, 0.9, champion=0.75)
    assert _gains(context, ["a"]) == {"a": 15.0}


def test_a_gain_is_counted_from_what_is_live_where_the_training_compared_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capability without a champion: the live generalist solves 60 % of it, another adapter of this round 80 %."""
    members = {"generalist": {"adapter_id": "generalist"}}
    live = ReleaseRow(
        id="live", target="shop", number=1, base="b", data_hash="d", state=ReleaseState.LIVE, members=members
    )
    monkeypatch.setattr(Context, "incumbent", live)
    registered(monkeypatch, 0.1, 0.9, starts={"": 0.2, "generalist": 0.6, "of this round": 0.8})
    assert _gains(context, OWN) == {"ask_missing_fact": 30.0}
    look, trials = look_at(context, "validation"), context.settings.evaluation.validation_trials
    needed = tasks_needed(30.0, 0.6, trials, look.alpha)
    assert _further(context, OWN, look) == {"cancel_without_number": needed - 8}


def test_a_drawn_split_has_the_whole_level_once_and_a_fixed_one_spends_it(
    context: Context, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha = context.settings.evaluation.alpha
    first = look_at(context, "validation")
    assert (first.number, first.draw, first.alpha) == (1, context.round.number, alpha)
    assert look_at(context, "validation") == first, "a stage that is done again looks once"
    again = open_context(context.settings, fresh=True)
    assert (look_at(again, "validation").number, look_at(again, "validation").alpha) == (1, alpha)
    monkeypatch.setattr(RoundTasks, "draws", lambda self, split: False)
    third = open_context(context.settings, fresh=True)
    fixed = [look_at(opened, "validation") for opened in (third, open_context(context.settings, fresh=True))]
    assert [look.number for look in fixed] == [1, 2]
    assert fixed[1].alpha == pytest.approx(fixed[0].alpha / 4)
    assert fixed[0].alpha < alpha
    assert [look_at(opened, "test").alpha for opened in (context, third)] == [0.0, 0.0], "test decides nothing"
    assert look_at(third, "test").number == 2


def test_a_release_of_another_revision_that_has_to_be_beaten_is_refused_before_an_episode(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new lineage has no parent whose base would be looked at: it would be seen after the training."""
    mine = SimpleNamespace(base="tiny", revision="new")
    context.__dict__["base"] = SimpleNamespace(identity=mine)
    live = ReleaseRow(
        id="r1", target="shop", number=1, base="tiny", base_revision="old", data_hash="data-0", members={},
        state=ReleaseState.LIVE,
    )  # fmt: skip
    context.store.put([live])
    played: list[object] = []
    monkeypatch.setattr(rollout_file, "check_turn_length", lambda context: None)
    monkeypatch.setattr(rollout_file, "play_lineup", lambda *given: played.append(given))
    with pytest.raises(ConfigurationError, match=r"release 1 of shop stands on tiny \(old\).*base is tiny \(new\)"):
        rollout_file.rollout.do(context)
    assert context.parent is None
    assert played == []
    assert context.store.rows(LookRow) == []
