"""Stage 4 of the method with a language model: it writes one module per capability, and the pipeline judges it.

The model gets the capability, evidence, the target's tools, policy and result shapes, the contract and worked examples.
Each version is judged by static checks, determinism, policies, red team and calibration, in this order; a failure goes
back with its reasons and figures for another version. After the last one the capability is `unsynthesizable`, and the
round goes on without it. Every version is returned for storing, the refused ones too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field

from environments.sandbox.workers import choose_level
from environments.synthesized.module_contract import CONTRACT, worked_examples
from environments.synthesized.module_files import validate_module, verdict_lines
from environments.synthesized.modules import SandboxedModule
from environments.validation.checks import DEFAULT_LIMITS, Limits, ValidationVerdict
from errors import EnvironmentFault, ProviderError
from models.providers.analyst import Answer, Question

STAGE = "synthesize"
VERSIONS = 5
_SHAPE = 400

# The policy under training plays the module's scenarios; the verdict is of the method's fourth check.
Calibrate = Callable[[SandboxedModule], ValidationVerdict]


@dataclass(frozen=True)
class SynthesisRules:
    """Sample sizes of validation, how many versions are asked for, and how freely the model writes."""

    limits: Limits = DEFAULT_LIMITS
    versions: int = VERSIONS
    temperature: float = 0.7


class Writer(Protocol):
    """What synthesis needs of `models.providers.analyst.Analyst`."""

    def ask(self, question: Question[Any]) -> Answer[Any]: ...


class WrittenModule(BaseModel):
    """What the model returns."""

    module: str = Field(description="the whole Python source of the module", min_length=1)


@dataclass(frozen=True)
class Brief:
    """What the model is told. `evidence` are compacted failed trajectories; `result_shapes` is tool -> an example of
    its result (see the function of that name)."""

    capability: str
    definition: str
    evidence: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    policy: str
    result_shapes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    """One attempt: its source ("" when the model gave none), hash, the verdicts in the order of the checks (JSON-able),
    why it was refused, the sandbox level it was judged in, and the request that it answers."""

    number: int
    source: str
    code_hash: str
    accepted: bool
    reasons: tuple[str, ...]
    verdicts: Mapping[str, Any]
    sandbox_level: str
    request_hash: str


@dataclass(frozen=True)
class Synthesis:
    """All versions of a capability's environment; the last one is accepted, or the state is `unsynthesizable`."""

    capability: str
    state: Literal["accepted", "unsynthesizable"]
    versions: tuple[Version, ...]

    @property
    def accepted(self) -> Version | None:
        """The version that may train, or None."""
        return self.versions[-1] if self.state == "accepted" else None


def synthesize(
    analyst: Writer,
    brief: Brief,
    calibrate: Calibrate,
    rules: SynthesisRules | None = None,
    known: Sequence[Version] = (),
    keep: Callable[[Version], None] = lambda version: None,
) -> Synthesis:
    """Ask for versions until one is accepted, at most `rules.versions`.

    `known` are versions that an earlier, stopped attempt judged; they are not judged again. `keep` gets each new one as
    soon as it is judged. A refusal or an unusable reply is a version without source. Raises `SandboxError` before
    anything is asked when no sandbox works here, a transient `ProviderError`, and what the analyst raises about caps
    and configuration.
    """
    level = choose_level()
    rules = rules or SynthesisRules()
    tried = list(known)
    while not (tried and tried[-1].accepted):
        if len(tried) >= rules.versions:
            return Synthesis(brief.capability, "unsynthesizable", tuple(tried))
        number = len(tried) + 1
        question = Question(STAGE, _messages(brief, tried), WrittenModule, temperature=rules.temperature, sample=number)
        try:
            answer = analyst.ask(question)
        except ProviderError as error:
            if error.transient:
                raise
            version = Version(number, "", "", False, (f"model: {error}",), {}, str(level), "")
        else:
            version = _judge(number, answer, brief, calibrate, rules.limits)
        keep(version)
        tried.append(version)
    return Synthesis(brief.capability, "accepted", tuple(tried))


