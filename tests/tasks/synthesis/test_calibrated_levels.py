"""Calibration looks for the level at which a policy may train; hints and the author come after that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.contract import Action, Environment, Message
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import WrittenEnvironment, WrittenSpec
from environments.targets.shop.target import target
from models.policy import PolicyIdentity
from settings import load_settings
from settings_parts import CalibrationSettings
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import WITHIN, Calibration, calibration_figures, find_level, judge, measure

MODULE = (Path(__file__).parents[2] / "integration" / "targets" / "module_move_order.py").read_text(encoding="utf-8")
FOUR = MODULE.replace("LEVELS = 2", "LEVELS = 4").replace(
    "if level else ask,", '+ " Please." * level if level else ask,'
)
RULE = CalibrationSettings(informative_alone=True)


def found(level: int, share: float) -> Calibration:
    """A calibration of ten groups of ten, `share` of whose episodes succeed; the others earn something or nothing."""
    wins = round(10 * share)
    rewards = [[1.0] * wins + [0.1 * (k % 2) for k in range(10 - wins)] for _ in range(10)]
    figures = calibration_figures([np.array(r) for r in rewards], [np.array(r) == 1.0 for r in rewards])
    accepted, reason = judge(figures, RULE.model_dump())
    return Calibration(figures, accepted, reason, 10, 10, "p", {}, level=level)


@pytest.mark.parametrize(
    ("by_level", "level", "accepted", "played"),
    [
        ((0.9, 0.4, 0.1), 1, True, [1]),
        ((0.3, 0.0, 0.0), 0, True, [1, 0]),
        ((1.0, 1.0, 0.5), 2, True, [1, 2]),
        ((1.0, 0.9, 0.9, 0.8, 0.5), 4, True, [2, 3, 4]),
        ((0.5, 0.1, 0.0, 0.0, 0.0), 0, True, [2, 0]),
        ((0.1, 0.1, 0.1), 0, True, [1, 0]),  # on informative groups alone, at the easier one of two alike
        ((1.0, 1.0, 1.0), 2, False, [1, 2]),
        ((0.0, 0.0, 0.0), 0, False, [1, 0]),
        ((1.0, 0.9, 0.0), 2, False, [1, 2]),
    ],
)
def test_the_level_is_found_in_few_calibrations(
    by_level: Sequence[float], level: int, accepted: bool, played: list[int]
) -> None:
    asked: list[int] = []

    def play(at: int) -> Calibration:
        asked.append(at)
        return found(at, by_level[at])

    best = find_level(len(by_level), play, RULE)
    assert (best.level, best.accepted, asked) == (level, accepted, played)
    assert sorted(best.by_level) == sorted(map(str, played))
    assert best.figures["success_rate"] == best.by_level[str(level)]["success_rate"] == by_level[level]
    if accepted:
        assert best.reason.endswith(f" at level {level} of {len(by_level)}")
    else:  # every level that was played has its own reason
        assert best.reason.startswith("no level is informative: ")
        assert all(f"level {n}: {found(n, by_level[n]).reason}" in best.reason for n in played)


def test_within_the_band_is_better_than_informative_groups_alone() -> None:
    best = find_level(3, lambda at: found(at, (0.2, 0.1, 0.0)[at]), RULE)
    assert best.level == 0
    assert best.reason == f"{WITHIN} at level 0 of 3"


class Reader:
    """Moves an order where its request has at most `longest` words, in every other episode; where it is `shown` how
    another one is moved, always."""

    def __init__(self, longest: int, shown: bool = False) -> None:
        self.longest, self.shown, self.turns = longest, shown, 0

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("reader", f"{self.longest}{self.shown}", "", "", "")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        self.turns += 1  # of which it takes one in each episode that it fails in
        told = self.shown and len(environment.examples) > ALONE
        able = len(messages[0].content.split()) <= self.longest and self.turns % 3 != 0
        right = environment.oracle() if told or able else None
        return right or Action(content="Hello.")


ALONE = len(target().environment().examples)


@pytest.fixture
def context(settings_folder: Path) -> Iterator[Any]:
    given = {"seeds": 4, "samples": 4, "informative_alone": True}
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home", calibration=given))
    yield opened
    forget(opened.round.id)


@pytest.fixture(scope="module")
def written() -> Iterator[WrittenEnvironment]:
    module = SandboxedModule(FOUR)
    spec = WrittenSpec("shop", target().data_hash, module.capability, module.code_hash, ("move_pending",))
    yield WrittenEnvironment(target(), spec, module)
    module.close()


def test_a_module_that_is_too_hard_is_made_easier_before_its_author_hears_of_it(
    context: Any, written: WrittenEnvironment
) -> None:
    measured = measure(context.engine_of(Reader(8)), context.settings, written)
    assert measured.accepted, measured.reason
    assert measured.level == 0
    assert sorted(measured.by_level) == ["0", "1"]
    row = measured.row("e")
    assert (row.detail["level"], "hinted" in row.detail) == (0, False)
    assert "level 0 of 4" in row.reason
    # Every level's scenarios are their own; nothing is played at the harder ones.
    frame = context.store.trajectory_frame(None, purpose="calibration")
    assert sorted(frame["task_id"].str.contains("-level1").value_counts()) == [16, 16]
    assert not frame["task_id"].str.contains("-level[23]").any()


def test_what_is_never_solved_at_the_easiest_level_is_tried_with_hints(
    context: Any, written: WrittenEnvironment
) -> None:
    shown = measure(context.engine_of(Reader(0, shown=True)), context.settings, written)
    assert shown.accepted
    assert (shown.level, shown.hinted) == (0, 1.0)
    assert shown.reason.startswith("accepted with hints: with advice 100 % of the episodes succeed, without 0 % (no")
    never = measure(context.engine_of(Reader(0)), context.settings, written)
    assert (never.accepted, never.level, never.hinted) == (False, 0, 0.0)
    assert never.reason.startswith("no level is informative: level 0: ")
    assert "at least 5 % are needed to train with hints" in never.reason


def test_advice_is_another_scenario_of_the_same_level_and_none_on_retention(written: WrittenEnvironment) -> None:
    hard = written.at(3)
    assert (written.level, hard.level, hard.levels) == (0, 3, 4)
    task = hard.own_scenario(1)
    first, call, *_ = hard.advice(task)
    assert first.content.endswith("Please. Please. Please.")
    assert call.tool_calls[0].arguments != task.payload["scenario"]["goal"]["calls"][0]["arguments"]
    assert hard.spec.id == written.spec.id
    assert hard.advice(target().tasks("diagnosis")[0]) == ()
