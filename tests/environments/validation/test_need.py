"""The parts of the tests of need: what lazy policies copy, how an oracle loses its step, what is a repetition."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Action, Message, ToolCall
from environments.validation.lazy import LAZY_POLICIES, _value, policy_of, unbound_reason, values_told
from environments.validation.need import plans_of
from environments.validation.repeats import Source, entities, repeated
from environments.validation.step import Deed, step_fault, without_step

PARAMETERS = {
    "type": "object",
    "properties": {"order": {"type": "integer"}, "town": {"type": "string"}, "why": {"enum": ["late"]}},
    "required": ["order", "town", "why"],
}
TOOLS = [{"function": {"name": "move", "parameters": PARAMETERS}}, {"function": {"name": "look"}}]
BY_NAME = {lazy.name: lazy for lazy in LAZY_POLICIES}


def call(name: str = "move", **arguments: Any) -> Action:
    return Action(tool_calls=(ToolCall(name, arguments, "c"),))


def actions(name: str, plan: tuple[str, ...], *answers: Message, known: tuple[str, ...] = ()) -> list[Action]:
    """What a lazy policy does when each of its actions gets the next answer."""
    policy = policy_of(BY_NAME[name], plan, known)
    environment: Any = SimpleNamespace(tools=TOOLS, examples=())
    messages = [Message("user", 'Order 417 and 28, "Old Mill Road", thanks.')]
    done = []
    for answer in [*answers, Message("tool", "ok")]:
        action = policy(environment, messages, random.Random(0))
        if action is None:
            break
        done.append(action)
        messages += [action.as_message(), answer]
    return done


def test_values_are_read_from_prose_json_and_accepted_calls():
    said = [
        Message("user", 'I am kim84@mail.com, "Old Mill Road", order #417.'),
        call(order=5).as_message(),
        Message("tool", '{"town": "Oslo", "paid": 12}', tool_call_id="c"),
        call(order=6).as_message(),
        Message("tool", "error: no order", tool_call_id="c"),
        Message("assistant", "I say 999"),
    ]
    values, named = values_told(said)
    assert values == ["kim84@mail.com", "Old Mill Road", "#417", "Oslo", "12"]
    assert named == {"order": 5, "town": "Oslo", "paid": 12}


def test_lazy_policies_fill_every_required_argument_from_the_conversation():
    (first, *_) = actions("copy_last_told", ("move",))
    assert first.tool_calls[0].arguments == {"order": 28, "town": "Old Mill Road", "why": "late"}
    (first, *_) = actions("call_every_tool_once", ())
    assert first.tool_calls[0].arguments == {"order": 417, "town": "28", "why": "late"}
    assert actions("stop_at_once", ()) == []
    assert "order, the town, the why" in actions("ask_always", ("move",))[0].content


def test_guessing_and_listening_uses_what_it_heard():
    answers = (Message("tool", "error"), Message("user", "It is 555."))
    guess, say, again = actions("guess_and_listen", ("move",), *answers)
    assert guess.tool_calls[0].arguments["order"] == 417
    assert "?" not in say.content
    assert again.tool_calls[0].arguments["order"] == 555


def test_repeating_never_tries_the_same_twice_and_stops_when_accepted():
    answers = (Message("tool", "error: wrong"), Message("tool", "error: wrong"), Message("tool", "moved"))
    tries = actions("repeat_until_accepted", ("move",), *answers)
    given = [dict(a.tool_calls[0].arguments) for a in tries if a.tool_calls]
    assert len(given) == 3
    assert all(given.count(arguments) == 1 for arguments in given)
    assert tries[-1] == Action(content="Done.")


def test_evidence_is_copied_and_a_policy_that_cannot_be_bound_says_why():
    (first, *_) = actions("words_of_evidence", ("move",), known=("91350",))
    assert first.tool_calls[0].arguments["order"] == 91350
    assert unbound_reason(BY_NAME["words_of_evidence"], ("move",), TOOLS, ()) == (
        "there are no values in the evidence to copy"
    )
    assert unbound_reason(BY_NAME["copy_last_told"], ("fly",), TOOLS, ()) == "the environment has no tool 'fly'"
    assert unbound_reason(BY_NAME["copy_last_told"], ("move",), TOOLS, ()) == ""


def test_plans_are_the_oracles_sequences_by_frequency_then_each_tool_alone():
    look, move = Deed(call("look"), ""), Deed(call(), "")
    assert plans_of([[look], [look, move], [look, move]]) == [("look", "move"), ("look",), ("move",)]


ASKED = [Deed(Action("Which order?"), "It is 417."), Deed(call(order=417, town="Oslo"), "ok"), Deed(Action("417."), "")]
OTHER = [Deed(Action("Which order?"), "It is 905."), Deed(call(order=905, town="Rome"), "ok"), Deed(Action("905."), "")]


@pytest.mark.parametrize(
    ("step", "left"),
    [
        # What only the answer told is made up; the town was in the request.
        ({"say": "ask"}, [call(order=905, town="Oslo"), Action("528.")]),
        ({"say": "answer"}, [ASKED[0].action, ASKED[1].action, Action("905.")]),
        ({"tool": "move"}, [ASKED[0].action, Action("417.")]),
        ({"tool": "move", "argument": "town"}, [ASKED[0].action, call(order=417, town="Rome"), Action("417.")]),
        ({"tool": "look"}, [deed.action for deed in ASKED]),
    ],
)
def test_the_oracle_without_its_step(step, left):
    assert without_step(step, "Send it to Oslo.", ASKED, [OTHER]) == left


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ({"tool": "move"}, ""),
        ({"tool": "move", "argument": "town"}, ""),
        ({"say": "ask"}, ""),
        ({}, "STEP must be"),
        ({"tool": 3}, "STEP must be"),
        ("move", "STEP must be"),
        ({"say": "ask", "tool": "move"}, "STEP must be"),
        ({"tool": "fly"}, "names the tool 'fly'"),
        ({"tool": "move", "argument": "colour"}, "names the argument 'colour'"),
    ],
)
def test_steps_that_cannot_be_taken_out_are_named(step, fault):
    found = step_fault(step, TOOLS)
    assert fault in found
    assert bool(found) == bool(fault)


def test_entities_are_ids_and_addresses_not_dates_prices_or_counts():
    text = "On 2024-05-15 kim84@mail.com paid 120.50 for #W12345 and 12 mugs, R-77."
    assert entities(text) == {"kim84@mail.com", "w12345"}


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["Order 417 of kim84@mail.com."], [0]),  # two entities of the same text
        (["Order 417 alone."], []),  # a short number meets another by chance
        (["Ticket 7001234."], [0]),  # a long one does not
        (["please CANCEL order 417, of kim84@mail.com!"], [0]),
        (["Order 555.", "Order 417."], [1]),  # half of the scenarios have one of a text that was shown
    ],
)
def test_repetitions_are_found_by_content(texts, found):
    sources = [
        Source("held out", "Cancel order 417 of kim84@mail.com."),
        Source("held out", "Ticket 7001234 is mine."),
        Source("shown", "Order 417 is late.", shown=len(texts) > 1),
    ]
    assert [index for index, _, _ in repeated(texts, sources)] == found


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        ("add(a=integer) - Adds.\nQuestion: What are five and six?", [0]),  # the same with another function
        ("sum(a=integer) - Sums.\nQuestion: What are four and nine?", []),  # the same function, another question
        ("sum(a=integer) - Sums.\nPlease.", []),
        ("Hello, it is me.\nThanks.", [0]),  # all of it
        ("Good day.\nThanks.", []),
    ],
)
def test_a_request_of_several_lines_is_known_by_the_one_that_asks(request_, found):
    sources = [
        Source("held out", "", opening="sum(a=integer) - Sums.\nQuestion: what are five and six"),
        Source("held out", "", opening="sum(a=integer) - Sums.\nPlease, now."),
        Source("held out", "", opening="Hello, it is me.\nThanks."),
    ]
    assert [index for index, _, _ in repeated([request_], sources, "", [request_])] == found


def test_what_everybody_sees_is_no_repetition():
    assert repeated(["Ticket 7001234."], [Source("held out", "Ticket 7001234.x")], "Say 7001234.") == []


@pytest.mark.parametrize(
    ("limits", "low", "high"),
    [
        ({}, 1, 99),
        ({"minimum": 0, "maximum": 9}, 0, 9),
        ({"minimum": 1000}, 1000, 1098),
        ({"maximum": 0}, -98, 0),
        ({"minimum": 0.5, "maximum": 5}, 1, 5),
        ({"minimum": "1000", "maximum": None}, 1, 99),
        ({"minimum": True, "maximum": float("inf")}, 1, 99),
        ({"minimum": 9, "maximum": 3}, 9, 9),
    ],
)
def test_a_number_is_guessed_within_what_the_schema_gives(limits: dict[str, Any], low: int, high: int) -> None:
    schema = {"type": "integer"} | limits
    drawn = {_value(schema, None, [], random.Random(seed)) for seed in range(600)}
    assert (min(drawn), max(drawn)) == (low, high)
    assert {type(number) for number in drawn} == {int}


def test_a_guess_by_usual_limits_is_the_one_it_always_was() -> None:
    for limits in ({}, {"minimum": 0}, {"maximum": 20}, {"minimum": 3, "maximum": 8}, {"minimum": 0.01}):
        given = {"type": "number"} | limits
        low, high = int(limits.get("minimum", 1)), int(limits.get("maximum", 99))
        for seed in range(50):
            was = max(random.Random(seed).randint(low, high), limits.get("minimum", 1))
            assert _value(given, None, [], random.Random(seed)) == was
