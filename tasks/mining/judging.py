"""Stage 3 with a language model as the analyst: whether an environment could train what the rule selected.

Judges see the evidence and whether the target's user answers. Nothing here knows a provider or reads a database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, Field

from errors import ProviderError
from models.providers.analyst import Answer, Question, unanswered
from tasks.mining.labelling import STAGE, Asker, MinedCapability, MiningSettings, Transcript
from tasks.mining.transcripts import compact, recording, with_recordings


class FitJudgement(BaseModel):
    """The reason stands first, so that the verdict follows from it."""

    reason: str = Field(description="what the agent did, and what it would have had to do, from the trajectories")
    cause: Literal["agent", "ambiguous_task", "broken_tool"]


@dataclass(frozen=True)
class Fit:
    """Whether an environment could train a capability, by majority of judges."""

    trainable: bool
    cause: str
    reason: str


def judge_fit(
    analyst: Asker,
    capability: MinedCapability,
    evidence: Sequence[str],
    transcripts: Sequence[Transcript],
    context: str,
    settings: MiningSettings,
) -> Fit:
    """Whether practice could teach the capability, or the failures lie in an ambiguous task or a broken tool.

    More than half of all `judges` must say so, those without a usable answer included; else it is left trainable, and
    where no judge gave one the reason says so. Raises the `ProviderError` of a call that failed: what the others
    answered is kept, and the stage can be run again.
    """
    by_id = {t.id: t for t in transcripts}
    blocks = [
        f"### E{i + 1}\n{recording(compact(by_id[e].messages, settings.trajectory_tokens, e))}"
        for i, e in enumerate(evidence[:5])
    ]
    task = (
        "These failed trajectories are of tasks in which the capability below may matter. First write the reason: what "
        "the agent did, and what would have made it succeed. Then name the cause: agent when acting otherwise would "
        "have made it succeed, so that practice in a training environment can help; ambiguous_task when nothing that "
        "the agent can see, look up or ask for says what is wanted; broken_tool when a tool does not do what its "
        "description says. " + user_answers(transcripts)
    )
    asked = f"{context}\n\n## Capability {capability.name}\n{capability.definition}\n\n" + "\n\n".join(blocks)
    messages = [{"role": "system", "content": with_recordings(task)}, {"role": "user", "content": asked}]
    questions = [
        Question(STAGE, messages, FitJudgement, temperature=settings.temperature, sample=n)
        for n in range(settings.judges)
    ]
    heard = analyst.ask_many(questions)
    for problem in heard:
        if isinstance(problem, ProviderError) and unanswered(problem):
            raise problem
    answers = [answer for answer in heard if isinstance(answer, Answer)]
    against = [answer.value for answer in answers if answer.value.cause != "agent"]
    if 2 * len(against) > settings.judges:
        cause = max((a.cause for a in against), key=[a.cause for a in against].count)
        return Fit(False, cause, next(a.reason for a in against if a.cause == cause))
    supporting = next((a.value.reason for a in answers if a.value not in against), "no judge gave a usable answer")
    return Fit(True, "agent", supporting)


def user_answers(transcripts: Sequence[Transcript]) -> str:
    """Whether the target's user answers what the agent says, as these conversations show it, in a sentence."""
    spoken = answered = 0
    for transcript in transcripts:
        roles = [m["role"] for m in transcript.messages if m["role"] == "user" or _is_said(m)]
        spoken += "assistant" in roles
        answered += any(now == "assistant" and then == "user" for now, then in pairwise(roles))
    if not spoken:
        return "In none of these conversations did the agent say anything to the user."
    if answered:
        return f"The user answers the agent: in {answered} of the {spoken} conversations in which it said something."
    return f"The user answers nothing: not in one of the {spoken} conversations in which the agent said something."


def _is_said(message: Mapping[str, Any]) -> bool:
    """Whether the agent says something in the message and calls nothing, so that what follows is an answer to it."""
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message.get("content"))
