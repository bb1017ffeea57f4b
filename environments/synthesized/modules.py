"""A generated module as an environment: its functions run in the sandbox, everything that decides stays outside.

The module is stateless: every call of it gets the state and gives the next one, and this side keeps state, log and
goal. So one worker serves many episodes at once, a killed worker loses the one whose call it was killed for, and an
episode is a function of its seed and the actions. The contract of a module is in docs/5-synthesis.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import Action, Message, Observation, Score, TargetTask, ToolCall, canonical_json
from environments.sandbox.pool import WorkerPool
from environments.sandbox.workers import DEFAULT_LIMITS, ModuleError, SandboxLevel, SandboxLimits
from environments.scores import rounded
from environments.synthesized.goals import goal_faults, judge_goal, plain_json
from environments.validation.levels import LEAST, LEVELS_HELP, MOST
from errors import EnvironmentFault, SandboxError, TargetError

SPLIT = "synthesized"
MAX_CALLS_PER_TURN = 16
# Characters of a call's arguments, as JSON. A tool that keeps what it is told and answers with it stays far below what
# an answer may have (`goals.MAX_CHARACTERS`), whatever it is told.
MAX_ARGUMENTS = 10_000
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list, tuple),
    "object": (Mapping,), "null": (type(None),),
}  # fmt: skip


class SandboxedModule:
    """One generated module, loaded in a worker of its own. Raises `SandboxError` when it does not load or its
    constants are not as the contract says. Close it when done."""

    def __init__(self, source: str, level: SandboxLevel | None = None, limits: SandboxLimits = DEFAULT_LIMITS) -> None:
        self.source = source
        self.code_hash = hashlib.sha256(source.encode()).hexdigest()
        self._pool = WorkerPool(source, level, limits)
        self.level = self._pool.level
        try:
            self._read_constants()
        except BaseException:  # whatever it was: nobody else can end the worker
            self.close()
            raise

    @property
    def isolated(self) -> bool:
        """False when the user asked for the level without namespaces."""
        return self.level.isolated

    @property
    def restarts(self) -> int:
        """How often the worker had to be replaced."""
        return self._pool.restarts

    @property
    def used(self) -> float:
        """Seconds of processor time that its code has taken in all workers."""
        return self._pool.used

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the module, with its answer checked to be bounded plain JSON. Raises `SandboxError`, and
        `ModuleError` where it is the module's doing."""
        answer = self._pool.call(function, arguments)
        try:
            return plain_json(answer, f"what {function} gave")
        except ValueError as error:
            raise ModuleError(str(error)) from error

    def scenario(self, seed: int, level: int = 0) -> TargetTask:
        """The scenario of a seed at a level (0: the easiest) as a task; its payload is enough to play it."""
        if not 0 <= level < self.levels:
            raise TargetError(f"{self.capability} has no level {level}; choose 0 to {self.levels - 1}")
        scenario = self.call("scenario", seed, level) if self.dialled else self.call("scenario", seed)
        faults = self._scenario_faults(scenario)
        if faults:
            raise SandboxError(f"scenario({seed}, {level}): " + "; ".join(faults[:3]))
        payload = {"code_hash": self.code_hash, "scenario": scenario}
        task_id = f"{self.capability}-{self.code_hash[:8]}-{seed}" + (f"-level{level}" if level else "")
        return TargetTask(task_id, SPLIT, self.capability, seed, payload, (self.capability,))

    def environment(self) -> SandboxedEnvironment:
        """An environment that plays this module's scenarios; any number may be in use at once."""
        return SandboxedEnvironment(self)

    def close(self) -> None:
        """End the worker."""
        self._pool.close()

    def _read_constants(self) -> None:
        self.names = frozenset(self._pool.names())
        self.capability = self._constant("CAPABILITY", str)
        self.transfer = self._constant("TRANSFER", str)
        self.instructions = self._constant("INSTRUCTIONS", str)
        self.max_steps = self._constant("MAX_STEPS", int)
        self.tools: tuple[dict[str, Any], ...] = tuple(self._constant("TOOLS", list))
        self.wrong = tuple(self._constant("WRONG", list))
        # Modules that were accepted before steps were named have none; the checks ask for it, playing does not.
        self.step: Mapping[str, str] = self._constant("STEP", dict) if "STEP" in self.names else {}
        # Nor have those that were accepted before there were levels: they have one.
        self.dialled = "LEVELS" in self.names
        self.levels: int = self._constant("LEVELS", int) if self.dialled else 1
        if self.dialled and not LEAST <= self.levels <= MOST:
            raise SandboxError(f"LEVELS is {self.levels}: {LEVELS_HELP}")
        if not 1 <= self.max_steps <= 30:
            raise SandboxError(f"MAX_STEPS is {self.max_steps}; it must be 1 to 30")
        if not all(isinstance(name, str) for name in self.wrong):
            raise SandboxError("WRONG must be a dictionary of names and functions")
        if len(self.wrong) < 3:
            raise SandboxError(f"WRONG has {len(self.wrong)} policies; at least three are needed")
        if len(self.transfer.split()) < 8:
            raise SandboxError("TRANSFER does not say why practising here carries over to the target (8 words or more)")
        self.tool_schemas = {}
        for tool in self.tools:
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise SandboxError("TOOLS must be OpenAI function schemas: {'type': 'function', 'function': {...}}")
            schema = function.get("parameters", {})
            properties = schema.get("properties", {}) if isinstance(schema, dict) else None
            if not isinstance(properties, dict) or not all(isinstance(p, dict) for p in properties.values()):
                raise SandboxError(f"the parameters of the tool {function['name']!r} are no JSON schema of an object")
            self.tool_schemas[function["name"]] = schema
        examples = self._constant("EXAMPLES", list) if "EXAMPLES" in self.names else []
        self.examples = tuple(_message(part) for part in examples)

    def _constant(self, name: str, kind: type) -> Any:
        value = self.call(f"={name}")
        # A target may have no tools; every other constant has to hold something.
        empty = not value and name != "TOOLS"
        if not isinstance(value, kind) or isinstance(value, bool) or empty:
            raise SandboxError(f"{name} must be a non-empty {kind.__name__}; it is {str(value)[:80]!r}")
        return value

    def _scenario_faults(self, scenario: Any) -> list[str]:
        if not isinstance(scenario, dict):
            return [f"it is {type(scenario).__name__}, not an object"]
        faults = [f"{key} is missing" for key in ("request", "state", "goal") if key not in scenario]
        if not faults and not (isinstance(scenario["request"], str) and scenario["request"].strip()):
            faults.append("request is no text")
        return faults or goal_faults(scenario["goal"], list(self.tool_schemas))


