"""Generated environments as files: judge one, keep it, load it again, play it by hand. No model is needed.

An accepted environment is `NAME-HASH.py`, which a person can read, and beside it `NAME-HASH.json` with its verdict,
the sandbox level it was judged in, and the hash that the source must still have when it is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ParamSpec, TypeVar

from environments.contract import Action, Environment, Message, Observation, TargetTask, ToolCall, canonical_json
from environments.offered import can_be_said
from environments.playing import take_turns
from environments.sandbox.allowance import Allowance, TimeLimit
from environments.sandbox.workers import SandboxLevel, WorkerNotStarted, choose_level
from environments.synthesized.modules import SandboxedEnvironment, SandboxedModule
from environments.synthesized.static_checks import static_faults
from environments.validation.checks import DEFAULT_LIMITS, Limits, ValidationVerdict, raised, validate_environment
from environments.validation.levels import level_faults
from environments.validation.need import Materials, NeedLimits, check_need
from environments.validation.playing import FAULTS, SimplePolicy, TooSlow
from environments.validation.step import step_fault
from errors import EnvironmentFault, SandboxError, TargetError

P = ParamSpec("P")
T = TypeVar("T")
# Other processes that give a level's scenarios again. In each a set has another order, but one of two elements has the
# same order in half of them.
TWINS = 2
# What all checks of a module may take together. A module that is slower would hold up its training as well.
TIME = TimeLimit(processor=600.0, clock=7200.0)


def validate_module(
    source: str,
    limits: Limits = DEFAULT_LIMITS,
    *,
    target_tools: Sequence[Mapping[str, Any]] | None = None,
    level: SandboxLevel | None = None,
    materials: Materials | None = None,
    time_limit: TimeLimit = TIME,
    moved: Callable[[], None] = lambda: None,
) -> ValidationVerdict:
    """Checks 1 to 3 on a module: its text, its tools against the target's, whether its levels are one dial, then, at
    every level, everything `validate_environment` does, and whether it needs its capability (`check_need`; `materials`
    are the texts that it must not repeat).

    After `time_limit` of playing it is refused as too slow, whatever is left to check. What counts is the processor
    time of its workers and of this thread, to which other load does not add; the clock is there for what waits.
    `moved` is called at every step of the way, so that whoever watches this process for a hang sees that it works.
    Determinism is judged across worker processes, of which `TWINS` are new at every level. The verdict's figures hold
    the code hash and the sandbox level.
    Raises `SandboxError` only when no sandbox works here, `WorkerNotStarted` when none does any more; what is wrong
    with the module is in the verdict, also what no check foresees: a model may write anything.
    """
    level = level or choose_level()
    figures: dict[str, Any] = {"sandbox": {"level": str(level), "isolated": level.isolated}}
    faults = static_faults(source)
    figures["static"] = {"faults": len(faults)}
    if faults:
        return ValidationVerdict(False, tuple(f"static: {fault}" for fault in faults), figures)
    try:
        module = SandboxedModule(source, level)
    except WorkerNotStarted:
        raise
    except SandboxError as error:
        return ValidationVerdict(False, (f"load: {error}",), figures)
    except FAULTS as error:
        return ValidationVerdict(False, (raised("load", error),), figures)
    check = "step"
    try:
        figures["code_hash"], figures["capability"] = module.code_hash, module.capability
        figures["wrong"] = list(module.wrong)
        fault = step_fault(module.step, module.tools)
        if fault:
            return ValidationVerdict(False, (f"step: {fault}",), figures)
        check = "tools"
        faults = tool_faults(module.tools, target_tools) if target_tools is not None else []
        if faults:
            return ValidationVerdict(False, tuple(f"tools: {fault}" for fault in faults), figures)
        check = "scenario"
        clock = _Clock(time_limit, moved, module)
        faults = level_faults(clock.timed(module.scenario), module.levels)
        if faults:
            return ValidationVerdict(False, tuple(f"levels: {fault}" for fault in faults), figures)
        check = "play"
        verdict = _at_every_level(module, limits, materials, clock)
        figures["sandbox"]["restarts"] = module.restarts
    except TooSlow as slow:
        return ValidationVerdict(False, (str(slow),), figures)
    except WorkerNotStarted:
        raise
    except FAULTS as error:
        return ValidationVerdict(False, (raised(check, error),), figures)
    finally:
        module.close()
    return ValidationVerdict(verdict.accepted, verdict.reasons, figures | dict(verdict.figures))


class _Clock:
    """The time that the checks of a module have together, from now on. `used` is the processor time of its workers, and
    of this thread, so far; what is still to be made may be added to `modules`."""

    def __init__(self, limit: TimeLimit, moved: Callable[[], None], *modules: SandboxedModule) -> None:
        self._moved, self.modules = moved, list(modules)
        self._allowed = Allowance(limit, self.used)

    def used(self) -> float:
        """Seconds of processor time since some time in the past."""
        return time.thread_time() + sum(module.used for module in self.modules)

    def look(self) -> None:
        """Raise `TooSlow` when the time is over; else say that work has moved."""
        if passed := self._allowed.over():
            raise TooSlow(
                f"time: the module is too slow: its checks were not done after {passed} ({self._allowed.spent()}); do "
                "less in scenario, transition, reply, reward and oracle, and wait for nothing"
            )
        self._moved()

    def timed(self, call: Callable[P, T]) -> Callable[P, T]:
        """`call`, looking at the clock before."""

        def looked(*args: P.args, **kwargs: P.kwargs) -> T:
            self.look()
            return call(*args, **kwargs)

        return looked


class _Timed(SandboxedEnvironment):
    """A module's environment that looks at the clock before every turn."""

    def __init__(self, module: SandboxedModule, clock: _Clock) -> None:
        super().__init__(module)
        self._clock = clock

    def reset(self, task: TargetTask) -> Observation:
        self._clock.look()
        return super().reset(task)

    def step(self, action: Action) -> Observation:
        self._clock.look()
        return super().step(action)


