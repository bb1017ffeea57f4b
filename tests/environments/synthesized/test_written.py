"""Written environments: the module's scenarios behind the target's prompt, and retention scenarios in the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Action, Environment, Generators, Observation, Target, TargetTask, ToolCall
from environments.sandbox.workers import ModuleError, SandboxLimits, WorkerDied
from environments.synthesized.module_files import tool_faults
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import TRIES, WrittenEnvironment, WrittenSpec, prompt_of
from environments.targets import tau2
from environments.targets.catalogue import load_target
from environments.targets.shop import target as shop
from environments.targets.shop.episode import ShopEnvironment
from errors import CallOverdue, EnvironmentFault, ProviderError, TargetError
from models.episodes import Guarded
from tasks.round.target_prompt import target_prompt
from tests.integration.targets.small_shop import target as small_shop

SOURCE = (Path(__file__).parents[2] / "integration" / "targets" / "module_move_order.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def module() -> Iterator[SandboxedModule]:
    opened = SandboxedModule(SOURCE)
    yield opened
    opened.close()


def written(target: Target, module: SandboxedModule, **spec: Any) -> WrittenEnvironment:
    given = {"families": ("move_order_exactly", "move_pending"), **spec}
    return WrittenEnvironment(
        target, WrittenSpec(target.name, "data", module.capability, module.code_hash, **given), module
    )


def test_an_agent_sees_the_targets_prompt_and_plays_the_modules_scenario(module: SandboxedModule) -> None:
    source = written(shop(), module, retention_share=0.0)
    task = source.scenario(3)
    environment: Environment = source.environment()
    observation = environment.reset(task)
    own = shop().environment()
    assert environment.instructions == own.instructions != module.instructions
    assert list(environment.tools) == list(own.tools)
    assert environment.examples == own.examples
    assert "ove order" in observation.messages[0].content
    goal = task.payload["scenario"]["goal"]["calls"][0]
    other = environment.step(Action(tool_calls=(ToolCall("cancel", {"order": goal["arguments"]["order"]}),)))
    assert "unknown tool" in other.messages[0].content  # the target has it, the module does not play it
    environment.step(Action(tool_calls=(ToolCall(goal["name"], goal["arguments"]),)))
    score = environment.score()
    assert (score.success, score.reward) == (True, 1.0)
    assert {c.kind for c in score.checks} == {"move_order_exactly"}


def test_a_success_is_paid_whatever_the_module_says_of_it_and_a_failure_less() -> None:
    """Modules that were accepted before this was checked, and rewards that no check meets."""
    opened = SandboxedModule(SOURCE.replace("return (0.05, 0.2, 1.0)[right]", "return (1.0, 0.2, 0.0)[right]"))
    try:
        source = written(shop(), opened, retention_share=0.0)
        environment, task = source.environment(), source.scenario(3)
        goal = task.payload["scenario"]["goal"]["calls"][0]["arguments"]
        paid = []
        for arguments in (goal, {**goal, "address": "Atlantis"}, {"order": 1, "address": "Atlantis"}):
            environment.reset(task)
            environment.step(Action(tool_calls=(ToolCall("move", arguments),)))
            score = environment.score()
            paid.append((score.success, score.reward))
        assert paid == [(True, 1.0), (False, 0.2), (False, 0.98)]
    finally:
        opened.close()


def test_training_calibration_and_fresh_scenarios_never_meet(module: SandboxedModule) -> None:
    source = written(shop(), module, retention_share=0.0)
    training = {source.scenario(seed).seed for seed in range(60)}
    own = {source.own_scenario(seed).seed for seed in (*range(-30, 0), *range(5_000_000, 5_000_030))}
    assert len(training) == 60
    assert len(own) == 60
    assert not training & own
    assert source.scenario(7) == source.scenario(7)


@pytest.mark.parametrize("kinds", [2, 3, 4, 10])
def test_what_a_module_tells_apart_by_its_seed_is_both_trained_and_measured(
    module: SandboxedModule, kinds: int
) -> None:
    """Many modules take turns by their seed: with one of two kinds in training and the other in calibration, the level
    is found on what is never trained."""
    source = written(shop(), module, retention_share=0.0)
    for draw in (source.scenario, source.own_scenario):
        assert {draw(seed).seed % kinds for seed in range(80)} == set(range(kinds))


def test_a_module_that_fails_for_some_seeds_gives_a_scenario_for_each_and_always_the_same() -> None:
    failing = "    rng = random.Random(seed)\n    if seed % 5 == 1:\n        return {}[seed]\n"
    opened = SandboxedModule(SOURCE.replace("    rng = random.Random(seed)\n", failing, 1))
    try:
        source = written(shop(), opened, retention_share=0.0)
        drawn = [[draw(seed) for seed in range(40)] for draw in (source.scenario, source.own_scenario) * 2]
        assert drawn[:2] == drawn[2:]
        seeds = [{task.seed for task in tasks} for tasks in drawn[:2]]
        assert all(seed % 5 != 1 for part in seeds for seed in part)
        assert not set.intersection(*seeds)
        assert opened.restarts == 0
    finally:
        opened.close()


def test_a_module_that_fails_for_all_seeds_is_told_of() -> None:
    opened = SandboxedModule(SOURCE.replace("    rng = random.Random(seed)\n", "    return {}[seed]\n", 1))
    try:
        with pytest.raises(EnvironmentFault, match=r"no scenario came of 20 random numbers: .* KeyError"):
            written(shop(), opened, retention_share=0.0).scenario(0)
    finally:
        opened.close()


HANGING = "    rng = random.Random(seed)\n    while seed % 4 == 1:\n        pass\n"
SHORT = SandboxLimits(call_seconds=0.2)


def test_a_seed_for_which_a_module_hangs_is_passed_over_as_one_for_which_it_raises() -> None:
    opened = SandboxedModule(SOURCE.replace("    rng = random.Random(seed)\n", HANGING, 1), limits=SHORT)
    try:
        source = written(shop(), opened, retention_share=0.0)
        assert [source._written(seeds).seed for seeds in ((1, 3), (2, 1))] == [3, 2]
        assert opened.restarts == TRIES
        with pytest.raises(ModuleError, match="one call has killed 3 workers, the last: the call passed its deadline"):
            source._tried(1)
    finally:
        opened.close()


def test_a_worker_that_does_not_start_says_nothing_of_the_seed(
    module: SandboxedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def busy(seed: int, level: int = 0) -> TargetTask:
        asked.append(seed)
        raise WorkerDied("the call passed its deadline")

    source = written(shop(), module, retention_share=0.0)
    monkeypatch.setattr(module, "scenario", busy)
    with pytest.raises(WorkerDied):
        source.scenario(0)
    assert len(asked) == TRIES
    assert len(set(asked)) == 1


def test_where_the_shown_solution_hangs_nothing_is_shown() -> None:
    hanging = SOURCE.replace("def oracle(scenario, state, log):\n", "def oracle(scenario, state, log):\n    HANG\n", 1)
    opened = SandboxedModule(hanging.replace("HANG", "while not log:\n        pass"), limits=SHORT)
    try:
        source = written(shop(), opened, retention_share=0.0)
        assert source.advice(source.scenario(0)) == ()
    finally:
        opened.close()


def test_retention_comes_from_generators_where_there_are_some(module: SandboxedModule) -> None:
    source = written(shop(), module, retention_families=("cancel_pending", "item_price"), retention_share=1 / 3)
    families = [source.scenario(seed).family for seed in range(120)]
    assert set(families) == {"move_order_exactly", "cancel_pending", "item_price"}
    assert 20 <= sum(f != "move_order_exactly" for f in families) <= 60
    assert {source.own_scenario(seed).family for seed in range(20)} == {"move_order_exactly"}
    own = {task.family: source.own(task) for task in map(source.scenario, range(120))}
    assert own == {"move_order_exactly": True, "cancel_pending": False, "item_price": False}


def test_retention_comes_from_solved_tasks_where_there_are_none(module: SandboxedModule) -> None:
    target = small_shop()
    assert not isinstance(target, Generators)
    solved = tuple(t.id for t in target.tasks("diagnosis") if t.family == "cancel_pending")
    source = written(target, module, retention_tasks=solved, retention_share=0.5)
    tasks = [source.scenario(seed) for seed in range(60)]
    kept = [t for t in tasks if t.family == "cancel_pending"]
    assert kept
    assert {t.id for t in kept} <= set(solved)
    environment = source.environment()
    environment.reset(kept[0])
    while (action := environment.oracle()) is not None:
        if environment.step(action).done:
            break
    assert environment.score().success
    assert not source.own(replace(kept[0], payload={**kept[0].payload, "code_hash": "the target's own"}))


def test_without_anything_to_keep_every_scenario_is_the_modules(module: SandboxedModule) -> None:
    source = written(small_shop(), module)
    assert {source.scenario(seed).family for seed in range(30)} == {"move_order_exactly"}


def test_another_module_and_tools_that_no_task_offers_are_refused(module: SandboxedModule) -> None:
    with pytest.raises(EnvironmentFault, match="has hash"):
        WrittenEnvironment(shop(), WrittenSpec("shop", "h", "move_order_exactly", "0" * 64, ()), module)
    with pytest.raises(TargetError, match="no diagnosis task of 'shop' offers"):
        prompt_of(shop(), ["move", "teleport"])


def test_a_task_that_raises_does_not_hide_the_prompt_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, first = prompt_of(shop(), ["move"]), next(iter(shop().tasks("diagnosis"))).id
    reset = ShopEnvironment.reset

    def reset_or_raise(environment: ShopEnvironment, task: TargetTask) -> Observation:
        if task.id == first:
            raise KeyError("opening")
        return reset(environment, task)

    monkeypatch.setattr(ShopEnvironment, "reset", reset_or_raise)
    assert prompt_of(shop(), ["move"]) == expected


@pytest.mark.parametrize("problem", [SystemExit(2), CallOverdue("the environment's reset did not return in time")])
def test_the_prompt_is_read_with_the_guard_that_is_given(
    module: SandboxedModule, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    """The one that the stages give has limits: a task that leaves the process, or hangs, is no task that opens."""
    expected, first = prompt_of(shop(), ["move"]), next(iter(shop().tasks("diagnosis"))).id
    reset = ShopEnvironment.reset

    def reset_or_leave(environment: ShopEnvironment, task: TargetTask) -> Observation:
        if task.id == first:
            raise problem
        return reset(environment, task)

    monkeypatch.setattr(ShopEnvironment, "reset", reset_or_leave)
    spec = WrittenSpec("shop", "data", module.capability, module.code_hash, ("move_pending",))
    assert WrittenEnvironment(shop(), spec, module, guard=Guarded.made).prompt == expected


def test_no_model_is_paid_for_playing_the_user_of_a_prompt() -> None:
    if missing := tau2.describe()[0].missing:
        pytest.skip(missing)

    def paid(messages: Any, tools: Any) -> Any:
        raise ProviderError("402 no credit")

    target = load_target("tau2:retail", user="litellm:some/model", user_model=paid)
    assert prompt_of(target, ["get_order_details"]).tools


def test_the_identity_covers_module_and_retention(module: SandboxedModule) -> None:
    one, other = written(shop(), module), written(shop(), module, retention_families=("item_price",))
    assert one.spec.id == written(shop(), module).spec.id != other.spec.id
    kept = one.at(1).retaining(("item_price",), one.spec.retention_share)
    assert (kept.spec, kept.level, kept.module) == (other.spec, 1, one.module)
    assert one.spec.retention_families == ()


def test_a_benchmark_without_generators_becomes_trainable() -> None:
    if missing := tau2.describe()[0].missing:
        pytest.skip(missing)
    target = load_target("tau2:retail")
    source = SOURCE.replace('"move"', '"find_user_id_by_email"').replace('"order": {"type": "integer"}, ', "")
    source = source.replace('"address": {"type": "string"}', '"email": {"type": "string"}')
    source = source.replace('"required": ["order", "address"]', '"required": ["email"]')
    opened = SandboxedModule(source)
    try:
        assert tool_faults(opened.tools, target_prompt(target).tools) == []
        solved = tuple(t.id for t in target.tasks("diagnosis"))[:3]
        given = written(target, opened, retention_tasks=solved)
        environment = given.environment()
        environment.reset(given.own_scenario(0))
        assert "retail" in environment.instructions.lower()
        assert len(environment.tools) > 10
        kept = next(t for t in (given.scenario(seed) for seed in range(50)) if t.id in solved)
        assert environment.reset(kept).messages
        assert 0 <= environment.score().reward <= 1
    finally:
        opened.close()
