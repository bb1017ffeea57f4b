"""BFCL v4's multi-turn categories as targets, from the package bfcl-eval.

An episode is a list of user turns. In each the agent calls functions of simulated services (files, trading, travel ...)
until it answers without a call, which brings the next turn. After every turn the services' state must equal that of the
reference, and the reference's results must be among those that the agent got: BFCL's own checkers say so.

BFCL runs calls by building Python source and `eval`. Here an agent's call never becomes source: the method is looked up
by name among the offered functions and called with the parsed arguments. The verdicts are the same (see the tests),
except that BFCL also rewrites `name(` inside string arguments when a function is called like that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from environments.contract import (
    Action,
    Check,
    Message,
    Observation,
    Score,
    TargetTask,
    ToolCall,
)
from environments.targets.bfcl.entries import CATEGORIES, INSTRUCTIONS, Category, load_category
from environments.targets.bfcl.package import INSTALL, LICENCE, bfcl_folder, read_lines
from environments.targets.bfcl.services import Services, parse_call
from environments.targets.third_party.adapter import (
    TargetInfo,
    capability,
    error_result,
    of_split,
    seed_of,
    split_counts,
)
from errors import EnvironmentFault, TargetError

# BFCL ends an entry as failed when a turn takes more than 20 steps.
TURN_STEPS = 20
# The longest entries have 8 turns.
MAX_STEPS = 8 * TURN_STEPS
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}


@lru_cache(maxsize=16)
def _docs(service: str) -> tuple[dict[str, Any], ...]:
    """A service's functions as OpenAI schemas."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    listed = read_lines(bfcl_folder() / "data" / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[service])
    return tuple(
        {
            "type": "function",
            "function": {
                "name": doc["name"],
                "description": doc["description"],
                "parameters": _schema(doc["parameters"]),
            },
        }
        for doc in listed
    )


def _schema(node: Any) -> Any:
    """BFCL's type names as those of JSON Schema."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _TYPES.get(v, v) if key == "type" and isinstance(v, str) else _schema(v) for key, v in node.items()}


@dataclass
class Turn:
    """What happened in one turn, and what BFCL's checkers said at its end."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    steps: int = 0
    closed: bool = False
    missing_results: int = 0
    wrong_services: tuple[str, ...] = ()


