"""Levels of a module: one dial with the same kind of goal, and every check at each of them."""

from __future__ import annotations

import pytest

from environments.contract import TargetTask
from environments.synthesized.module_files import validate_module, verdict_lines
from environments.synthesized.modules import SandboxedModule
from environments.validation.checks import Limits
from environments.validation.levels import goal_shape, level_faults
from errors import SandboxError, TargetError
from tests.environments.synthesized.weakenings import ADDRESS, ASK, CHECK

FEW = Limits(distinct=20, searched=40, episodes=20, attack_seeds=1, replayed=4)
SOURCE = ADDRESS.read_text()
# As modules were before there were levels.
WITHOUT = SOURCE.replace("LEVELS = 3\n", "").replace("(seed, level)", "(seed)").replace("[level]", "[0]")


def made(goal: dict, text: str = "") -> TargetTask:
    return TargetTask("t", "synthesized", "f", 0, {"scenario": {"request": text, "goal": goal}})


def test_a_scenario_is_of_the_level_that_is_asked_for():
    module = SandboxedModule(SOURCE)
    try:
        easy, hard = module.scenario(5), module.scenario(5, 2)
        assert easy.id != hard.id
        assert easy.payload["scenario"]["goal"] == hard.payload["scenario"]["goal"]
        assert len(easy.payload["scenario"]["request"]) < len(hard.payload["scenario"]["request"])
        with pytest.raises(TargetError, match="no level 3; choose 0 to 2"):
            module.scenario(5, 3)
    finally:
        module.close()


def test_a_module_without_levels_is_refused_with_one_reason_and_still_plays():
    (reason,) = validate_module(WITHOUT, FEW).reasons
    assert reason.startswith("static: the constant LEVELS is missing: LEVELS must say how many")
    module = SandboxedModule(WITHOUT)
    try:
        assert (module.dialled, module.levels) == (False, 1)
        assert module.scenario(5).id == f"copy_exact_address-{module.code_hash[:8]}-5"
    finally:
        module.close()


@pytest.mark.parametrize("levels", ["0", "1", "6", "True", "'3'"])
def test_a_number_of_levels_that_is_none_is_refused(levels):
    with pytest.raises(SandboxError, match="LEVELS"):
        SandboxedModule(SOURCE.replace("LEVELS = 3", f"LEVELS = {levels}"))


def test_what_is_weakened_at_one_level_alone_is_found_there():
    """At level 1 the customer tells the number unasked; at level 0 nothing is wrong."""
    source = ASK.read_text().replace('{words}, I want to file a claim."', '{words}" + ["", f", {number}", ""][level]')
    verdict = validate_module(source, FEW)
    assert verdict.reasons
    assert all(reason.startswith("level 1: ") for reason in verdict.reasons)
    assert "need: the lazy policy" in "".join(verdict.reasons)
    assert "2" not in verdict.figures["levels"]
    assert verdict.figures["exhibits"]


def test_every_level_has_its_figures():
    verdict = validate_module(CHECK.read_text(), FEW)
    assert verdict.accepted, verdict.reasons
    assert sorted(verdict.figures["levels"]) == ["1", "2"]
    assert all(found["need"]["lazy"] for found in verdict.figures["levels"].values())
    assert "level 2: oracle 1.00" in "\n".join(verdict_lines(verdict))


def test_a_goal_of_another_kind_at_a_higher_level_is_a_fault():
    other = SOURCE.replace('"goal": {"calls": [call]}', '"goal": {"calls": [call] * (1 + (level == 2))}')
    (reason,) = validate_module(other, FEW).reasons
    assert reason.startswith("levels: the goal of seed 0 has another shape at level 2 than at level 0")


def test_a_level_that_changes_nothing_is_a_fault():
    fake = SOURCE.replace('"It moved house, so to speak. "', '""')
    assert validate_module(fake, FEW).reasons == ("levels: level 1 is like level 0 in 20 of 20 scenarios",)


@pytest.mark.parametrize(
    ("goal", "same"),
    [
        ({"calls": [{"name": "move", "arguments": {"n": 2}}], "says": ["x"], "state": {"orders.8.at": "Rome"}}, True),
        ({"calls": [{"name": "move", "arguments": {"m": 1}}], "says": ["w"], "state": {"orders.7.at": 1}}, False),
        ({"calls": [{"name": "move", "arguments": {"n": 1}}], "says": ["w"], "state": {"orders.7.by": 1}}, False),
        ({"calls": [{"name": "move", "arguments": {"n": 1}}], "state": {"orders.7.at": 1}}, False),
    ],
)
def test_the_shape_of_a_goal_is_its_kind_without_its_values(goal, same):
    of = {"calls": [{"name": "move", "arguments": {"n": 1}}], "says": ["w"], "state": {"orders.7.at": "Oslo"}}
    assert (goal_shape(goal) == goal_shape(of)) is same
    assert bool(level_faults(lambda seed, level: made(goal if level else of, f"{level}"), 2)) is not same
