"""tau2-bench as an environment of the contract: one synchronous episode, no threads, no gym."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tau2.data_model.message import AssistantMessage, UserMessage
from tau2.data_model.message import Message as OfficialMessage
from tau2.data_model.message import ToolCall as OfficialCall
from tau2.data_model.tasks import Action as GoldAction
from tau2.data_model.tasks import Task

from environments.contract import Action, Message, Observation, Score, TargetTask, ToolCall
from environments.targets.tau2.data import LICENCE, Tau2Data, load_data
from environments.targets.tau2.scoring import Played, official_reward, score
from environments.targets.tau2.users import GREETING, OUT_OF_SCOPE, STOP, TRANSFER, Customer, build_customer
from environments.targets.tau2.world import Domain, bill_ids, load_domain, name_new_bills, official_task, open_world
from environments.targets.third_party.adapter import error_result, of_split, player_of, user_name
from environments.targets.third_party.simulated_user import UserModel
from errors import EnvironmentFault

# tau2 allows 200 messages, and every action brings at least one more.
MAX_STEPS = 100
# Ten failed calls, the agent's and the customer's together, end an episode with reward 0, as in tau2's orchestrator.
MAX_ERRORS = 10
# A simulated user may call this many tools in a row before it must speak.
MAX_USER_CALLS = 30

CustomerFactory = Callable[[Task, Domain], Customer]


class Tau2Environment:
    """One episode at a time of one domain.

    The agent's opening line ("Hi! How can I help you today?") is part of every episode in tau2, so the first
    observation is the customer's answer to it. Reward is 0 until the customer has ended the conversation.
    """

    max_steps = MAX_STEPS
    examples: Sequence[Message] = ()

    def __init__(self, data: Tau2Data, customer: CustomerFactory) -> None:
        self._data, self._make_customer = data, customer
        self._domain = load_domain(data.domain)
        self.tools: Sequence[dict[str, Any]] = self._domain.tools
        self.instructions = self._domain.instructions
        self._task: Task | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Start `task`. Payload: `id`, and optionally `without`, the indices of reference actions that `oracle` omits.

        Raises TargetError on an unknown or damaged task, ProviderError when the model that plays the user fails.
        """
        self._task = official_task(self._data, str(task.payload["id"]))
        self._world = open_world(self._domain, self._task)
        criteria = self._task.evaluation_criteria
        self._gold = list((criteria.actions if criteria else None) or [])
        self._facts = list((criteria.communicate_info if criteria else None) or [])
        self._without = frozenset(task.payload.get("without", ()))
        self._bills, self._ids = bill_ids(self._world), itertools.count()
        history = list((self._task.initial_state.message_history if self._task.initial_state else None) or [])
        self._messages: list[OfficialMessage] = history or [AssistantMessage(role="assistant", content=GREETING)]
        # Of the agent alone, which its score tells; and of both, which end the episode.
        self._errors, self._failed = 0, 0
        self._done, self._ended = False, False
        self._customer = self._make_customer(self._task, self._domain)
        return self._user_turn()

    def _running(self) -> Task:
        if self._task is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        return self._task

    def step(self, action: Action) -> Observation:
        """Calls are carried out and answered in order; a message without calls goes to the customer."""
        self._running()
        if self._done:
            return Observation((), done=True)
        if action.malformed or not (action.tool_calls or action.content.strip()):
            # Upstream has no answer to such a turn: its simulation breaks off with reward 0 at the first one.
            self._errors, self._failed = self._errors + 1, self._failed + 1
            self._done = self._failed >= MAX_ERRORS
            problem = (
                "cannot read this tool call"
                if action.malformed
                else "the turn is empty; call a tool or write to the user"
            )
            return Observation((error_result(f"Error: {problem}"),), self._done)
        if action.tool_calls:
            return self._agent_calls(action)
        self._messages.append(AssistantMessage(role="assistant", content=action.content))
        self._customer.hear(action.content)
        return self._user_turn()

    def _agent_calls(self, action: Action) -> Observation:
        calls = [
            OfficialCall(
                id=f"call_{next(self._ids)}", name=call.name, arguments=json.loads(json.dumps(dict(call.arguments)))
            )
            for call in action.tool_calls
        ]
        self._messages.append(AssistantMessage(role="assistant", content=action.content or None, tool_calls=calls))
        results = []
        for asked, call in zip(action.tool_calls, calls, strict=True):
            text, failed = self._carry_out(call)
            self._errors += failed
            if call.name == "transfer_to_human_agents" and not failed:
                self._customer.transferred()
            results.append(Message("tool", text, tool_call_id=asked.id, name=asked.name))
        self._done = self._failed >= MAX_ERRORS
        return Observation(tuple(results), self._done)

    def _carry_out(self, call: OfficialCall) -> tuple[str, bool]:
        """Run a call in the world, which turns every failure into an error message, and record the result."""
        answer = self._world.get_response(call)
        name_new_bills(self._world, self._bills)
        self._messages.append(answer)
        self._failed += bool(answer.error)
        return answer.content or "", bool(answer.error)

    def _user_turn(self) -> Observation:
        """The customer acts until it speaks; its tool calls change the world and are invisible to the agent."""
        for _ in range(MAX_USER_CALLS):
            text, calls = self._customer.next()
            if not calls:
                self._messages.append(UserMessage(role="user", content=text))
                self._ended = any(mark in text for mark in (STOP, TRANSFER, OUT_OF_SCOPE))
                self._done = self._ended
                return Observation((Message("user", text),), self._done)
            made = [
                OfficialCall(
                    id=f"call_{next(self._ids)}", name=call.name, arguments=dict(call.arguments), requestor="user"
                )
                for call in calls
            ]
            self._messages.append(UserMessage(role="user", content=text or None, tool_calls=made))
            for call, official in zip(calls, made, strict=True):
                self._customer.see(call, self._carry_out(official)[0])
            if self._failed >= MAX_ERRORS:
                self._done = True
                return Observation((Message("user", ""),), True)  # it had no word left, and a prompt needs one
        raise EnvironmentFault(
            f"the simulated user called tools {MAX_USER_CALLS} times without a word; use another model"
        )

    def score(self) -> Score:
        """Equal to tau2's reward, from the changed records (see environments.targets.tau2.scoring)."""
        return score(self._played(), self._errors)

    def official_reward(self) -> float:
        """The reward of tau2's own evaluator for this episode; slow."""
        return official_reward(self._played())

    def _played(self) -> Played:
        return Played(self._domain, self._running(), self._world, self._messages, self._ended)

    def oracle(self) -> Action | None:
        """The first reference action that was not carried out yet; then the facts to tell, until the customer leaves.

        An action of the user's is asked for in words, by its tool's name.
        """
        self._running()
        if self._done:
            return None
        made = Counter(
            _key(message.role, call.name, call.arguments)
            for message in self._messages
            for call in getattr(message, "tool_calls", None) or ()
        )
        for index, action in enumerate(self._gold):
            if index in self._without:
                continue
            key = _key(action.requestor, action.name, action.arguments)
            if made[key] > 0:
                made[key] -= 1
            elif action.requestor == "assistant":
                return Action(tool_calls=(ToolCall(action.name, action.arguments, f"call_{next(self._ids)}"),))
            else:
                return Action(content=_ask(action))
        return Action(content=" ".join(["That is all done.", *self._facts]))

    def close(self) -> None:
        """Forget the episode."""
        self._task = None

    def reference(self) -> list[tuple[str, bool]]:
        """The reference actions of the running task: tool, and whether it writes. For spoiled replays."""
        self._running()
        writes = {"assistant": self._domain.writes, "user": self._domain.user_writes}
        return [(action.name, action.name in writes[action.requestor]) for action in self._gold]


def _key(requestor: str, name: str, arguments: Any) -> tuple[str, str, str]:
    return requestor, name, json.dumps(arguments, sort_keys=True, default=str)


def _ask(action: GoldAction) -> str:
    arguments = ", ".join(f"{key}={value}" for key, value in action.arguments.items())
    return (
        f"On your phone, please use {action.name}"
        + (f" with {arguments}" if arguments else "")
        + " and tell me the result."
    )


class Tau2Target:
    """A domain of tau2-bench. `user` names who plays the customer and is part of `data_hash`; `user_model` plays a
    customer called `litellm:MODEL`."""

    licence = LICENCE

    def __init__(self, domain: str, user: str | None = None, user_model: UserModel | None = None) -> None:
        self.user = user_name(user)
        self._user_model = player_of(self.user, user_model)
        self._data = load_data(domain, self.user)
        self.name, self.data_hash = f"tau2:{domain}", self._data.data_hash

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The tasks of a split: diagnosis and validation are parts of tau2's train split, test is its test split."""
        return of_split(self._data.tasks, split)

    def environment(self) -> Tau2Environment:
        return Tau2Environment(self._data, lambda task, domain: build_customer(self._user_model, task, domain))