def _at_every_level(
    module: SandboxedModule, limits: Limits, materials: Materials | None, clock: _Clock
) -> ValidationVerdict:
    """Everything that is played, at each level from the easiest on, until one is refused: where a task is weakened, it
    is there. The figures are those of level 0, further levels' under `levels`. The tests of need have one limit of
    time together, and so have all checks."""
    figures: dict[str, Any] = {}
    left = NeedLimits().time_limit
    for level in range(module.levels):
        need_limits = NeedLimits(time_limit=left)
        with ExitStack() as ends:
            twins = [ends.enter_context(closing(SandboxedModule(module.source, module.level))) for _ in range(TWINS)]
            clock.modules += twins
            verdict = validate_environment(
                partial(_Timed, module, clock),
                clock.timed(partial(module.scenario, level=level)),
                limits,
                wrong={name: suggested_policy(f"WRONG.{name}") for name in module.wrong},
                twins=[clock.timed(partial(twin.scenario, level=level)) for twin in twins],
                make_twin=partial(_Timed, twins[0], clock),
                need=partial(check_need, step=module.step, materials=materials, limits=need_limits, used=clock.used),
            )
        found = dict(verdict.figures)
        need = found.get("need", {})
        left = left.without(need.get("processor_seconds", 0.0), need.get("seconds", 0.0))
        if level == 0:
            figures = found
        else:
            exhibits = found.pop("exhibits", [])
            figures["levels"] = {**figures.get("levels", {}), str(level): found}
            figures["exhibits"] = exhibits or figures.get("exhibits", [])
        if not verdict.accepted:
            where = f"level {level}: " if module.dialled else ""
            return ValidationVerdict(False, tuple(where + reason for reason in verdict.reasons), figures)
    return ValidationVerdict(True, (), figures)


def suggested_policy(function: str) -> SimplePolicy:
    """A policy that the module itself carries: `oracle` or `WRONG.name`."""

    def policy(environment: Environment, messages: Sequence[Message], rng: Random) -> Action | None:
        if not isinstance(environment, SandboxedEnvironment):
            raise EnvironmentFault(f"{function} can be asked of generated modules only")
        return environment.suggested(function)

    return policy