class SandboxedEnvironment:
    """An environment of the contract over a generated module. Many may share one module."""

    def __init__(self, module: SandboxedModule) -> None:
        self.module = module
        self.tools: Sequence[Mapping[str, Any]] = module.tools
        self.instructions = module.instructions
        self.examples: Sequence[Message] = module.examples
        self.max_steps = module.max_steps
        self._scenario: dict[str, Any] | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Start the scenario of `task`. Raises `TargetError` when the task is of another version of the module."""
        if task.payload.get("code_hash") != self.module.code_hash:
            raise TargetError(
                f"task {task.id} belongs to another version of the environment than {self.module.code_hash[:8]}"
            )
        self._scenario = dict(task.payload["scenario"])
        self._state = self._scenario["state"]
        self._log: list[dict[str, Any]] = []
        self._over = False
        return Observation((Message("user", self._scenario["request"]),))

    def step(self, action: Action) -> Observation:
        """Tool calls are checked against their schemas here and run in the sandbox; a message goes to the module's
        `reply`, or ends the episode where there is none. Raises `ModuleError` for the module's faults."""
        self._started()
        if self._over:
            return Observation((), True)
        if action.tool_calls:
            answers = [self._call_tool(call) for call in action.tool_calls[:MAX_CALLS_PER_TURN]]
            # Every call has an answer: the protocol of the next request asks for it.
            fault = f"a turn may hold {MAX_CALLS_PER_TURN} calls; this one was not made"
            answers += [_refusal(call, fault) for call in action.tool_calls[MAX_CALLS_PER_TURN:]]
            return Observation(tuple(answers), self._over)
        if action.malformed:
            return Observation((Message("tool", _error("the call could not be parsed: write one JSON object")),))
        return self._say(action.content)

    def score(self) -> Score:
        """Success is judged from the goal, outside; the module's own reward shapes what lies below it."""
        scenario = self._started()
        reward = self.module.call("reward", scenario, self._state, self._log)
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not 0 <= rounded(reward) <= 1:
            raise ModuleError(f"reward gave {str(reward)[:80]!r}, not a number in [0, 1]")
        checks = judge_goal(scenario["goal"], self._state, self._log, self.module.capability)
        return Score(float(rounded(reward)), all(check.passed for check in checks), checks)

    def oracle(self) -> Action | None:
        """The module's reference solution in the present state."""
        return self.suggested("oracle")

    def suggested(self, function: str) -> Action | None:
        """What `oracle` or one of the wrong policies (`WRONG.name`) would do now."""
        scenario = self._started()
        return _action(self.module.call(function, scenario, self._state, self._log), function, len(self._log))

    def close(self) -> None:
        """There is nothing to free: the caller that opened the module closes it."""
        self._scenario = None

    def _started(self) -> dict[str, Any]:
        if self._scenario is None:
            raise EnvironmentFault("the environment is asked to act before reset, or after close")
        return self._scenario

    def _call_tool(self, call: ToolCall) -> Message:
        fault = self._call_fault(call)
        if fault:
            self._log.append({"name": str(call.name)[:80].encode("ascii", "replace").decode(), "error": fault})
            return _refusal(call, fault)
        request = {"name": call.name, "arguments": dict(call.arguments)}
        answer = self.module.call("transition", self._state, request)
        if not isinstance(answer, dict) or "state" not in answer or "result" not in answer:
            raise ModuleError('transition must give {"state", "result"}')
        self._state = answer["state"]
        self._over = self._over or answer.get("done") is True
        result = answer["result"] if isinstance(answer["result"], str) else canonical_json(answer["result"])
        self._log.append({**request, "result": answer["result"]})
        return Message("tool", result, tool_call_id=call.id, name=call.name)

    def _call_fault(self, call: ToolCall) -> str:
        if self._over:
            return "the conversation is over"
        schema = self.module.tool_schemas.get(call.name)
        if schema is None:
            return f"unknown tool {str(call.name)[:80]!r}; known: {', '.join(self.module.tool_schemas)}"
        if not isinstance(call.arguments, Mapping):
            return "arguments must be a JSON object"
        try:
            plain_json(call.arguments, "arguments")
        except ValueError as error:
            return str(error)
        length = len(canonical_json(dict(call.arguments)))
        if length > MAX_ARGUMENTS:
            return f"the arguments have {length} characters, more than {MAX_ARGUMENTS}"
        return argument_fault(schema, call.arguments)

    def _say(self, text: str) -> Observation:
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        self._log.append({"say": text[:20_000]})
        if "reply" not in self.module.names:
            self._over = True
            return Observation((), True)
        answer = self.module.call("reply", self._state, text[:20_000])
        if not isinstance(answer, dict) or "state" not in answer or "message" not in answer:
            raise ModuleError('reply must give {"state", "message"} (message null to end)')
        self._state, message = answer["state"], answer["message"]
        if message is None:
            self._over = True
            return Observation((), True)
        return Observation((Message("user", str(message)),))


