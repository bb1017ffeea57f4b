"""Discovery where some conversations are refused: by the model, or by a filter of its provider.

What refuses one request for one conversation in it does not say which it was. So each that was shown is asked about
alone, those that are refused again are left out, and the others are shown once more, as labelling has it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field

from errors import LabelError, ProviderError
from models.providers.analyst import Question, Refused, unanswered
from tasks.mining.labelling import STAGE, Asker, MinedCapability, MiningSettings, Transcript, discover, shown_of
from tasks.mining.transcripts import compact, recording, with_recordings

logger = logging.getLogger("trace")


class Read(BaseModel):
    """What is asked of one conversation alone; the answer itself is not used."""

    gist: str = Field(description="one sentence")


@dataclass(frozen=True)
class Discovery:
    """The candidates, none where what is refused leaves no contrast; `refused` are the conversations that were left
    out, by id, with what was said of each."""

    candidates: tuple[MinedCapability, ...]
    refused: Mapping[str, str]


def discover_readable(
    analyst: Asker, transcripts: Sequence[Transcript], context: str, settings: MiningSettings
) -> Discovery:
    """`discover`, without the conversations that are refused also alone.

    Others take their place only where no failed or no passed one of those shown is left. Raises `LabelError` where
    every conversation is refused, `Refused` with what to do where none of them is, alone, and the `ProviderError` of a
    call that failed: what was answered is kept."""
    refused, read, left = dict[str, str](), set[str](), list(transcripts)
    while True:
        try:
            return Discovery(discover(analyst, left, context, settings), refused)
        except Refused as problem:
            shown = shown_of(left, settings)
            found = _refused(analyst, [t for t in shown if t.id not in read], context, settings)
            if not found:  # each may be read: it is their length together, or the question itself
                raise Refused(
                    f"{problem}; none of the {len(shown)} conversations was refused alone: if they are too long "
                    "together, lower analyst.trajectory_tokens, else take another model"
                ) from problem
        refused |= found
        read |= {t.id for t in shown}
        logger.warning(
            "discovery goes on without %d conversations that were refused even alone: %s", len(found), _first(found)
        )
        left = [t for t in shown if t.id not in refused]
        if not _contrast(left):
            left = [t for t in transcripts if t.id not in refused]
        if not left:
            raise LabelError(f"every one of {len(transcripts)} trajectories is refused: {_first(refused)}")
        if not _contrast(left):
            return Discovery((), refused)


def _refused(
    analyst: Asker, transcripts: Sequence[Transcript], context: str, settings: MiningSettings
) -> dict[str, str]:
    """Which of the conversations are refused alone, behind the same `context`, with what was said of each."""
    task = with_recordings("Say in one sentence what the agent did in this trajectory.")
    texts = [recording(compact(t.messages, settings.trajectory_tokens, t.id)) for t in transcripts]
    questions = [
        Question(
            STAGE,
            [{"role": "system", "content": task}, {"role": "user", "content": f"{context}\n\n### T1\n{text}"}],
            Read,
        )
        for text in texts
    ]
    heard = analyst.ask_many(questions)
    for answer in heard:
        if isinstance(answer, ProviderError) and unanswered(answer):
            raise answer
    return {t.id: str(answer) for t, answer in zip(transcripts, heard, strict=True) if isinstance(answer, Refused)}


def _contrast(transcripts: Sequence[Transcript]) -> bool:
    return len({t.passed for t in transcripts}) == 2


def _first(refused: Mapping[str, str]) -> str:
    return next(iter(refused.values()))
