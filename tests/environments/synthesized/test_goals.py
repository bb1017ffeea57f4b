"""What a goal takes for said and for equal; that no call of a turn is lost, neither an agent's nor an oracle's."""

from pathlib import Path

import pytest

from environments.contract import Action, ToolCall
from environments.synthesized.goals import judge_goal
from environments.synthesized.modules import MAX_CALLS_PER_TURN, SandboxedModule
from errors import EnvironmentFault

EXAMPLE = Path(__file__).parents[3] / "environments" / "synthesized" / "worked_examples" / "check_before_cancel.py"


@pytest.mark.parametrize(
    ("said", "phrase", "right"),
    [
        ("It costs 12.", "12", True),
        ("It costs 12.50 in all.", "12", False),
        ("It costs 12.50 in all.", "50", False),
        ("It costs 12.50.", "12.50", True),
        ("It costs 12.00 in all.", "12", True),
        ("It costs 12.005 in all.", "12", False),
        ("It costs 12.505.", "12.50", False),
        ("It costs 112.50.", "12.50", False),
        ("Order W1.7 has been sent.", "W1.7", True),
        ("Delivered: 3.", "delivered", True),
    ],
)
def test_a_number_is_not_said_by_naming_another_that_holds_it(said: str, phrase: str, right: bool) -> None:
    for key in ("says", "silent"):
        check = judge_goal({key: [phrase]}, {}, [{"say": said}], "tell_total")[-1]
        assert check.passed is (right if key == "says" else not right)


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [(12, 12.0, True), (12.0, 12, True), ([1, {"a": 2.0}], [1.0, {"a": 2}], True), (12.5, 12, False), (True, 1, False)],
)
def test_a_whole_number_is_the_same_however_it_is_written(given: object, wanted: object, same: bool) -> None:
    """An agent that refunds 12 has refunded the 12.0 that the module has computed."""
    goal = {"calls": [{"name": "refund", "arguments": {"amount": wanted}}], "state": {"paid": wanted}}
    made = {"name": "refund", "arguments": {"amount": given}, "result": "ok"}
    assert [c.passed for c in judge_goal(goal, {"paid": given}, [made], "refund_exactly")] == [same] * 3


def test_every_call_of_a_turn_is_answered_also_those_that_are_too_many() -> None:
    module = SandboxedModule(EXAMPLE.read_text())
    try:
        environment = module.environment()
        environment.reset(module.scenario(0))
        ids = [f"call_{place}" for place in range(MAX_CALLS_PER_TURN + 2)]
        calls = tuple(ToolCall("get_order", {"order_id": "W1"}, name) for name in ids)
        answers = environment.step(Action(tool_calls=calls)).messages
        made, refused = answers[:MAX_CALLS_PER_TURN], answers[MAX_CALLS_PER_TURN:]
        assert [answer.tool_call_id for answer in answers] == ids
        assert all("was not made" in answer.content for answer in refused)
        assert not any("was not made" in answer.content for answer in made)
    finally:
        module.close()


def test_an_oracle_that_calls_and_speaks_at_once_is_told_so() -> None:
    """Its calls were left out, so that it failed in every scenario and nobody knew why."""
    both = "    return {'calls': [{'name': 'get_order', 'arguments': {'order_id': 'W1'}}], 'say': 'One moment.'}\n"
    module = SandboxedModule(EXAMPLE.read_text() + "\n\ndef oracle(scenario, state, log):\n" + both)
    try:
        environment = module.environment()
        environment.reset(module.scenario(0))
        with pytest.raises(EnvironmentFault, match="not both"):
            environment.oracle()
    finally:
        module.close()


def test_a_worked_message_without_words_says_nothing() -> None:
    call = "{'name': 'get_order', 'arguments': {}, 'id': 'c'}"
    shown = f"EXAMPLES = [{{'role': 'assistant', 'content': None, 'tool_calls': [{call}]}}]\n"
    module = SandboxedModule(EXAMPLE.read_text() + shown)
    module.close()
    assert [message.content for message in module.examples] == [""]