def result_shapes(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Tool -> the first result seen of it, shortened, from conversations of messages as JSON objects."""
    shapes: dict[str, str] = {}
    for messages in conversations:
        names: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or ():
                names[str(call.get("id", ""))] = str(call.get("function", call)["name"])
            name = names.get(str(message.get("tool_call_id", "")))
            if message["role"] == "tool" and name:
                shapes.setdefault(name, str(message.get("content", ""))[:_SHAPE])
    return shapes


def _judge(number: int, answer: Answer[WrittenModule], brief: Brief, calibrate: Calibrate, limits: Limits) -> Version:
    source = answer.value.module
    verdict = validate_module(source, limits, target_tools=brief.tools)
    verdicts: dict[str, Any] = {"validation": verdict.as_dict()}
    reasons = list(verdict.reasons)
    found = verdict.figures.get("capability", brief.capability)
    if found != brief.capability:
        reasons.append(f"contract: CAPABILITY is {found!r}; it must be {brief.capability!r}")
    if not reasons:
        calibrated = _calibrated(source, calibrate)
        verdicts["calibration"] = calibrated.as_dict()
        reasons += [f"calibration: {reason}" for reason in calibrated.reasons]
    level = str(verdict.figures["sandbox"]["level"])
    code_hash = hashlib.sha256(source.encode()).hexdigest()
    return Version(number, source, code_hash, not reasons, tuple(reasons), verdicts, level, answer.request_hash)


def _calibrated(source: str, calibrate: Calibrate) -> ValidationVerdict:
    try:
        module = SandboxedModule(source)
        try:
            return calibrate(module)
        finally:
            module.close()
    except EnvironmentFault as error:
        return ValidationVerdict(False, (f"the module broke down: {error}",), {})


def _messages(brief: Brief, tried: Sequence[Version]) -> list[dict[str, str]]:
    examples = "\n\n".join(f"### {name}\n```python\n{source}```" for name, source in worked_examples().items())
    evidence = "\n\n".join(f"### Failed trajectory {i + 1}\n{text}" for i, text in enumerate(brief.evidence))
    tools = json.dumps(list(brief.tools), ensure_ascii=False, indent=1)
    shapes = "\n".join(f"- {name}: {shape}" for name, shape in brief.result_shapes.items()) or "- (none seen)"
    system = (
        "You write training environments. One environment trains one capability: its success depends on that "
        "capability alone, each seed is a new scenario, and an agent that has not got the capability fails.\n\n"
        + CONTRACT
    )
    asked = (
        f"## Capability\n{brief.capability}: {brief.definition}\n\n## The target's policy\n{brief.policy}\n\n"
        f"## The target's tools\n{tools}\n\n## What its tools answer\n{shapes}\n\n## Evidence\n{evidence}\n\n"
        f"## Worked examples (for other tools)\n{examples}\n\nWrite the module for {brief.capability}."
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    written = [version for version in tried if version.source]
    if written:
        messages.append({"role": "user", "content": _feedback(written[-1], tried)})
    return messages


def _feedback(last: Version, tried: Sequence[Version]) -> str:
    """The last version with its figures, and one line on why each earlier version was refused."""
    figures = []
    for name, verdict in last.verdicts.items():
        lines = verdict_lines(ValidationVerdict(verdict["accepted"], tuple(verdict["reasons"]), verdict["figures"]))
        numbers = [f"  {k} {v:.3f}" for k, v in verdict["figures"].items() if isinstance(v, float) and k != "seconds"]
        figures.append(f"{name}: " + "\n".join([*lines, *numbers]))
    before = "\n".join(f"- version {v.number}: {v.reasons[0]}" for v in tried if v is not last and v.reasons)
    reasons = "\n".join(f"- {reason}" for reason in last.reasons)
    return (
        f"## Version {last.number} was refused\n{reasons}\n\n## Its figures\n" + "\n".join(figures)
        + (f"\n\n## Refused before\n{before}" if before else "")
        + f"\n\n## Version {last.number}\n```python\n{last.source}\n```\n\nWrite a better version, whole."
    )  # fmt: skip