class BfclEnvironment:
    """One entry at a time. `tools` may grow within an episode of `miss_func`: the turn that offers a function again
    says so in words with its schema, and `tools` holds it from then on."""

    examples: Sequence[Message] = ()
    max_steps = MAX_STEPS
    instructions = INSTRUCTIONS

    def __init__(self, category: Category) -> None:
        self._category = category
        self.tools: Sequence[dict[str, Any]] = ()
        self._entry: dict[str, Any] | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Payload: `id`, and optionally `without`, pairs `[turn, call]` of reference calls that `oracle` leaves out."""
        key = str(task.payload["id"])
        if key not in self._category.entries:
            raise TargetError(f"bfcl:{self._category.name} has no task {key!r}")
        self._entry = self._category.entries[key]
        long_context = self._category.name == "long_context"
        self._mine, self._theirs = Services(self._entry, long_context), Services(self._entry, long_context)
        self._gold = [[parse_call(text) for text in turn] for turn in self._category.gold[key]]
        self._without = {tuple(pair) for pair in task.payload.get("without", ())}
        self._held = {int(turn): names for turn, names in self._entry.get("missed_function", {}).items()}
        everything = [doc for service in self._entry["involved_classes"] for doc in _docs(service)]
        held = {name for names in self._held.values() for name in names}
        self._everything = {doc["function"]["name"]: doc for doc in everything}
        # An entry's `excluded_function` is left alone: BFCL's own code does not read it either.
        self.tools = tuple(doc for doc in everything if doc["function"]["name"] not in held)
        self._turns: list[Turn] = [Turn()]
        self._results: list[str] = []
        self._errors, self._done, self._forced = 0, False, False
        return Observation(self._turn_messages(0))

    def _turn_messages(self, index: int) -> tuple[Message, ...]:
        """The user's words of a turn; where it offers held-back functions, those with their schemas."""
        if self._entry is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        said = tuple(Message("user", item["content"]) for item in self._entry["question"][index])
        if index not in self._held:
            return said
        docs = [self._everything[name] for name in self._held[index]]
        self.tools = (*self.tools, *docs)
        listed = "\n".join(json.dumps(doc["function"], ensure_ascii=False) for doc in docs)
        return (*said, Message("user", f"There are more functions now. Please try again with them.\n{listed}"))

    def step(self, action: Action) -> Observation:
        """Calls belong to the present turn; a message without a call ends it."""
        if self._entry is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        if self._done:
            return Observation((), done=True)
        turn = self._turns[-1]
        turn.steps += 1
        if turn.steps > TURN_STEPS:
            self._forced = self._done = True
            return Observation((), done=True)
        if action.malformed or not (action.tool_calls or action.content.strip()):
            self._errors += 1
            problem = "cannot read this call" if action.malformed else "the turn is empty; call a function or answer"
            return Observation((error_result(f"Error: {problem}"),))
        if action.tool_calls:
            return Observation(tuple(self._carry_out(call) for call in action.tool_calls))
        self._close_turn()
        if len(self._turns) == len(self._gold):
            self._done = True
            return Observation((), done=True)
        self._turns.append(Turn())
        return Observation(self._turn_messages(len(self._turns) - 1))

    def _carry_out(self, call: ToolCall) -> Message:
        arguments = json.loads(json.dumps(dict(call.arguments)))
        # As in BFCL, a function that is held back works if called anyway: one reference (miss_func_49) does.
        if call.name in self._everything:
            text, failed = self._mine.call(call.name, arguments)
        else:
            text, failed = f"Error during execution: name {call.name!r} is not defined", True
        self._turns[-1].calls.append((call.name, arguments))
        self._results.append(text)
        self._errors += failed
        return error_result(text, call)

    def _close_turn(self) -> None:
        """Play the reference's turn on its own services and compare, as BFCL does after each turn."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        index, turn = len(self._turns) - 1, self._turns[-1]
        results = [self._theirs.call(name, named, positional)[0] for name, positional, named in self._gold[index]]
        turn.closed = True
        if not results:
            return  # BFCL compares nothing after a turn in which nothing should be done
        pairs = [
            (name, {name: self._mine.instances[name]}, {name: theirs})
            for name, theirs in self._theirs.instances.items()
        ]
        turn.wrong_services = tuple(name for name, mine, theirs in pairs if not state_checker(mine, theirs)["valid"])
        verdict = response_checker(self._results, results, index)
        turn.missing_results = 0 if verdict["valid"] else len(verdict["details"]["missing_items"])

    def score(self) -> Score:
        """Success when every turn is valid in BFCL's sense. Reward is 0 or 1."""
        if self._entry is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        checks = [check for index in range(len(self._gold)) for check in self._turn_checks(index)]
        valid = [self._valid(index) for index in range(len(self._gold))]
        made_any = any(turn.calls for turn in self._turns) or self._errors > 0
        checks.append(
            Check("valid_calls", "give_valid_arguments", made_any, self._errors == 0, f"{self._errors} failed")
        )
        checks.append(Check("step_limit", "finish_each_turn", True, not self._forced and self._done))
        success = self._done and not self._forced and all(valid)
        return Score(float(success), success, tuple(checks), {"valid_turns": sum(valid) / len(valid)})

    def _valid(self, index: int) -> bool:
        turn = self._turns[index] if index < len(self._turns) else Turn()
        if not self._gold[index]:
            return turn.closed
        return turn.closed and bool(turn.calls) and not turn.wrong_services and not turn.missing_results

    def _turn_checks(self, index: int) -> list[Check]:
        """Verdicts of one turn: its calls, each service's state, the results; or that nothing should be called."""
        turn = self._turns[index] if index < len(self._turns) else Turn()
        if not self._gold[index]:
            kinds = {"miss_func": "notice_missing_function", "miss_param": "ask_missing_parameter"}
            kind = kinds.get(self._category.name, "refrain_from_calling")
            # Not part of BFCL's verdict: calls made here only matter through the state that they leave.
            return [Check(f"turn{index}:no_call", kind, True, turn.closed and not turn.calls)]
        made = [call for earlier in self._turns[: index + 1] for call in earlier.calls]
        checks = []
        for number, (name, positional, named) in enumerate(self._gold[index]):
            wanted = (name, self._theirs.named(name, positional, named))
            checks.append(
                Check(f"turn{index}:call{number}", capability("call", name), True, wanted in made, str(wanted[1]))
            )
        for service in self._theirs.instances:
            kind = capability("reach", _snake(service), "state")
            passed = turn.closed and service not in turn.wrong_services
            checks.append(Check(f"turn{index}:state:{service}", kind, True, passed))
        passed = turn.closed and bool(turn.calls) and not turn.missing_results
        checks.append(Check(f"turn{index}:results", "obtain_requested_results", True, passed))
        return checks

    def oracle(self) -> Action | None:
        """The present turn's next reference call (all of them when they are too many for one a step); when all were
        made, the sentence that ends the turn."""
        if self._entry is None or self._done:
            return None
        index = len(self._turns) - 1
        wanted = [
            (name, self._theirs.named(name, positional, named))
            for number, (name, positional, named) in enumerate(self._gold[index])
            if (index, number) not in self._without
        ]
        made = list(self._turns[-1].calls)
        pending: list[ToolCall] = []
        for name, arguments in wanted:
            if (name, arguments) in made:
                made.remove((name, arguments))
            else:
                pending.append(ToolCall(name, arguments, f"call_{index}_{len(self._results) + len(pending)}"))
        if pending:
            # Two references need more calls in a turn than it has steps, so they go out together.
            return Action(tool_calls=tuple(pending if len(pending) >= TURN_STEPS else pending[:1]))
        return Action(content="That is done." if self._gold[index] else "I cannot do that with what I have.")

    def close(self) -> None:
        """Forget the episode."""
        self._entry = None


