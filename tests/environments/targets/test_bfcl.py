"""BFCL multi-turn: reference solutions, verdicts equal to BFCL's own checker, no evaluation of text, and bad input."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.contract import SPLITS, Action, TargetTask, ToolCall, canonical_json
from environments.targets.bfcl import entries as bfcl
from environments.targets.bfcl.entries import CATEGORIES, load_categories, load_category
from environments.targets.bfcl.package import bfcl_folder
from environments.targets.bfcl.services import Services
from environments.targets.bfcl.target import BfclTarget, describe
from environments.targets.reference_check import no_op, oracle, play, validate
from errors import TargetError

_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"bfcl-eval is absent: {_missing[:1]}")


def _all(target: BfclTarget) -> list[TargetTask]:
    return [task for split in SPLITS for task in target.tasks(split)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_reference_is_valid_and_no_op_is_not(category: str) -> None:
    target = BfclTarget(category)
    sizes = [len(target.tasks(split)) for split in SPLITS]
    assert sum(sizes) == 200
    assert all(abs(size - wanted) <= 2 for size, wanted in zip(sizes, (80, 40, 80), strict=True))
    assert validate(target, oracle).failed == ()
    assert validate(target, no_op).successes == 0


def test_no_number_no_reference_and_no_turns_question_is_in_two_splits_of_any_categories() -> None:
    """Entries of one number are variants of one another. BFCL has entries 120 and 124 with one reference, and 40 and 43
    with one question."""
    numbers, contents, met = defaultdict(set), defaultdict(set), 0
    for category in CATEGORIES:
        loaded = load_category(category)
        for key, entry in loaded.entries.items():
            numbers[key.rpartition("_")[2]].add(loaded.splits[key])
            calls = [call for turn in loaded.gold[key] for call in turn]
            for content in (calls, *(turn for turn in entry["question"] if turn)):
                contents[canonical_json(content)].add(loaded.splits[key])
                met += 1
    assert len(numbers) == 200
    assert all(len(splits) == 1 for splits in (*numbers.values(), *contents.values()))
    assert len(contents) < met / 2, "most contents stand in several categories"


def test_other_splits_are_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_category("base").data_hash
    monkeypatch.setattr(bfcl, "_shared", lambda question, gold: [])
    load_categories.cache_clear()
    assert load_category("base").data_hash != before
    load_categories.cache_clear()


@pytest.mark.parametrize("category", CATEGORIES)
def test_verdict_equals_bfcls_own_checker(category: str) -> None:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    target, draw, seen = BfclTarget(category), random.Random(category), []
    loaded = load_category(category)
    for number, task in enumerate(_all(target)[::5]):
        gold = loaded.gold[task.id]
        drop = [[turn, call] for turn, calls in enumerate(gold) for call in range(len(calls)) if draw.random() < 0.06]
        ours = play(target.environment(), replace(task, payload={**task.payload, "without": drop}), oracle)
        kept = [
            [text for call, text in enumerate(calls) if [turn, call] not in drop] for turn, calls in enumerate(gold)
        ]
        steps = [[calls] if calls else [] for calls in kept]
        name = f"spoiled{number}_{category}"
        theirs = multi_turn_checker(steps, gold, loaded.entries[task.id], f"multi_turn_{category}", name)
        assert ours.success == theirs["valid"], (task.id, drop)
        seen.append(ours.success)
    assert 0 < sum(seen) < len(seen)


def test_functions_come_back_in_the_turn_that_says_so() -> None:
    target = BfclTarget("miss_func")
    task = next(task for task in _all(target) if task.id == "multi_turn_miss_func_0")
    environment = target.environment()
    environment.reset(task)

    def offered() -> set[str]:
        return {tool["function"]["name"] for tool in environment.tools}

    assert "sort" not in offered()
    said = [environment.step(Action(content="Next.")).messages for _ in range(3)]
    assert "sort" in offered()
    assert '"name": "sort"' in said[2][-1].content


def test_checks_tell_calls_states_and_results_apart() -> None:
    target = BfclTarget("miss_param")
    task = _all(target)[0]
    environment = target.environment()
    nothing = play(environment, task, no_op)
    failed = {check.kind for check in nothing.checks if check.required and not check.passed}
    assert "obtain_requested_results" in failed
    assert any(kind.startswith("call_") for kind in failed)
    assert any(check.kind == "ask_missing_parameter" and check.passed for check in nothing.checks)
    assert all(check.passed for check in play(environment, task, oracle).checks if check.name.startswith("turn"))


def test_text_of_the_agent_is_never_evaluated(tmp_path: Path) -> None:
    target = BfclTarget("base")
    environment = target.environment()
    environment.reset(_all(target)[0])
    marker = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(marker)!r}).write_text('x')"
    calls = (ToolCall(code, {}, "a"), ToolCall("ls", {code: 1}, "b"), ToolCall("_load_scenario", {"scenario": {}}, "c"))
    answers = environment.step(Action(tool_calls=calls)).messages
    assert all(message.content.startswith("Error during execution") for message in answers)
    assert "Error" in environment.step(Action(malformed=code)).messages[0].content
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("power", {"base": 10, "exponent": 5000}, "4300 digits"),
        ("power", {"base": 10, "exponent": 10**9}, "more than 10000 digits"),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}, "decimal_places is too large"),
        ("logarithm", {"value": 2.0, "base": 3.0, "precision": "1000000000"}, "precision is too large"),
        ("power", {"base": 2, "exponent": 10}, '{"result": 1024}'),
        ("power", {"base": -2, "exponent": -(10**9)}, '{"result": 0.0}'),
    ],
)
def test_numbers_that_nobody_computes_with_are_an_answer_and_no_fault(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    answer, failed = Services({"involved_classes": ["MathAPI"], "initial_config": {}}, False).call(name, arguments)
    assert said in answer
    assert failed == answer.startswith("Error during execution: ") == ("result" not in answer[:10])


def test_a_turn_of_more_than_twenty_steps_fails_the_entry() -> None:
    target = BfclTarget("base")
    environment = target.environment()
    environment.reset(_all(target)[0])
    done = [environment.step(Action(tool_calls=(ToolCall("pwd", {}),))).done for _ in range(21)]
    assert done == [False] * 20 + [True]
    assert not environment.score().success


def test_damaged_or_foreign_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="composite"):
        BfclTarget("composite")
    with pytest.raises(TargetError, match="nope"):
        BfclTarget("base").environment().reset(TargetTask("nope", "test", "", 0, {"id": "nope"}))
    shutil.copytree(bfcl_folder() / "data", tmp_path / "data")
    (tmp_path / "data" / "BFCL_v4_multi_turn_base.json").write_text('{"id": "x"')
    monkeypatch.setattr(bfcl, "bfcl_folder", lambda: tmp_path)
    load_categories.cache_clear()
    with pytest.raises(TargetError, match="damaged"):
        load_category("base")
    load_categories.cache_clear()
