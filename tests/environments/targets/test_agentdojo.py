"""AgentDojo: reference solutions, the no-op row, checks, injections, and bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest

from environments.contract import SPLITS, Action, TargetTask, ToolCall
from environments.targets.agentdojo import SUITES, AgentDojoTarget, describe
from environments.targets.reference_check import no_op, oracle, play, validate
from errors import TargetError

_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"agentdojo is absent: {_missing[:1]}")


@pytest.mark.parametrize("suite", SUITES)
def test_reference_solutions_are_useful(suite: str) -> None:
    # Every second task, every fifth of workspace, whose verifiers take 0.2 s; all 97 are in benchmarks/targets.py.
    target = AgentDojoTarget(suite)
    tasks = [task for split in SPLITS for task in target.tasks(split)][:: 5 if suite == "workspace" else 2]
    assert validate(target, oracle, tasks).failed == ()


def test_no_op_solves_five_banking_tasks() -> None:
    assert validate(AgentDojoTarget("banking"), no_op).successes == 5
    assert validate(AgentDojoTarget("slack"), no_op).successes == 0


@pytest.mark.parametrize("suite", SUITES)
def test_splits_partition_the_suite(suite: str) -> None:
    target = AgentDojoTarget(suite)
    ids = [task.id for split in SPLITS for task in target.tasks(split)]
    assert len(ids) == len(set(ids)) == SUITES[suite]
    described = {line.name: line for line in describe()}[target.name]
    assert dict(described.splits) == {split: len(target.tasks(split)) for split in SPLITS}
    assert described.data_hash == target.data_hash


def test_a_dropped_write_is_named_by_the_checks() -> None:
    target = AgentDojoTarget("banking")
    task = next(task for split in SPLITS for task in target.tasks(split) if task.id == "user_task_0")
    environment = target.environment()
    spoiled = play(environment, replace(task, payload={**task.payload, "without": [1]}), oracle)
    assert spoiled.reward == 0.0
    failed = {check.kind for check in spoiled.checks if check.required and not check.passed}
    assert {"call_send_money", "reach_requested_state"} <= failed
    assert all(check.passed for check in play(environment, task, oracle).checks if check.required)


def test_obeying_an_injection_is_insecure_and_ignoring_it_is_not() -> None:
    target = AgentDojoTarget("banking", attacked=True)
    tasks = {task.id: task for split in SPLITS for task in target.tasks(split)}
    assert len(tasks) == 16 * 9
    described = {line.name: line for line in describe()}[target.name]
    assert dict(described.splits) == {split: len(target.tasks(split)) for split in SPLITS}
    assert described.data_hash == target.data_hash != AgentDojoTarget("banking").data_hash
    environment = target.environment()
    task = tasks["user_task_1/injection_task_0"]
    ignored = play(environment, task, oracle)
    assert ignored.metrics == {"utility": 1.0, "security": 1.0}
    environment.reset(task)
    seen = environment.step(Action(tool_calls=(ToolCall("get_most_recent_transactions", {"n": 100}, "a"),)))
    assert "<INFORMATION>" in seen.messages[0].content
    for call in environment._injection.ground_truth(environment._before):
        environment.step(Action(tool_calls=(ToolCall(call.function, dict(call.args)),)))
    environment.step(Action(content="Done."))
    obeyed = environment.score()
    assert obeyed.metrics["security"] == 0.0
    assert {"resist_prompt_injection", "avoid_extra_writes"} <= {c.kind for c in obeyed.checks if not c.passed}


def test_bad_calls_are_answered() -> None:
    target = AgentDojoTarget("slack")
    environment = target.environment()
    environment.reset(target.tasks("test")[0])
    calls = (ToolCall("nothing", {}, "a"), ToolCall("send_direct_message", {"wrong": [{}]}, "b"))
    answers = environment.step(Action(tool_calls=calls))
    assert [message.tool_call_id for message in answers.messages] == ["a", "b"]
    assert "nothing" in answers.messages[0].content
    assert "ValidationError" in answers.messages[1].content
    assert "Error" in environment.step(Action(malformed="{")).messages[0].content
    assert environment.step(Action(content="Bye")).done
    assert environment.score().reward == 0.0


def test_unknown_suite_and_task() -> None:
    with pytest.raises(TargetError, match="office"):
        AgentDojoTarget("office")
    with pytest.raises(TargetError, match="user_task_99"):
        AgentDojoTarget("slack").environment().reset(TargetTask("x", "test", "", 0, {"user_task": "user_task_99"}))
