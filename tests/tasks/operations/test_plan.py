"""The plan of a round: its sums, its words, and minutes only where a round was timed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import ReleaseRow, ReleaseState, RoundState, open_store
from environments.contract import Target, TargetTask
from environments.targets.catalogue import load_target
from settings import PROFILES, load_settings
from tasks.evaluate import _settling
from tasks.measuring.gate_plan import settling_episodes
from tasks.operations.plan import RoundPlan, pace_of, plan_of, rehearse
from tasks.synthesis.learning.shown import SAMPLES, SCENARIOS
from tasks.synthesis.starting import MOST
from tests.db.store_examples import trajectory
from tests.tasks.counting_target import CountingTarget
from tests.tasks.counting_target import target as fixed


class Generating(CountingTarget):
    """The counting target with generators, so that environments can be composed; it has test tasks alone."""

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"even": ("count",), "odd": ("count",)}

    def generate(self, family: str, seed: int) -> TargetTask:
        return TargetTask(f"{family}-{seed}", "training", family, seed, {"n": 2 * seed + (family == "odd")})


class Few(Generating):
    """Two scenarios of each family."""

    def generate(self, family: str, seed: int) -> TargetTask:
        return super().generate(family, seed % 2)


class Swapped(Generating):
    """Its generator takes the seed first."""

    def generate(self, seed: int, family: str) -> TargetTask:  # type: ignore[override]
        return super().generate(family, seed // 2)


target, few, swapped = Generating(), Few(), Swapped()


def test_the_sentence_adds_up() -> None:
    plan = RoundPlan(144, 3, 64, 4, 32, 0, 32, 864)
    assert plan.rollouts == 144 + 3 * (64 + 128 + 32) + 864
    assert plan.text() == (
        "at most 1,680 rollouts: 144 diagnosis, 3 x (64 calibration + 4 x 32 training + 32 fresh seeds), 864 "
        "evaluation; how long that takes here is known after the first round"
    )
    assert plan.text().startswith("at most 1,680 rollouts")
    timed = replace(plan, seconds=0.5, calls=12)
    assert timed.text().endswith("; at least 12 calls of a language model; at most about 14 minutes on this machine")


def test_nothing_that_a_capabilitys_training_may_play_is_left_out(settings_folder: Path) -> None:
    """Collections of groups that teach nothing, and the early check: on the target, and before and after in the
    environment, where what it begins from is played once for the choice of a checkpoint as well."""

    def planned(**train: object) -> RoundPlan:
        return plan_of(load_settings(profile="laptop", train={"practice": 0} | train), target)

    once, three = planned(collections=1), planned(collections=3)
    assert three.rollouts - once.rollouts == three.capabilities * 2 * three.steps * three.batch > 0
    assert f" + {three.steps} x {three.batch} to {3 * three.batch} training + " in three.text()
    assert f" + {once.steps} x {once.batch} training + " in once.text()
    choosing = load_settings(profile="laptop").train.choosing
    without, some, alone = planned(transfer=0), planned(transfer=9), planned(transfer=9, candidates=1)
    assert (without.transfer, some.transfer, alone.transfer) == (0, 9 + choosing, 9 + 2 * choosing)
    assert some.rollouts - without.rollouts == some.capabilities * some.transfer
    assert planned(transfer=9, steps=2).transfer == 0, "a training of two steps has no third to look back on"
    assert "besides" not in without.text()
    written = replace(without, written=True)
    assert "; further versions and levels of a written environment are calibrated and trained in" in written.text()


def test_a_plan_follows_the_settings(settings_folder: Path) -> None:
    settings = load_settings(profile="smoke", rollout={"trials": 3, "tasks": 2, "max_tokens": 8})
    plan = plan_of(settings, target)
    assert plan.diagnosis == 3 * min(2, len(target.tasks("diagnosis")))
    assert (plan.steps, plan.batch, plan.calibration) == (1, 8, 2 * 8)
    assert plan.choosing == 0, "of a single step there is nothing to choose"
    laptop, without = load_settings(profile="laptop"), {"carry": False, "generalist": 0, "demonstrations": 0}
    alone = plan_of(load_settings(profile="laptop", train=without), target).choosing
    # What a training begins from is compared after a generalist, too.
    for given in (without | {"carry": True}, {"carry": False}):
        with_starts = plan_of(load_settings(profile="laptop", train=given), target).choosing
        assert with_starts - alone == (MOST + 1) * (laptop.train.choosing * 3 // 2) > 0
    assert alone > 0
    # One adapter more, which plays the diagnosis for the router as the others do, and at most all of validation alone;
    # its training plays nothing, but at most every family is shown with advice.
    train = {"demonstrations": 0, "practice": 0}
    last = plan_of(load_settings(profile="laptop", train=train | {"generalist": 5}), target)
    plain = plan_of(load_settings(profile="laptop", train=train | {"generalist": 0}), target)
    assert last.generalist == 2 * SCENARIOS * SAMPLES + plain.fresh
    shop = plan_of(load_settings(profile="laptop", train=train | {"generalist": 5}), load_target("shop"))
    assert shop.generalist == 20 * SCENARIOS * SAMPLES + plain.fresh
    for demonstrations, turns in ((0, 2), (3, 1)):
        first = train | {"generalist": 5, "shown": 7, "demonstrations": demonstrations}
        shown = plan_of(load_settings(profile="laptop", train=first), load_target("shop"))
        assert shown.generalist == 20 * 7 * turns + plain.fresh, "it is shown scenarios in turns, when it comes first"
    # One that practises has played a part of the diagnosis before, and chooses among its checkpoints.
    first = train | {"generalist": 1, "demonstrations": 3}
    before, twice = (load_settings(profile="laptop", train=first | {"practice": n}) for n in (0, 2))
    given = twice.train
    steps, choosing = 2 * given.groups * given.group_size * given.collections, 3 * (given.choosing * 3 // 2)
    more = plan_of(twice, load_target("shop")).generalist - plan_of(before, load_target("shop")).generalist
    assert more == twice.evaluation.routing + steps + choosing
    diagnosis, validation = (len(target.tasks(split)) for split in ("diagnosis", "validation"))
    assert last.evaluation - plain.evaluation == diagnosis + validation * laptop.evaluation.validation_trials
    assert last.rollouts == plain.rollouts + last.generalist + last.evaluation - plain.evaluation
    assert f", {last.generalist} generalist, " in last.text()


@pytest.mark.parametrize("profile", ["smoke", "laptop", "night"])
def test_nothing_is_planned_to_be_trained_without_generators_and_a_writer(settings_folder: Path, profile: str) -> None:
    """Such a round refuses every environment (`synthesize`), so nothing is challenged, and test has two sides at most:
    what is live before it and after it is the same."""
    settings = load_settings(profile=profile)
    plan, test = plan_of(settings, fixed), len(fixed.tasks("test"))
    assert plan.rollouts == plan.evaluation == (settings.evaluation.trials + 1) * min(test, settings.rollout.tasks or 9)
    assert not plan.trains
    said = plan.text()
    assert "0 diagnosis, no training (the target has no generators" in said
    assert not re.search("calibration|fresh seeds|generalist", said)
    live = ReleaseRow(
        id="r", target="counting", number=1, round_id="x", base="b", base_revision="r", data_hash="d",
        members={"count": {"adapter_id": "a"}}, router="", router_path="", state=ReleaseState.LIVE,
    )  # fmt: skip
    again = plan_of(settings, fixed, live=live)
    assert again.evaluation - plan.evaluation == settings.evaluation.trials * min(test, settings.rollout.tasks or 9)
    assert plan_of(settings, target).trains, "with generators it trains"


@pytest.mark.parametrize("written_for", [fixed, target])
def test_a_model_that_writes_environments_makes_no_generalist(settings_folder: Path, written_for: Target) -> None:
    given = {"synthesizer": {"kind": "llm"}, "analyst": {"model": "hosted_vllm/any"}}
    train = {"generalist": 5, "demonstrations": 3, "practice": 2}
    plan = plan_of(load_settings(profile="laptop", train=train, **given), written_for)
    without = plan_of(load_settings(profile="laptop", train=train | {"generalist": 0}, **given), written_for)
    assert plan.trains
    assert plan == without


def test_calibrations_with_advice_and_behind_a_champion_are_planned(settings_folder: Path) -> None:
    """Each policy plays without advice and with it; where both are live, a champion and then the generalist."""

    def planned(*members: str, **train: object) -> RoundPlan:
        live = ReleaseRow(
            id="r", target="shop", number=1, round_id="x", base="b", base_revision="r", data_hash="d",
            members={m: {"adapter_id": "" if m.startswith("blend") else m} for m in members}, router="",
            router_path="", state=ReleaseState.LIVE,
        )  # fmt: skip
        given = {"practice": 0, **train}
        return plan_of(load_settings(profile="laptop", train=given), target, live=live if members else None)

    once = planned(hints=0).calibration
    assert planned().calibration == 2 * once
    assert planned(practice=1).calibration == 4 * once, "and what a generalist practised from, too"
    assert planned("generalist", practice=1).calibration == 2 * once, "which is made once"
    assert planned("generalist", "blend-generalist-2").calibration == planned("pay_debt").calibration == 2 * once
    both = planned("generalist", "pay_debt")
    assert both.calibration == 4 * once
    assert planned("generalist", "pay_debt", hints=0).calibration == 2 * once
    assert planned("generalist", "pay_debt", carry=False).calibration == 2 * once
    # Fresh seeds are played by what was trained on from, too.
    fresh = load_settings(profile="laptop").evaluation.fresh
    assert (planned().fresh, planned("generalist").fresh, both.fresh) == (2 * fresh, 2 * fresh, 3 * fresh)
    assert both.generalist - planned("pay_debt").generalist == fresh


def test_a_later_round_shows_a_generalist_what_is_missing_and_not_in_turns(settings_folder: Path) -> None:
    live = ReleaseRow(
        id="r", target="shop", number=1, round_id="x", base="b", base_revision="r", data_hash="d",
        members={"generalist": {"adapter_id": "g"}}, router="", router_path="", state=ReleaseState.LIVE,
    )  # fmt: skip
    fresh = 3 * load_settings(profile="laptop").evaluation.fresh
    for demonstrations, each in ((0, SCENARIOS * SAMPLES), (3, 0)):
        train = {"generalist": 5, "demonstrations": demonstrations, "shown": 2}
        plan = plan_of(load_settings(profile="laptop", train=train), load_target("shop"), live=live)
        assert plan.generalist == 20 * each + fresh


def test_what_settles_falls_of_a_target_that_has_too_few_tasks_left_to_draw_is_planned(settings_folder: Path) -> None:
    """They are played again, in twice the episodes, and so may others be behind a router that leaves some out."""
    settings, shop = load_settings(profile="laptop"), load_target("shop")
    split, fell = shop.tasks("validation"), ["cancel_other", "refund_all", "wants_person"]
    drawing = SimpleNamespace(further=lambda families: [])
    context: Any = SimpleNamespace(settings=settings, seed=1, drawing=drawing, tasks=lambda _: split)
    owed = 2 * sum(len(part.episodes()) for part in _settling(context, {}, fell))
    trials = settings.evaluation.validation_trials
    sizes = Counter(task.family for task in split)
    assert owed == 2 * 3 * 2 * settings.evaluation.own_tasks * trials
    assert settling_episodes(settings.evaluation.own_tasks, trials, sizes.values()) >= owed
    without = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"own_tasks": 0})})
    further = settings.selection.most * settings.evaluation.own_tasks
    # An adapter alone, live release and candidate, and the candidate behind another router: each on further tasks.
    more = plan_of(settings, shop).evaluation - plan_of(without, shop).evaluation
    assert more == 4 * further * trials + 2 * settling_episodes(settings.evaluation.own_tasks, trials, sizes.values())


@pytest.mark.parametrize("profile", ["gpu-small", "gpu", "cluster"])
def test_a_profile_says_the_plan_that_it_comes_to(settings_folder: Path, profile: str) -> None:
    text = (PROFILES / f"{profile}.toml").read_text()
    said = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert plan_of(load_settings(profile=profile), load_target("shop")).text().split(";")[0] in said


def test_the_pace_is_that_of_a_round_that_trained_here(settings_folder: Path) -> None:
    settings = load_settings(profile="smoke", home=settings_folder)
    with open_store(settings.database_url) as store:
        assert pace_of(store, settings) is None
        for number, stages in enumerate((["rollout"], ["rollout", "train:a"], ["rollout"])):
            made = store.start_round("shop", f"data{number}", 0, "smoke", {"base_model": settings.base_model})
            for name in stages:
                stage = store.stage(made.id, name)
                assert stage.claim()
                stage.finish({})
            store.add_trajectories([trajectory(made.id, f"{number}-{i}") for i in range(2)])
            store.finish_round(made.id, RoundState.DONE)
        found = pace_of(store, settings)
        assert found is not None
        assert 0 <= found < 10
        assert pace_of(store, load_settings(profile="laptop", home=settings_folder)) is None
        # One that can train nothing takes as long as the last that trained nothing.
        assert pace_of(store, settings, target) == found
        assert pace_of(store, settings, fixed) is not None


def test_a_dry_run_of_any_profile_opens_no_round(settings_folder: Path) -> None:
    settings = load_settings(profile="laptop", home=settings_folder, limits={"hours": 2})
    lines = rehearse(settings)
    assert re.search(r"plan: at most [0-9,]+ rollouts: 160 diagnosis, 2 x \(256 calibration \+ 8 x 32", lines[2])
    assert lines[3] == "limits: 2 hours"
    assert lines[4] == "generators: an environment of all 20 families is accepted"
    assert lines[5].startswith("memory: a training takes at most about ")
    with open_store(settings.database_url) as store:
        assert store.latest_round() is None


def test_a_dry_run_says_why_nothing_could_be_composed(settings_folder: Path) -> None:
    """As the stage `synthesize` would after all rollouts."""

    def said(name: str) -> str:
        target = f"tests.tasks.operations.test_plan:{name}"
        return "\n".join(rehearse(load_settings(profile="smoke", home=settings_folder, target=target)))

    assert "generators: an environment of all 2 families is refused, and so may be what the round " in said("few")
    assert "4 distinct of 200 seeds; 100 are needed" in said("few")
    assert "the environment's generate raised TypeError: " in said("swapped")
    assert not re.search("generators: |memory: ", said("fixed"))


@pytest.mark.parametrize(("planned", "own"), [(load_target("shop"), 40), (fixed, len(fixed.tasks("validation")))])
def test_an_adapter_alone_is_planned_on_its_own_families(planned: Target, own: int, settings_folder: Path) -> None:
    """Of the shop's validation tasks the capability with the most has 56, the next 40; all where nobody knows."""
    settings = load_settings(profile="laptop", evaluation={"own_tasks": 0, "routing": 0})
    if planned is fixed:
        settings = settings.model_copy(update={"synthesizer": settings.synthesizer.model_copy(update={"kind": "llm"})})
    one, two = (
        plan_of(settings.model_copy(update={"selection": settings.selection.model_copy(update={"most": n})}), planned)
        for n in (1, 2)
    )
    trials = settings.evaluation.validation_trials
    assert two.evaluation - one.evaluation == own * trials + len(planned.tasks("diagnosis"))
    few = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"routing": 5})})
    saved = settings.selection.most * max(0, len(planned.tasks("diagnosis")) - 5)
    assert plan_of(settings, planned).evaluation - plan_of(few, planned).evaluation == saved
