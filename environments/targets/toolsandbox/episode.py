"""One ToolSandbox episode, played step by step through ToolSandbox's own roles and evaluation.

ToolSandbox keeps its context in a process-wide variable and redirects stdout while a tool runs. So every use happens
under one lock with this episode's context swapped in and read back: any number of episodes interleave in one process.

The only code that reaches ToolSandbox's interpreter is built here from the name of a tool that is offered and from the
`repr` of JSON values. Nothing that a model wrote is ever run as code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tool_sandbox.common.evaluation import EvaluationResult
from tool_sandbox.common.execution_context import (
    DatabaseNamespace,
    ExecutionContext,
    RoleType,
    get_current_context,
    new_context,
)
from tool_sandbox.common.message_conversion import Message as Row
from tool_sandbox.common.scenario import Scenario
from tool_sandbox.common.tool_conversion import convert_to_openai_tools
from tool_sandbox.roles.base_role import BaseRole
from tool_sandbox.roles.execution_environment import ExecutionEnvironment

from environments.contract import ToolCall
from environments.targets.toolsandbox.data import LOCK

_END = "end_response = end_conversation()\nprint(repr(end_response))"


class _Agent(BaseRole):
    role_type = RoleType.AGENT


class _User(BaseRole):
    role_type = RoleType.USER


class Episode:
    """A scenario being played. All methods take the lock; none raises because of what the agent did."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._interpreter, self._calls = ExecutionEnvironment(), 0
        with LOCK:
            self.context: ExecutionContext = copy.deepcopy(scenario.starting_context)
            with self._active():
                rows = self._rows(history=True)
                for index, (recipient, sender) in enumerate(zip(rows["recipient"], rows["sender"], strict=True)):
                    if (recipient, sender) == (RoleType.EXECUTION_ENVIRONMENT, RoleType.SYSTEM):
                        self._interpreter.respond(ending_index=index)
                self._start = get_current_context().max_sandbox_message_index
                offered = _Agent.get_available_tools()
                self.tools: Sequence[Mapping[str, Any]] = convert_to_openai_tools(offered)
                self._offered = frozenset(offered)

    @contextmanager
    def _active(self) -> Iterator[None]:
        """This episode's context as the process's; parallel calls replace it, so it is read back."""
        with LOCK, new_context(self.context):
            try:
                yield
            finally:
                self.context = get_current_context()

    def _rows(self, history: bool = False) -> Any:
        return get_current_context().get_database(
            DatabaseNamespace.SANDBOX, drop_sandbox_message_index=False, get_all_history_snapshots=history
        )

    @property
    def done(self) -> bool:
        """Whether the user ended the conversation or the scenario's number of messages is used up."""
        with self._active():
            used = get_current_context().max_sandbox_message_index
            return not self._rows()["conversation_active"][-1] or used >= self.scenario.max_messages + self._start

    @property
    def ended(self) -> bool:
        """Whether the user ended the conversation."""
        with self._active():
            return not self._rows()["conversation_active"][-1]

    def agent_view(self) -> list[tuple[str, str]]:
        """The conversation as the agent may see it before its first turn: (role, text)."""
        with self._active():
            rows = _Agent.filter_messages(_Agent.get_messages())
        roles = {RoleType.SYSTEM: "system", RoleType.USER: "user", RoleType.AGENT: "assistant"}
        return [(roles[row.sender], row.content) for row in rows if row.sender in roles]

    def user_view(self) -> list[dict[str, str]]:
        """The conversation for a model that plays the user: ToolSandbox's instructions and examples, roles flipped."""
        with self._active():
            rows = _User.filter_messages(_User.get_messages())
        roles = {
            (RoleType.SYSTEM, RoleType.USER): "system",
            (RoleType.AGENT, RoleType.USER): "user",
            (RoleType.USER, RoleType.AGENT): "assistant",
        }
        pairs = [(roles.get((row.sender, row.recipient)), row.content) for row in rows]
        return [{"role": role, "content": content} for role, content in pairs if role is not None]

    def user_tools(self) -> list[Mapping[str, Any]]:
        """The one tool of the user: ending the conversation."""
        with self._active():
            return list(convert_to_openai_tools(_User.get_available_tools()))

    def execution_name(self, agent_name: str) -> str:
        """The real name of a tool whose name is scrambled for the agent."""
        with self._active():
            return str(get_current_context().get_execution_facing_tool_name(agent_name))

    def agent_name(self, execution_name: str) -> str:
        """The name under which the agent sees a tool."""
        with self._active():
            return str(get_current_context().get_agent_facing_tool_name(execution_name))

    def say(self, text: str) -> None:
        """The agent's words to the user."""
        with self._active():
            BaseRole.add_messages([Row(sender=RoleType.AGENT, recipient=RoleType.USER, content=text)])

    def hear(self, text: str | None) -> None:
        """The user's words to the agent; None ends the conversation."""
        with self._active():
            if text is not None:
                BaseRole.add_messages([Row(sender=RoleType.USER, recipient=RoleType.AGENT, content=text)])
                return
            BaseRole.add_messages([Row(sender=RoleType.USER, recipient=RoleType.EXECUTION_ENVIRONMENT, content=_END)])
            self._interpreter.respond()

    def call(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool, tuple[str, ...]]]:
        """Carry out calls of one turn: (result, failed, tool traces) of each, in order.

        ToolSandbox runs parallel calls in every order and fails them when an order fails. Unknown tools are answered
        here, as the interpreter must not see their names.
        """
        known = [call for call in calls if call.name in self._offered]
        answers = iter(self._run(known)) if known else iter(())
        unknown = "NameError: name {!r} is not defined"
        return [
            next(answers) if call.name in self._offered else (unknown.format(call.name), True, ()) for call in calls
        ]

    def _run(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool, tuple[str, ...]]]:
        rows = []
        with self._active():
            for call in calls:
                variable, self._calls = f"call_{self._calls}", self._calls + 1
                function = get_current_context().get_execution_facing_tool_name(call.name)
                arguments = json.loads(json.dumps(dict(call.arguments)))
                code = (
                    f"{variable}_parameters = {arguments!r}\n"
                    f"{variable}_response = {function}(**{variable}_parameters)\n"
                    f"print(repr({variable}_response))"
                )
                rows.append(
                    Row(
                        sender=RoleType.AGENT,
                        recipient=RoleType.EXECUTION_ENVIRONMENT,
                        content=code,
                        openai_tool_call_id=variable,
                        openai_function_name=call.name,
                    )
                )
            BaseRole.add_messages(rows)
            self._interpreter.respond()
            messages = BaseRole.get_messages()[-len(rows) :]
        by_id = {message.openai_tool_call_id: message for message in messages}
        return [
            (
                by_id[row.openai_tool_call_id].content,
                by_id[row.openai_tool_call_id].tool_call_exception is not None,
                tuple(by_id[row.openai_tool_call_id].tool_trace or ()),
            )
            for row in rows
        ]

    def evaluate(self) -> EvaluationResult:
        """ToolSandbox's own evaluation of the episode so far."""
        with self._active():
            return self.scenario.evaluation.evaluate(
                execution_context=self.context, max_turn_count=self.scenario.max_messages
            )
