"""ToolSandbox as an environment of the contract.

Reward is ToolSandbox's similarity. `Score.metrics` has `similarity`, `perfect` (similarity 1) and `minefield`. Success
is a rule of this adapter, because ToolSandbox has none and "perfect" asks for a sentence word by word:
no minefield matched, every milestone about state or calls fully reached, and every milestone about what the agent says
reached with a similarity of at least 0.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from environments.contract import Action, Check, Message, Observation, Score, TargetTask, ToolCall
from environments.targets.third_party.adapter import (
    TOOL_ERRORS,
    capability,
    error_result,
    of_split,
    player_of,
    seed_of,
    user_name,
)
from environments.targets.third_party.simulated_user import FactTeller, UserModel, in_first_person
from environments.targets.toolsandbox.data import (
    LICENCE,
    VARIANTS,
    base_names,
    base_of,
    data_hash,
    has_key,
    import_package,
    needs_network,
    scenarios,
    splits,
)
from errors import EnvironmentFault, TargetError

import_package()

from environments.targets.toolsandbox.episode import Episode  # noqa: E402 - imports tool_sandbox
from environments.targets.toolsandbox.oracle import actions, constraints, is_spoken, measure_name, order  # noqa: E402

SPOKEN_THRESHOLD = 0.5
PERFECT = 1.0 - 1e-6
# A scenario has room for 30 messages, the user's and the tools' included.
MAX_STEPS = 30
# ToolSandbox runs n parallel calls in all n! orders; more than this are carried out one after another.
MAX_PARALLEL = 3
NOTHING_TO_DO = "I'm sorry, I cannot do that with what I have."
_TASK_MARK = "given the following task you (User A) want User B to complete:"
# The instruction tells the user what the answer is, so that it can recognise it.
_ANSWER = re.compile(r"(?:It should|Christmas Day is)\b.*?Do not leak this information\.")
_OTHER = (
    (r"After User B did so, ask User B to", "After that, please"),
    (r"Ask User B (?:to )?", "Please "),
    (r"User B", "you"),
)


def scripted_facts(instruction: str) -> list[str]:
    """What the scripted user tells: the task at the end of ToolSandbox's instruction, in the first person, without the
    answer, which the instruction holds but forbids to leak."""
    task = _ANSWER.sub("", instruction.partition(_TASK_MARK)[2] or instruction)
    if "leak" in task:
        task = task.partition(".")[0] + "."
    task = re.sub(r"(?<!your )\(User A's\)", "your", task)
    task = re.sub(r" ?\(User A(?:'s)?\)", "", task)
    task = in_first_person(" ".join(task.split())).replace("asked I ", "asked me ")
    for pattern, words in _OTHER:
        task = re.sub(pattern, words, task)
    return [task]


class ToolSandboxEnvironment:
    """One episode at a time. `tools` and `instructions` are those of the scenario, valid after `reset`."""

    examples: Sequence[Message] = ()
    max_steps = MAX_STEPS

    def __init__(self, complete: UserModel | None = None) -> None:
        """`complete` plays the user; None is the scripted one."""
        self._complete = complete
        self.tools: Sequence[Any] = ()
        self.instructions = ""
        self._episode: Episode | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Payload: `name`, and optionally `without`, milestones that `oracle` does not work for."""
        name = str(task.payload["name"])
        found = scenarios()
        if name not in found:
            raise TargetError(f"ToolSandbox has no scenario {name!r}")
        self._episode = episode = Episode(found[name])
        self.tools = episode.tools
        view = episode.agent_view()
        self.instructions = "\n".join(text for role, text in view if role == "system")
        told = [item["content"] for item in episode.user_view() if item["role"] == "system"]
        self._facts = FactTeller(scripted_facts(told[-1]) if told else [])
        matcher = episode.scenario.evaluation.milestone_matcher
        without = frozenset(task.payload.get("without", ()))
        self._milestones = matcher.milestones
        self._plan = [index for index in order(matcher) if index not in without]
        self._pending: list[Action] = []
        self._offered: Action | None = None
        self._traces: dict[int, tuple[str, ...]] = {}
        self._working, self._calls, self._errors, self._done = -1, 0, 0, False
        self._said_nothing = True
        return Observation(tuple(Message("user", text) for role, text in view if role == "user"))

    def _running(self) -> Episode:
        if self._episode is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        return self._episode

    def step(self, action: Action) -> Observation:
        """Calls are run by ToolSandbox; a message goes to the user, who answers or ends the conversation."""
        episode = self._running()
        if self._done:
            return Observation((), done=True)
        if action.malformed or not (action.tool_calls or action.content.strip()):
            self._errors += 1
            problem = "cannot read this tool call" if action.malformed else "the turn is empty; call a tool or answer"
            return Observation((error_result(f"Error: {problem}"),))
        planned = action is self._offered or action == self._offered
        self._offered = None
        if action.tool_calls:
            messages, traces = self._carry_out(episode, action.tool_calls)
        else:
            episode.say(action.content)
            messages, traces = self._user_turn(episode, action.content), ()
        if planned:
            self._pending.pop(0)
            self._traces[self._working] = self._traces.get(self._working, ()) + traces
        self._done = episode.done
        return Observation(messages, self._done)

    def _carry_out(self, episode: Episode, calls: Sequence[ToolCall]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
        self._calls += len(calls)
        groups = [calls] if len(calls) <= MAX_PARALLEL else [[call] for call in calls]
        messages: list[Message] = []
        traces: list[str] = []
        for group in groups:
            try:
                answers = episode.call(group)
            except TOOL_ERRORS as error:
                # Nesting too deep for the interpreter, for example: the agent's fault, so it is told.
                answers = [(f"{type(error).__name__}: {error}", True, ()) for _ in group]
            for call, (text, failed, trace) in zip(group, answers, strict=True):
                self._errors += failed
                messages.append(error_result(text, call))
                traces.extend(trace)
        return tuple(messages), tuple(traces)

    def _user_turn(self, episode: Episode, heard: str) -> tuple[Message, ...]:
        if episode.done:
            return ()
        if self._complete is None:
            reply = self._facts.reply(heard)
        else:
            text, calls = self._complete(episode.user_view(), episode.user_tools())
            reply = None if calls else text
        episode.hear(reply)
        return () if reply is None else (Message("user", reply),)

    def oracle(self) -> Action | None:
        """What the next milestone needs (see oracle.py); then a short message until the user leaves."""
        episode = self._running()
        if self._done:
            return None
        while not self._pending:
            if not self._plan:
                self._said_nothing, nothing = False, self._said_nothing
                return Action(content=NOTHING_TO_DO if nothing else "That is all.")
            self._working = self._plan.pop(0)
            self._pending = actions(self._milestones, self._working, self._traces, episode.context)
        action = self._pending[0]
        if action.tool_calls:
            call = action.tool_calls[0]
            name, number = episode.agent_name(call.name), f"call_{self._calls}"
            action = Action(tool_calls=(ToolCall(name, json.loads(json.dumps(dict(call.arguments))), number),))
        else:
            self._said_nothing = False
        self._offered = action
        return action

    def score(self) -> Score:
        """ToolSandbox's evaluation, and one check per milestone and minefield."""
        episode = self._running()
        result = episode.evaluate()
        reached = {index: similarity for index, (_, similarity) in result.milestone_mapping.items()}
        checks = [self._milestone_check(index, reached.get(index, 0.0)) for index in range(len(self._milestones))]
        if episode.scenario.evaluation.minefield_matcher.milestones:
            clear = result.minefield_similarity == 0
            checks.append(Check("minefield", "refrain_without_needed_information", True, clear))
        checks.append(
            Check("valid_calls", "give_valid_arguments", self._calls > 0, self._errors == 0, f"{self._errors} failed")
        )
        checks.append(Check("ended", "finish_the_conversation", True, episode.ended))
        similarity = float(result.similarity)
        success = result.minefield_similarity == 0 and all(
            check.passed for check in checks if check.name.startswith("milestone")
        )
        metrics = {
            "similarity": similarity,
            "perfect": float(similarity >= PERFECT),
            "minefield": float(result.minefield_similarity),
        }
        return Score(min(1.0, max(0.0, similarity)), success, tuple(checks), metrics)

    def _milestone_check(self, index: int, similarity: float) -> Check:
        milestone = self._milestones[index]
        spoken = is_spoken(milestone)
        passed = similarity >= (SPOKEN_THRESHOLD if spoken else PERFECT)
        detail = f"similarity {similarity:.3f}"
        return Check(
            f"milestone:{index}", "report_result_to_user" if spoken else _kind(milestone), True, passed, detail
        )

    def close(self) -> None:
        """Forget the episode."""
        self._episode = None


def _kind(milestone: Any) -> str:
    """The capability of a milestone about a call or a table."""
    first = constraints(milestone)[0]
    columns = list(first.target_dataframe.columns)
    if "tool_trace" in columns:
        trace = json.loads(first.target_dataframe["tool_trace"][0])
        return capability("call", (trace[0] if isinstance(trace, list) else trace)["tool_name"])
    table = str(first.database_namespace).lower()
    if table == "setting":
        return capability("change", columns[0], "setting")
    verb = {"addition_similarity": "add", "removal_similarity": "remove"}.get(measure_name(first), "update")
    return capability(verb, table, "record")


class ToolSandboxTarget:
    """The base scenarios, or all augmented ones too. Without a key the 28 (224) that need the network are left out and
    counted in `skipped`. `user_model` plays a user called `litellm:MODEL`."""

    licence = LICENCE

    def __init__(self, variant: str = "base", user: str | None = None, user_model: UserModel | None = None) -> None:
        if variant not in VARIANTS:
            raise TargetError(f"ToolSandbox variant {variant!r} does not exist; the variants are {', '.join(VARIANTS)}")
        self.user = user_name(user)
        self._user_model = player_of(self.user, user_model)
        self.name = "toolsandbox" if variant == "base" else f"toolsandbox:{variant}"
        self.data_hash = data_hash(variant, self.user)
        found = scenarios()
        bases, where = frozenset(base_names(found)), splits(found)
        listed = [name for name in found if variant == "augmented" or name in bases]
        origin = {name: base_of(name, bases) for name in listed}
        playable = [name for name in listed if has_key() or not needs_network(found[origin[name]])]
        self.skipped = len(listed) - len(playable)
        self._tasks = [self._task(found[name], name, where[origin[name]]) for name in playable]

    @staticmethod
    def _task(scenario: Any, name: str, split: str) -> TargetTask:
        milestones = scenario.evaluation.milestone_matcher.milestones
        kinds = [_kind(item) for item in milestones if not is_spoken(item)]
        family = "+".join(sorted(str(item).lower() for item in scenario.categories[:2])) or "none"
        return TargetTask(name, split, family, seed_of(name), {"name": name}, tuple(dict.fromkeys(kinds)))

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The scenarios of a split: a fixed hash of the base scenario, 40 / 20 / 40 % of all 129."""
        return of_split(self._tasks, split)

    def environment(self) -> ToolSandboxEnvironment:
        """A new environment with the target's user."""
        return ToolSandboxEnvironment(self._user_model)
