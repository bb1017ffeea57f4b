"""ToolSandbox: oracle, no-op, interleaved and threaded episodes, checks, and that no text is executed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from environments.contract import SPLITS, Action, TargetTask, ToolCall
from environments.targets.reference_check import no_op, oracle, play
from environments.targets.toolsandbox import describe
from errors import ProviderError, TargetError

_missing = describe()[0].missing
if not _missing:
    try:
        from environments.targets.toolsandbox.target import ToolSandboxEnvironment, ToolSandboxTarget, scripted_facts
    except TargetError as error:
        _missing = str(error)
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"ToolSandbox is absent: {_missing}")


@pytest.fixture(scope="module")
def target() -> Any:
    return ToolSandboxTarget()


@pytest.fixture
def named(target: Any) -> Iterator[dict[str, TargetTask]]:
    return {task.id: task for split in SPLITS for task in target.tasks(split)}


def test_101_of_129_scenarios_need_no_network(target: Any, named: dict[str, TargetTask]) -> None:
    assert (len(named), target.skipped) == (101, 28)
    line = describe()[0]
    assert (dict(line.splits), line.data_hash) == ({s: len(target.tasks(s)) for s in SPLITS}, target.data_hash)


@pytest.mark.parametrize(
    "name",
    [
        "remove_contact_by_phone",
        "find_days_till_holiday_wifi_off",
        "send_message_with_contact_content_cellular_off",
        "add_reminder_content_and_date_and_time",
        "update_contact_relationship_with_relationship",
    ],
)
def test_oracle_reaches_similarity_one(target: Any, named: dict[str, TargetTask], name: str) -> None:
    score = play(target.environment(), named[name], oracle)
    assert score.metrics["perfect"] == 1.0
    assert score.success
    assert all(check.passed for check in score.checks)


def test_no_op_is_perfect_only_where_information_is_missing(target: Any, named: dict[str, TargetTask]) -> None:
    environment = target.environment()
    free = play(environment, named["find_current_city_insufficient_information"], no_op)
    lost = play(environment, named["remove_contact_by_phone"], no_op)
    assert (free.reward, free.success) == (1.0, True)
    assert (lost.reward, lost.success) == (0.0, False)
    assert {"remove_contact_record", "report_result_to_user"} <= {
        check.kind for check in lost.checks if not check.passed
    }


def test_another_wording_passes_by_our_rule_only_when_close(target: Any, named: dict[str, TargetTask]) -> None:
    environment = target.environment()

    def play_with(words: str) -> Any:
        return play(
            environment,
            named["remove_contact_with_id"],
            lambda env: Action(content=words) if (a := env.oracle()) and a.content.startswith("9e13") else a,
        )

    close = play_with("9e137f06-916a-5310-8174-cf0b7e9f7054 was removed from your contacts")
    assert close.success
    assert close.metrics["perfect"] == 0.0
    assert not play_with("Done!").success


def test_interleaved_and_threaded_episodes_do_not_mix(target: Any, named: dict[str, TargetTask]) -> None:
    names = ["remove_contact_by_phone", "wifi_off", "cellular_off", "remove_contact_with_id"]
    environments = [target.environment() for _ in names]
    for environment, name in zip(environments, names, strict=True):
        environment.reset(named[name])
    live = set(range(len(names)))
    while live:
        for index in list(live):
            action = environments[index].oracle()
            if action is None or environments[index].step(action).done:
                live.remove(index)
    assert [environment.score().reward for environment in environments] == [1.0] * 4
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda name: play(target.environment(), named[name], oracle), names))
    assert [score.reward for score in scores] == [1.0] * 4


def test_text_of_the_agent_is_never_executed(target: Any, named: dict[str, TargetTask], tmp_path: Path) -> None:
    marker = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(marker)!r}).write_text('x')"
    environment = target.environment()
    environment.reset(named["remove_contact_by_phone"])
    calls = (
        ToolCall(code, {}, "a"),
        ToolCall("search_contacts", {"phone_number": f"{{{code}}}'+{code}+'"}, "b"),
        ToolCall("search_contacts", {f"name=({code})": "x"}, "c"),
        ToolCall("print", {"x": "y"}, "d"),
    )
    answers = environment.step(Action(tool_calls=calls)).messages
    assert [message.tool_call_id for message in answers] == ["a", "b", "c", "d"]
    assert "NameError" in answers[0].content
    assert "NameError" in answers[3].content
    environment.step(Action(content=code))
    assert "Error" in environment.step(Action(malformed=code)).messages[0].content
    assert not marker.exists()


def test_scripted_user_does_not_leak_the_answer() -> None:
    told = "... want User B to complete: Find which phone number asked you (User A) if you want some GPUs. "
    answer = "It should be +18307976530. Do not leak this information. You do not have more information."
    facts = scripted_facts("given the following task you (User A) " + told[4:] + answer)
    assert facts == ["Find which phone number asked me if I want some GPUs. I do not have more information."]


def test_building_leaves_the_global_generator_alone(target: Any) -> None:
    from environments.targets.toolsandbox import data

    random.seed(7)
    before = random.getstate()
    data.scenarios()
    assert random.getstate() == before


def test_a_model_plays_the_user_and_its_failure_is_attributed(named: dict[str, TargetTask]) -> None:
    seen: list[Any] = []

    def replies(messages: Any, tools: Any) -> tuple[str, tuple[ToolCall, ...]]:
        """Stands for a provider: answers once, then fails, then ends the conversation."""
        seen.append((list(messages), list(tools)))
        if len(seen) == 2:
            raise ProviderError("the provider is overloaded", transient=True)
        return ("Sure.", ()) if len(seen) == 1 else ("", (ToolCall("end_conversation", {}, "x"),))

    environment = ToolSandboxEnvironment(replies)
    environment.reset(named["wifi_off"])
    assert environment.step(Action(content="Shall I?")).messages[0].content == "Sure."
    assert seen[0][0][-1] == {"role": "user", "content": "Shall I?"}
    assert seen[0][0][-2]["role"] == "assistant"
    assert seen[0][1][0]["function"]["name"] == "end_conversation"
    with pytest.raises(ProviderError, match="overloaded"):
        environment.step(Action(content="And now?"))
    assert environment.step(Action(content="Bye")).done


def test_unknown_scenario_and_variant(target: Any) -> None:
    with pytest.raises(TargetError, match="nope"):
        target.environment().reset(TargetTask("nope", "test", "", 0, {"name": "nope"}))
    with pytest.raises(TargetError, match="huge"):
        ToolSandboxTarget("huge")