def tool_faults(tools: Sequence[Mapping[str, Any]], target_tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tools that the target lacks, or has with another signature: what is learnt on them would not carry over."""
    known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in target_tools}
    faults = []
    for tool in tools:
        name, parameters = tool["function"]["name"], tool["function"].get("parameters", {})
        if name not in known:
            faults.append(f"the target has no tool {name!r}; it has {', '.join(known)}")
        elif _signature(parameters) != _signature(known[name]):
            faults.append(f"{name!r} has another signature than the target's: {_signature(known[name])} is needed")
    return faults


def save_module(folder: Path, source: str, verdict: ValidationVerdict) -> Path:
    """Write an accepted module and its verdict; the path of the module. Raises `EnvironmentFault` on a refused one."""
    if not verdict.accepted:
        raise EnvironmentFault(f"a refused environment is not kept: {verdict.reasons[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{verdict.figures['capability']}-{verdict.figures['code_hash'][:12]}.py"
    path.write_bytes(source.encode())
    path.with_suffix(".json").write_text(
        json.dumps(verdict.as_dict(), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    return path


def load_module(path: Path, level: SandboxLevel | None = None) -> SandboxedModule:
    """The module of a file, in the sandbox. Raises `TargetError` when there is no such file, or when a verdict lies
    beside it that was given to other code, or that cannot be read."""
    source, verdict = _source_of(path), path.with_suffix(".json")
    stored = _judged_code(verdict) if verdict.is_file() else None
    module = SandboxedModule(source, level)
    if stored is not None and stored != module.code_hash:
        module.close()
        raise TargetError(f"{path} was changed after it was accepted: {module.code_hash[:12]} is not {stored[:12]}")
    return module


def _source_of(path: Path) -> str:
    """The text of a module's file as it was written, its ends of lines too: they are in its hash."""
    if not path.is_file():
        raise TargetError(f"there is no environment at {path}; give the path of a module (.py)")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as problem:
        raise TargetError(f"{path} is no text in UTF-8 ({problem}); save it as such") from problem


def _judged_code(verdict: Path) -> str:
    """The hash of the code that a verdict was given to."""
    try:
        return str(json.loads(verdict.read_bytes())["figures"]["code_hash"])
    except (ValueError, LookupError, TypeError) as problem:
        raise TargetError(
            f"{verdict} is no verdict on a module ({type(problem).__name__}: {problem}); move it away, then "
            "'trace-agent validate' judges the module again"
        ) from problem


def validate_file(
    path: Path, limits: Limits = DEFAULT_LIMITS, target_tools: Sequence[Mapping[str, Any]] | None = None
) -> ValidationVerdict:
    """`trace-agent validate ENV`: judge the module of a file again, without a model."""
    return validate_module(_source_of(path), limits, target_tools=target_tools)


def verdict_lines(verdict: ValidationVerdict) -> list[str]:
    """A verdict as lines to print: the decision, the reasons, then a row per policy."""
    lines = ["accepted" if verdict.accepted else "refused", *(f"  - {reason}" for reason in verdict.reasons)]
    need = verdict.figures.get("need", {})
    lazy = {f"lazy.{name}": row for name, row in need.get("lazy", {}).items()}
    for name, row in (dict(verdict.figures.get("policies", {})) | lazy).items():
        low, high = row["interval"]
        lines.append(
            f"  {name:<24} success {row['success_rate']:.2f} [{low:.2f}, {high:.2f}]  reward {row['mean_reward']:.2f}"
            f"  steps {row['mean_steps']:.1f}  n = {row['episodes']}"
        )
    lines += [f"  lazy.{name} was not played: {why}" for name, why in need.get("unbound", {}).items()]
    for level, figures in verdict.figures.get("levels", {}).items():
        strongest = max((row["mean_reward"] for row in figures.get("need", {}).get("lazy", {}).values()), default=0.0)
        oracle = figures.get("policies", {}).get("oracle", {}).get("success_rate", 0.0)
        lines.append(f"  level {level}: oracle {oracle:.2f}, best lazy policy's reward {strongest:.2f}")
    if need:
        step, repeats = need["step"], need["repeats"]
        lines.append(
            f"  oracle without its step: success {step['success_rate']:.2f}, {step['differing']} of {step['episodes']} "
            f"episodes differ; {repeats['repeating']} of {repeats['scenarios']} scenarios repeat other texts"
        )
    team = verdict.figures.get("red_team")
    if team:
        lines.append(
            f"  red team: {team['attacks']} attacks, {len(team['successes'])} won, {len(team['errors'])} faults"
        )
    return lines


def play_by_hand(
    environment: Environment, task: TargetTask, read: Callable[[str], str], write: Callable[[str], None]
) -> float:
    """`trace-agent play ENV --seed N`: a person is the policy; the reward.

    A line `name {"argument": value}` is a tool call, `?` asks the oracle, an empty line ends, anything else is said.
    """

    def shown(observation: Observation) -> Observation:
        for message in observation.messages:
            write(f"[{message.role}] {message.content}")
        return observation

    def act(taken: int) -> Action | None:
        line = read("> ").strip()
        if not line:
            return None
        return environment.oracle() if line == "?" else parse_line(line, environment.tools, taken)

    def step(action: Action) -> Observation:
        write(f"[you] {canonical_json(action.as_message().as_dict())}")
        return shown(environment.step(action))

    first = environment.reset(task)
    write(environment.instructions)
    for tool in environment.tools:
        write(f"tool {tool['function']['name']} {canonical_json(tool['function'].get('parameters', {}))}")
    take_turns(environment, shown(first), act, step)
    score = environment.score()
    for check in score.checks:
        needed = "" if check.required else " (not required)"
        write(f"{'passed' if check.passed else 'FAILED'} {check.name}{needed} {check.detail}".rstrip())
    write(f"reward {score.reward:.2f}, {'success' if score.success else 'no success'}")
    return score.reward


def parse_line(line: str, tools: Sequence[Mapping[str, Any]], step: int) -> Action:
    """A line typed by a person as an action: a call when it begins with a tool's name, else a message."""
    name, _, rest = line.partition(" ")
    if name not in {tool["function"]["name"] for tool in tools}:
        return Action(content=line)
    try:
        arguments = json.loads(rest or "{}")
    except ValueError:
        return Action(malformed=line)
    call = Action(tool_calls=(ToolCall(name, arguments, f"call_{step}"),)) if isinstance(arguments, dict) else None
    return call if call is not None and can_be_said(call) else Action(malformed=line)  # a number that is none


def _signature(parameters: Mapping[str, Any]) -> str:
    """Names, types and which are required: descriptions may differ."""
    properties = {name: part.get("type") for name, part in parameters.get("properties", {}).items()}
    return canonical_json({"properties": properties, "required": sorted(parameters.get("required", ()))})