def argument_fault(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments by its JSON schema: missing, unknown, of another type, not in the enum."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name[:80]!r}; known: {', '.join(properties)}"
        wanted = properties[name].get("type", [])
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if kinds and not any(_is_kind(value, kind) for kind in kinds):
            return f"the argument {name!r} must be of type {' or '.join(kinds)}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return f"the argument {name!r} must be one of {properties[name]['enum']}"
    return ""


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _error(text: str) -> str:
    return canonical_json({"error": text.encode("utf-8", "replace").decode()})


def _refusal(call: ToolCall, fault: str) -> Message:
    return Message("tool", _error(fault), tool_call_id=call.id, name=call.name)


def _message(part: Any) -> Message:
    if not isinstance(part, dict) or part.get("role") not in ("user", "assistant", "tool"):
        raise SandboxError("EXAMPLES must be messages with the role user, assistant or tool")
    calls = part.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls):
        raise SandboxError('tool_calls in EXAMPLES must be a list of {"name", "arguments", "id"}')
    made = tuple(ToolCall(c["name"], c["arguments"], c.get("id", "")) for c in calls)
    return Message(part["role"], str(part.get("content") or ""), made, str(part.get("tool_call_id", "")))


def _action(value: Any, function: str, turn: int) -> Action | None:
    """{"calls": [{"name", "arguments"}]} or {"say": text} or null."""
    if value is None:
        return None
    calls, said = (value.get("calls"), value.get("say")) if isinstance(value, dict) else (None, None)
    if isinstance(said, str) and not calls:
        return Action(content=said)
    if (
        said  # beside calls: one of the two would be lost
        or not isinstance(calls, list)
        or not calls
        or not all(isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls)
    ):
        raise EnvironmentFault(
            f'{function} must give {{"calls": [...]}} or {{"say": text}}, not both, or None; not {str(value)[:80]!r}'
        )
    return Action(
        tool_calls=tuple(ToolCall(str(c["name"]), c["arguments"], f"call_{turn}_{i}") for i, c in enumerate(calls))
    )
