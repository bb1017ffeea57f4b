"""What the author of an environment is sent: the capability, the target, the rules it will be judged by, and after a
refusal what happened, in figures and in episodes.

A request is bounded in tokens: every trajectory is compacted, and of a refused version at most six episodes are shown
(three of the base, three of policies that won although they should not).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from environments.contract import Message, canonical_json
from environments.synthesized.module_contract import CONTRACT, worked_examples
from environments.synthesized.module_files import verdict_lines
from environments.validation.checks import ValidationVerdict
from environments.validation.repeats import Source
from errors import LabelError
from tasks.mining.transcripts import compact, recording, with_recordings
from tasks.synthesis.target_material import ToolAnswers

# Tokens of one episode that is shown after a refusal, and how many of each verdict are.
EPISODE_TOKENS = 700
EPISODES = 3
TOOLS_ANSWER = "What its tools answer (call -> answer, real)"
VERIFIER_SAYS = "What its verifier says of answers (it has no tools; request -> answer -> check, real)"


@dataclass(frozen=True)
class Brief:
    """What the model is told. `evidence` are compacted failed trajectories; `band` says in words what calibration will
    ask of the base. `held_out` is never told: scenarios are checked against it, and lazy policies copy from `examples`,
    the target's own."""

    capability: str
    definition: str
    evidence: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    policy: str
    answers: Mapping[str, ToolAnswers] = field(default_factory=dict)
    band: str = ""
    held_out: Sequence[Source] = ()
    examples: Sequence[Message] = ()


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


def author_messages(brief: Brief, tried: Sequence[Version]) -> list[dict[str, str]]:
    """The request for the next version after `tried`."""
    examples = "\n\n".join(f"### {name}\n```python\n{source}```" for name, source in worked_examples().items())
    evidence = "\n\n".join(f"### Failed trajectory {i + 1}\n{recording(text)}" for i, text in enumerate(brief.evidence))
    tools = json.dumps(list(brief.tools), ensure_ascii=False, indent=1)
    answers = recording("\n".join(f"- {name}\n{a.lines()}" for name, a in brief.answers.items()) or "- (none seen)")
    system = with_recordings(
        "You write training environments. One environment trains one capability: its success depends on that "
        "capability alone, each seed is a new scenario, and an agent that has not got the capability fails. Making "
        "the task easier does not get a version accepted: it must stay impossible without the capability.\n\n"
        + CONTRACT
        + (f"\nCalibration comes last. {brief.band}\n" if brief.band else "")
    )
    asked = (
        f"## Capability\n{brief.capability}: {brief.definition}\n\n## The target's policy\n{brief.policy}\n\n"
        f"## The target's tools\n{tools}\n\n## {TOOLS_ANSWER if brief.tools else VERIFIER_SAYS}\n{answers}\n\n"
        f"## Evidence (failed episodes; do not copy their names, ids or numbers)\n{evidence}\n\n"
        f"## Worked examples (for other tools)\n{examples}\n\nWrite the module for {brief.capability}."
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    written = [version for version in tried if version.source]
    if written:
        messages.append({"role": "user", "content": _feedback(written[-1], tried)})
    return messages


def exhibit_text(shown: Mapping[str, Any], budget: int = EPISODE_TOKENS) -> str:
    """An episode of a verdict as text: who played it, reward, checks, and the conversation within `budget` tokens."""
    if "messages" not in shown:
        return f"### {shown.get('name', 'an episode')}\n(no episode of it was scored)"
    checks = ", ".join(
        f"{check['name']} {'passed' if check['passed'] else 'FAILED'}" for check in shown["checks"] if check["required"]
    )
    try:
        text = recording(compact(shown["messages"], budget))
    except LabelError:
        text = f"(its conversation does not fit into {budget} tokens)"
    outcome = "success" if shown["success"] else "no success"
    return f"### {shown['name']}: reward {shown['reward']:.2f}, {outcome}\nchecks: {checks[:600] or 'none'}\n{text}"


def _feedback(last: Version, tried: Sequence[Version]) -> str:
    """The last version with its figures and episodes, and one line on why each earlier version was refused."""
    figures, episodes = [], []
    for name, verdict in last.verdicts.items():
        if not isinstance(verdict, Mapping):
            continue
        # PostgreSQL gives keys back in an order of its own: who resumes would ask, and pay, for another text.
        verdict = json.loads(canonical_json(verdict))
        lines = verdict_lines(ValidationVerdict(verdict["accepted"], tuple(verdict["reasons"]), verdict["figures"]))
        numbers = [f"  {k} {v:.3f}" for k, v in verdict["figures"].items() if isinstance(v, float) and k != "seconds"]
        figures.append(f"{name}: " + "\n".join([*lines, *numbers]))
        episodes += [exhibit_text(shown) for shown in verdict["figures"].get("exhibits", ())[:EPISODES]]
    before = "\n".join(f"- version {v.number}: {v.reasons[0]}" for v in tried if v is not last and v.reasons)
    reasons = "\n".join(f"- {reason}" for reason in last.reasons)
    return (
        f"## Version {last.number} was refused\n{reasons}\n\n## Its figures\n" + "\n".join(figures)
        + ("\n\n## Episodes in it\n" + "\n\n".join(episodes) if episodes else "")
        + (f"\n\n## Refused before\n{before}" if before else "")
        + f"\n\n## Version {last.number}\n```python\n{last.source}\n```\n\nWrite a better version, whole."
    )  # fmt: skip
