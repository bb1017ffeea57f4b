"""What synthesis reads from the target: on the shop, whose tools, tasks and reference solution are real."""

from __future__ import annotations

import sys

import pytest

from environments.targets.catalogue import load_target, with_scripted_user
from environments.targets.shop.episode import ShopEnvironment
from environments.targets.shop.target import ShopTarget
from environments.targets.tau2 import describe
from environments.validation.playing import ENOUGH_FAULTS
from environments.validation.repeats import repeated
from environments.wrapping import WrappedEnvironment
from errors import CallOverdue
from tasks.round.target_prompt import target_prompt
from tasks.synthesis.author_request import Brief, author_messages
from tasks.synthesis.target_material import answers_in, held_out_sources, judged_answers, tool_answers

_missing = [line.missing for line in describe() if line.missing]


def conversation(*answers: str) -> list[dict]:
    said: list[dict] = []
    for i, answer in enumerate(answers):
        call = {"name": "find", "arguments": {"order": i}, "id": f"c{i}"}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer, "tool_call_id": f"c{i}"},
        ]
    return said


def test_the_first_good_and_the_first_failing_answer_of_a_tool_are_kept_apart():
    found = answers_in([conversation("error: no order", "shipped"), conversation("x" * 999, "error: other")])
    assert found["find"].failing == 'find {"order":0} -> error: no order'
    assert found["find"].good == 'find {"order":1} -> shipped'
    assert len(answers_in([conversation("x" * 999)])["find"].good) < 450


@pytest.fixture(scope="module")
def shop() -> ShopTarget:
    target = load_target("shop")
    assert isinstance(target, ShopTarget)
    return target


def test_every_tool_of_the_shop_has_both_answers_though_the_base_called_none(shop):
    answers = tool_answers(shop, [], target_prompt(shop).tools)
    assert {"find", "account", "refund"} <= set(answers)
    assert all(shown.good for shown in answers.values())
    assert all("error" in shown.failing for shown in answers.values())


def test_what_the_base_met_is_preferred_to_what_is_played(shop):
    answers = tool_answers(shop, [conversation("MET-1")], target_prompt(shop).tools)
    assert answers["find"].good == 'find {"order":0} -> MET-1'
    assert answers["account"].good


class Leaving(WrappedEnvironment):
    """Leaves the process on nonsense, as a command line tool does, and when it is asked how it would go on."""

    def step(self, action):
        if any("no_such_value" in map(str, call.arguments.values()) for call in action.tool_calls):
            sys.exit("usage: account EMAIL")
        return super().step(action)


class Left(ShopTarget):
    def environment(self):
        return Leaving(super().environment())


def test_a_target_that_leaves_the_process_on_nonsense_is_told_of_as_far_as_it_went():
    target = Left()
    tools = target_prompt(target).tools
    answers = tool_answers(target, [], tools)
    assert set(answers) == {str(tool["function"]["name"]) for tool in tools}
    assert answers["account"].good
    assert not answers["account"].failing


def test_a_target_that_leaves_the_process_ends_no_judging_and_no_reading(monkeypatch):
    monkeypatch.setattr(ShopEnvironment, "oracle", lambda self: sys.exit("no reference"))
    assert judged_answers(ShopTarget(), [])
    assert len(held_out_sources(ShopTarget(), ShopTarget().tasks("validation")[:2])) == 2


def test_a_target_that_hangs_on_nonsense_is_asked_a_few_times_and_no_more(shop, monkeypatch):
    asked = []

    def step(self, action):
        asked.append(action)
        raise CallOverdue("the environment's step did not return")

    monkeypatch.setattr(ShopEnvironment, "step", step)
    tool_answers(shop, [], target_prompt(shop).tools)
    assert len(asked) == 3 * ENOUGH_FAULTS


def test_a_scenario_like_a_held_out_task_is_found_and_diagnosis_tasks_are_not_read(shop):
    tasks = shop.tasks("validation")[:30]
    sources = held_out_sources(shop, tasks)
    assert len(sources) == 30
    assert {source.name for source in sources} == {"a held-out task of the target"}
    texts = [source.text for source in sources] + ["Please cancel order 1234567 for me."]
    assert [index for index, _, _ in repeated(texts, sources)] == list(range(30))


@pytest.mark.parametrize(
    "name",
    [
        "shop",
        *(
            pytest.param(name, marks=pytest.mark.skipif(bool(_missing), reason=f"no tau2: {_missing[:1]}"))
            for name in ("tau2:retail", "tau2:airline")
        ),
    ],
)
def test_the_rendered_request_has_real_answers_and_no_text_of_a_held_out_task(name, tmp_path):
    target = load_target(name)
    prompt = target_prompt(target)
    answers = tool_answers(target, [], prompt.tools)
    brief = Brief("ask_first", "It asks.", ["user: hello"], prompt.tools, prompt.instructions, answers)
    rendered = tmp_path / "request.txt"
    rendered.write_text("\n\n".join(message["content"] for message in author_messages(brief, ())), encoding="utf-8")
    text = rendered.read_text(encoding="utf-8")
    for tool in prompt.tools:
        assert f"- {tool['function']['name']}\n  good: " in text
    # No reference solution calls retail's modify_pending_order_payment or airline's get_flight_status: they get what
    # other calls have or were told.
    assert all(shown.good and shown.failing for shown in answers.values())
    environment = with_scripted_user(target).environment()
    for split in ("validation", "test"):
        for task in target.tasks(split):
            assert environment.reset(task).messages[0].content not in text
    environment.close()