def _snake(name: str) -> str:
    return "".join(
        "_" + letter.lower() if letter.isupper() and i and not name[i - 1].isupper() else letter.lower()
        for i, letter in enumerate(name)
    )


class BfclTarget:
    """One multi-turn category of BFCL v4: 200 entries, a fixed hash split of about 40 / 20 / 40 %."""

    licence = LICENCE
    user = "none"

    def __init__(self, category: str) -> None:
        self._category = load_category(category)
        self.name, self.data_hash = f"bfcl:{category}", self._category.data_hash
        self._tasks = [self._task(key) for key in self._category.entries]

    def _task(self, key: str) -> TargetTask:
        names = dict.fromkeys(parse_call(text)[0] for turn in self._category.gold[key] for text in turn)
        services = "+".join(sorted(self._category.entries[key]["involved_classes"]))
        kinds = tuple(dict.fromkeys(capability("call", name) for name in names))
        return TargetTask(key, self._category.splits[key], services, seed_of(key), {"id": key}, kinds)

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The entries of a split."""
        return of_split(self._tasks, split)

    def environment(self) -> BfclEnvironment:
        return BfclEnvironment(self._category)


def describe() -> list[TargetInfo]:
    """The four categories, whether the package is there or not; imports nothing of it."""
    lines = []
    for name in CATEGORIES:
        target = f"bfcl:{name}"
        try:
            category = load_category(name)
        except TargetError as error:
            lines.append(TargetInfo(target, LICENCE, missing=str(error), how_to_get=INSTALL))
        else:
            tasks = [TargetTask(key, split, "", 0) for key, split in category.splits.items()]
            lines.append(TargetInfo(target, LICENCE, split_counts(tasks), category.data_hash, "none"))
    return lines
