"""Stage 4 of the method with a language model: it writes one module per capability, and the pipeline judges it.

What it is asked stands in `tasks.synthesis.author_request`. Each version is judged by static checks, determinism,
policies, red team, need and calibration, in this order; a failure goes back with its reasons, figures and episodes for
another version. After the last one the capability is `unsynthesizable`, and the round goes on without it. Every version
is returned for storing, the refused ones too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, Field

from environments.sandbox.workers import WorkerNotStarted, choose_level
from environments.synthesized.module_files import validate_module
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.static_checks import wrong_names
from environments.validation.checks import DEFAULT_LIMITS, Limits, ValidationVerdict
from environments.validation.need import Materials
from environments.validation.playing import FAULTS
from environments.validation.repeats import Source
from errors import EnvironmentFault, ProviderError, TargetError, TraceError
from models.providers.analyst import Answer, Question, unanswered, unfenced
from tasks.synthesis.author_request import Brief, Synthesis, Version, author_messages
from tasks.unattended.stalls import pulse

STAGE = "synthesize"
VERSIONS = 5

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
    anything is asked when no sandbox works here, `WorkerNotStarted` when none works any more, the `ProviderError` of a
    call that failed, and what the analyst raises about caps and configuration.
    """
    level = choose_level()
    rules = rules or SynthesisRules()
    tried = list(known)
    while not (tried and tried[-1].accepted):
        if len(tried) >= rules.versions:
            return Synthesis(brief.capability, "unsynthesizable", tuple(tried))
        number = len(tried) + 1
        question = Question(
            STAGE, author_messages(brief, tried), WrittenModule, temperature=rules.temperature, sample=number
        )
        try:
            answer = analyst.ask(question)
        except ProviderError as error:
            if unanswered(error):  # it says nothing of the author, who would use up all versions at once
                raise
            version = Version(number, "", "", False, (f"model: {error}",), {}, str(level), "")
        else:
            source = unfenced(answer.value.module)  # shown worked examples between fences, some models write their own
            version = judge_module(source, answer.request_hash, brief, calibrate, rules.limits, tried)
        keep(version)
        tried.append(version)
    return Synthesis(brief.capability, "accepted", tuple(tried))


def dropped_wrong(source: str, wrong: Sequence[str], tried: Sequence[Version]) -> list[str]:
    """Names of wrong policies that an earlier version had and this one has not: the tests of a module only grow.

    `wrong` are the names that the loaded module has; of a module that was not loaded they are read from its text."""
    now = {*wrong, *wrong_names(source)}
    earlier = {name for version in tried for name in _wrong_of(version)}
    return sorted(earlier - now)


def _wrong_of(version: Version) -> set[str]:
    figures = version.verdicts.get("validation", {}).get("figures", {})
    return {*figures.get("wrong", ()), *wrong_names(version.source)}


def judge_module(
    source: str,
    request_hash: str,
    brief: Brief,
    calibrate: Calibrate,
    limits: Limits,
    tried: Sequence[Version] | None = None,
) -> Version:
    """The version that a module makes after those `tried`: validated against the target and its texts, then calibrated.
    Without `tried` it is one of the bank, which may have been written for a capability of another name."""
    public = brief.policy + json.dumps(list(brief.tools))
    answers = [Source(f"an answer of {name} that you were shown", a.lines(), True) for name, a in brief.answers.items()]
    materials = Materials(brief.evidence, [*brief.held_out, *answers], public, brief.examples)
    verdict = validate_module(source, limits, target_tools=brief.tools, materials=materials, moved=pulse)
    verdicts: dict[str, Any] = {"validation": verdict.as_dict()}
    reasons = list(verdict.reasons)
    found = verdict.figures.get("capability", brief.capability)
    if found != brief.capability and tried is not None:
        reasons.append(f"contract: CAPABILITY is {found!r}; it must be {brief.capability!r}")
    dropped = dropped_wrong(source, verdict.figures.get("wrong", ()), tried or ())
    if dropped:
        reasons.append(
            f"contract: WRONG has no {', '.join(dropped)} any more; it may only grow from version to version, so keep "
            "every policy and make the environment refuse it"
        )
    if not reasons:
        calibrated = _calibrated(source, calibrate)
        verdicts["calibration"] = calibrated.as_dict()
        reasons += [f"calibration: {reason}" for reason in calibrated.reasons]
    level = str(verdict.figures["sandbox"]["level"])
    code_hash = hashlib.sha256(source.encode()).hexdigest()
    number = len(tried or ()) + 1
    return Version(number, source, code_hash, not reasons, tuple(reasons), verdicts, level, request_hash)


def _calibrated(source: str, calibrate: Calibrate) -> ValidationVerdict:
    try:
        module = SandboxedModule(source)
        try:
            return calibrate(module)
        finally:
            module.close()
    except WorkerNotStarted:
        raise  # as below
    except (EnvironmentFault, TargetError) as error:
        return ValidationVerdict(False, (f"the module broke down: {error}",), {})
    except (TraceError, OSError, MemoryError, RuntimeError):
        raise  # a limit, the store, the policy or the machine: it says nothing of the module
    except FAULTS as error:
        return ValidationVerdict(False, (f"the module broke down: {type(error).__name__}: {error}",), {})
