"""What an environment offers and says, refused where it is outside the contract: found here it costs its own episode,
found where prompts are rendered and stored it would cost all those that are played beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, get_args

from environments.contract import DEEPEST, Action, Environment, Message, Observation, Prompt, Role, ToolCall, too_deep
from environments.scores import plain
from errors import EnvironmentFault

# Steps that an episode may have at most. What acts without a model has no context that it fills: an agent that does
# nothing, in every evaluation and before every round, takes them all where the environment does not end its episode.
MOST_STEPS = 10_000
A = TypeVar("A", bound=Action | None)


def offered(environment: Environment) -> tuple[Prompt, int]:
    """The prompt that an environment shows after `reset`, and its most steps."""
    if not isinstance(environment.instructions, str):
        raise EnvironmentFault(f"instructions are {environment.instructions!r:.80}; give a text, '' for none")
    _refuse_no_unicode(environment.instructions, "instructions")
    _refuse_no_sequence(environment.examples, "examples")
    refuse_tools(environment.tools)
    prompt, most = Prompt.of(environment), environment.max_steps
    for message in prompt.examples:
        _refuse_message(message, "examples")
    if isinstance(most, bool) or not isinstance(most, Integral) or not 1 <= most <= MOST_STEPS:
        raise EnvironmentFault(f"max_steps is {most!r:.80}; give a whole number from 1 to {MOST_STEPS}")
    return prompt, most


def observed(observation: Observation, name: str) -> Observation:
    """The observation that the environment's `name` gave."""
    if not isinstance(observation, Observation):
        kind = type(observation).__name__
        raise EnvironmentFault(f"{name}() returned {kind}; return environments.contract.Observation")
    if not isinstance(observation.messages, tuple | list):  # a generator would be read here, and nothing said
        kind = type(observation.messages).__name__
        raise EnvironmentFault(f"{name}() gave its messages as a {kind}; give a tuple of contract.Message, () for none")
    for message in observation.messages:
        _refuse_message(message, f"{name}()")
    if not isinstance(plain(observation.done), bool):  # a text, "False" for one, would end the episode
        raise EnvironmentFault(f"{name}() gave done {observation.done!r:.80}; give True or False")
    if observation.done and name == "reset":  # nothing would be asked, routed or learnt
        raise EnvironmentFault("reset() gave an episode that is over; give only tasks that have a turn")
    if not observation.done and not observation.messages:  # there would be nothing to answer
        raise EnvironmentFault(f"{name}() gave no message and is not done; say something, or end the episode")
    return observation


def refuse_tools(tools: Sequence[Any]) -> None:
    """Refuse what is no OpenAI function schema that can be shown and read."""
    _refuse_no_sequence(tools, "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EnvironmentFault(
                f"tools hold {tool!r:.80}; give OpenAI function schemas: "
                "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
            )
        _refuse_no_json(tool, f"the tool {function['name']!r:.80}")
        if "parameters" in function:
            _refuse_no_schema(function["parameters"], f"the parameters of the tool {function['name']!r:.80}")
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise EnvironmentFault(f"tools hold two of the name {twice!r:.80}; give each its own")


def suggested(action: A, name: str) -> A:
    """The action that an environment's own solution gave, refused where it is none."""
    if action is not None and not isinstance(action, Action):
        raise EnvironmentFault(f"{name} returned {type(action).__name__}; return environments.contract.Action or None")
    if action is not None and not too_deep(action.tool_calls):  # that turn is malformed, whoever made it
        _refuse_message(action.as_message(), name)
    return action


def can_be_said(action: Action) -> bool:
    """Whether an agent's turn can be such an action: what is no Unicode, or no JSON, is malformed before."""
    try:
        suggested(action, "the agent")
    except EnvironmentFault:
        return False
    return True


def _refuse_message(message: Message, name: str) -> None:
    """Refuse a message that cannot be rendered and stored; `name` says where it comes from."""
    if not isinstance(message, Message) or not isinstance(message.content, str):
        raise EnvironmentFault(f"{name} gave {message!r:.80} as a message; give contract.Message with a text")
    if message.role not in get_args(Role):
        raise EnvironmentFault(
            f"{name} gave a message with the role {message.role!r:.80}; give one of {', '.join(get_args(Role))}"
        )
    _refuse_no_unicode(message.content, name)
    _refuse_no_text(message.tool_call_id, "tool_call_id", name)
    _refuse_no_text(message.name, "name", name)
    if not isinstance(message.tool_calls, tuple | list):  # a generator would be read here, and a call alone is no tuple
        kind = type(message.tool_calls).__name__
        raise EnvironmentFault(f"{name} gave its calls as a {kind}; give a tuple of contract.ToolCall, () for none")
    if too_deep(message.tool_calls):
        raise EnvironmentFault(f"{name} gave a call that is nested deeper than {DEEPEST}; give a flatter one")
    for call in message.tool_calls:
        if not (isinstance(call, ToolCall) and isinstance(call.name, str) and isinstance(call.arguments, Mapping)):
            raise EnvironmentFault(f"{name} gave {call!r:.80} as a call; give contract.ToolCall with a dict")
        _refuse_no_text(call.id, "id of a call", name)
        _refuse_no_unicode(call.name, name)
        _refuse_no_json(call.arguments, f"a call that {name} gave")


def _refuse_no_text(given: Any, what: str, name: str) -> None:
    if not given:  # None, too
        return
    if not isinstance(given, str):
        raise EnvironmentFault(f"{name} gave {given!r:.80} as the {what}; give a text, '' for none")
    _refuse_no_unicode(given, name)


def _refuse_no_sequence(given: Any, name: str) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise EnvironmentFault(f"{name} are {given!r:.80}; give a tuple, () for none")


def _refuse_no_schema(schema: Any, what: str) -> None:
    """Refuse what an object's schema, or one of its properties', cannot be; what types there are is not looked at."""
    if not isinstance(schema, Mapping):
        raise EnvironmentFault(f"{what} are {schema!r:.80}; give a schema, such as {{'type': 'object'}}")
    for name, kind, wanted in (
        ("properties", Mapping, "a dict of schemas"),
        ("required", list | tuple, "a list of names"),
        ("enum", list | tuple, "a list of values"),
        ("items", Mapping, "a schema"),
    ):
        if name in schema and not isinstance(schema[name], kind):
            raise EnvironmentFault(f"{what} have {name} {schema[name]!r:.80}; give {wanted}, or leave it out")
    for name, part in schema.get("properties", {}).items():
        _refuse_no_schema(part, f"{what.removesuffix(',')}, property {name!r:.80},")
    if "items" in schema:
        _refuse_no_schema(schema["items"], f"{what.removesuffix(',')}, items,")


def _refuse_no_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise EnvironmentFault(f"{name} gave a text that is not Unicode ({problem}); clean it") from None


def _refuse_no_json(value: Any, what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as problem:  # half a character is a ValueError, too
        raise EnvironmentFault(f"{what} is no JSON ({problem}); give dicts, lists, texts and numbers") from None
