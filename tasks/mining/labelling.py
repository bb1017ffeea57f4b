"""Stage 2 of the method with a language model as the analyst: discover candidates, and label every pair N times.

The analyst is passed in; nothing here knows a provider, and nothing here reads a database. Raters see a trajectory's
conversation and never its outcome, reward or checks, unless `show_outcome` is set: raters who know the outcome explain
it, and the contrast becomes vacuous. Trajectories go by aliases, so ids tell nothing either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field

from errors import LabelError, ProviderError
from models.providers.analyst import Answer, Question, Refused, unanswered
from tasks.mining.labels import LABELS
from tasks.mining.transcripts import compact, recording, with_recordings

STAGE = "contrast"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+){1,4}")
# Files and adapters are named by a capability, and a file system takes no name of 256 characters. A definition stands
# in every request for labels.
_NAME_LENGTH, _DEFINITION_LENGTH = 80, 2000


class Asker(Protocol):
    """What mining needs of `models.providers.analyst.Analyst`."""

    def ask(self, question: Question[Any]) -> Answer[Any]: ...
    def ask_many(self, questions: Sequence[Question[Any]]) -> list[Answer[Any] | ProviderError]: ...


@dataclass(frozen=True)
class Transcript:
    """A trajectory as mining sees it: messages as JSON objects, and the outcome, which raters do not get."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    passed: bool


@dataclass(frozen=True)
class MiningSettings:
    """Sizes of both steps. `batch` trajectories are labelled in one request; `trajectory_tokens` bounds each of them;
    `shown` of each outcome are shown to discovery."""

    candidates: int = 10
    runs: int = 10
    batch: int = 4
    trajectory_tokens: int = 2000
    shown: int = 12
    temperature: float = 0.8
    judges: int = 3
    show_outcome: bool = False
    seed: int = 0


class FoundCapability(BaseModel):
    """A candidate as the model writes it."""

    name: str = Field(description="snake_case, 2 to 5 words")
    definition: str = Field(description="2 or 3 sentences, precise enough for two raters to agree", min_length=40)
    failed_examples: list[str] = Field(description="ids of failed trajectories that lack it")
    passed_examples: list[str] = Field(description="ids of passed trajectories that show it")


class FoundCapabilities(BaseModel):
    capabilities: list[FoundCapability]


class GivenLabel(BaseModel):
    trajectory: str
    capability: str
    label: Literal["NA", "PRESENT", "LACKING"]


class GivenLabels(BaseModel):
    labels: list[GivenLabel]


@dataclass(frozen=True)
class MinedCapability:
    """A candidate with the ids of its example trajectories and the request that named it."""

    name: str
    definition: str
    failed_examples: tuple[str, ...]
    passed_examples: tuple[str, ...]
    request_hash: str


@dataclass(frozen=True)
class Labelling:
    """All labels of the complete runs [run, trajectory_id, capability, label, weight, passed, request_hash], the runs
    that were refused, with what was wrong, and those of them that may be complete when asked again later. `filtered`
    are trajectories that the provider or the model refuses, or gives no usable reply about, also alone, and that no run
    labels."""

    labels: pd.DataFrame
    refused: tuple[tuple[int, str], ...]
    waiting: tuple[int, ...] = ()
    filtered: tuple[str, ...] = ()


def discover(
    analyst: Asker, transcripts: Sequence[Transcript], context: str, settings: MiningSettings
) -> tuple[MinedCapability, ...]:
    """Up to `candidates` capabilities that separate failed from passed trajectories. Discovery sees outcomes: it is
    asked for a contrast. Raises `LabelError` without a failed and a passed trajectory."""
    shown = shown_of(transcripts, settings)
    aliases = {f"T{i + 1}": transcript for i, transcript in enumerate(shown)}
    blocks = [
        f"### {alias} ({'PASSED' if t.passed else 'FAILED'})\n"
        + recording(compact(t.messages, settings.trajectory_tokens, t.id))
        for alias, t in aliases.items()
    ]
    task = (
        f"Name at most {settings.candidates} capabilities that the failed trajectories lack and the passed ones show. "
        "A capability is one or more actions in a trajectory that are necessary to solve some of the tasks. Names are "
        "snake_case, 2 to 5 words. Define each in 2 or 3 sentences, so precisely that two raters would agree. They "
        "must be general (no rule of this one domain) and must not overlap. Give the ids of examples of both kinds."
    )
    content = "\n\n".join([context, *blocks])
    messages = [{"role": "system", "content": with_recordings(task)}, {"role": "user", "content": content}]
    question = Question(STAGE, messages, FoundCapabilities, check=_candidate_check(aliases, settings.candidates))
    answer = analyst.ask(question)
    return tuple(
        MinedCapability(
            found.name,
            found.definition,
            tuple(aliases[alias].id for alias in found.failed_examples),
            tuple(aliases[alias].id for alias in found.passed_examples),
            answer.request_hash,
        )
        for found in answer.value.capabilities
    )


def shown_of(transcripts: Sequence[Transcript], settings: MiningSettings) -> list[Transcript]:
    """The trajectories that discovery is shown: at most `shown` of each outcome. Raises `LabelError` without a failed
    and a passed one."""
    failed, passed = ([t for t in transcripts if t.passed is outcome] for outcome in (False, True))
    if not failed or not passed:
        raise LabelError(f"{len(failed)} failed and {len(passed)} passed trajectories: a contrast needs both")
    rng = random.Random(settings.seed)
    return [
        *rng.sample(failed, min(settings.shown, len(failed))),
        *rng.sample(passed, min(settings.shown, len(passed))),
    ]


def label(
    analyst: Asker,
    transcripts: Sequence[Transcript],
    candidates: Sequence[MinedCapability],
    context: str,
    settings: MiningSettings,
    required: int = 1,
) -> Labelling:
    """N independent runs over every (trajectory, capability) pair, each in fresh contexts and in an order of its own.

    The trajectories of a request that is refused for good, or that no reply is usable for though others of the run are,
    are asked about singly, and those of which the same holds alone are left out of all runs. A run in which a request
    stayed without a usable answer for another reason is refused as a whole and named; one of which no request was
    answered, as the calls failed, is the last that is tried. Once enough runs are complete, the others are asked once
    more for what trouble that may have passed has cost them: the rule is of all N. As soon as fewer than `required` can
    be complete this raises a `ProviderError` (`transient` where asking soon may help) if the model may answer later,
    else `LabelError`. Every label carries the hash of the request that gave it.
    """
    by_id = {t.id: t for t in transcripts}
    if len(by_id) != len(transcripts):
        raise LabelError(f"{len(transcripts) - len(by_id)} trajectories are given twice; give each once")
    texts = {t.id: compact(t.messages, settings.trajectory_tokens, t.id) for t in transcripts}
    names = [candidate.name for candidate in candidates]
    complete: dict[int, list[tuple[str, dict[str, dict[str, str]]]]] = {}
    refused: dict[int, str] = {}
    waiting: set[int] = set()
    filtered: dict[str, str] = {}
    unheard: list[ProviderError] = []

    def ask_runs(runs: Iterable[int]) -> None:
        for run in runs:
            # Left out of the batches as they are without a refusal: the others are those that were answered before.
            batches = [[t for t in batch if t not in filtered] for batch in _batches(list(by_id), settings, run)]
            shown: dict[str, Any] = {"by_id": by_id, "texts": texts, "candidates": candidates, "context": context}
            ask = partial(_label_question, settings=settings, run=run, **shown)
            rows, failures, alone = _asked(analyst, [batch for batch in batches if batch], ask)
            filtered.update(alone)
            if len(filtered) == len(by_id):
                raise LabelError(f"every one of {len(by_id)} trajectories is refused: {next(iter(filtered.values()))}")
            refused.pop(run, None)
            waiting.discard(run)
            if not failures:
                complete[run] = rows
                continue
            count = len(rows) + len(failures)
            refused[run] = f"{len(failures)} of {count} requests stayed without labels, first: {failures[0]}"
            if calls := [*filter(unanswered, failures)]:
                unheard.extend(calls)
                waiting.add(run)
            if not rows and all(map(unanswered, failures)):
                waiting.update(set(range(settings.runs)) - {*complete, *refused})
                return
            if settings.runs - len(refused) < required:
                return

    ask_runs(range(settings.runs))
    if any(failure.transient for failure in unheard) and len(complete) >= required:
        ask_runs(sorted(waiting))
    if len(complete) < required:
        raise _too_few(len(complete), required, settings.runs, refused, unheard if waiting else ())
    labelled = {t: by_id[t] for t in by_id if t not in filtered}
    labels = _frame(sorted(complete.items()), labelled, names)
    return Labelling(labels, tuple(sorted(refused.items())), tuple(sorted(waiting)), tuple(filtered))


def _asked(
    analyst: Asker, batches: Sequence[list[str]], ask: Callable[[list[str]], Question[GivenLabels]]
) -> tuple[list[tuple[str, dict[str, dict[str, str]]]], list[ProviderError], dict[str, str]]:
    """A run's labels by request, the requests that stayed without any, and the trajectories that are refused, or that
    no reply is usable about, also alone, with what was said of each."""
    heard = list(zip(batches, analyst.ask_many([ask(batch) for batch in batches]), strict=True))
    # Where no reply of the run can be used it is the model, or what is asked: to ask about each would only cost more.
    usable = any(isinstance(answer, Answer) for _, answer in heard)

    def of_itself(answer: Answer[GivenLabels] | ProviderError) -> bool:
        if isinstance(answer, Answer) or unanswered(answer):
            return False
        return usable or isinstance(answer, Refused)

    singly = [[t] for batch, answer in heard if of_itself(answer) and len(batch) > 1 for t in batch]
    heard = [(batch, answer) for batch, answer in heard if not of_itself(answer) or len(batch) == 1]
    if singly:
        heard += zip(singly, analyst.ask_many([ask(batch) for batch in singly]), strict=True)
    rows = [(a.request_hash, _by_trajectory(batch, a.value)) for batch, a in heard if isinstance(a, Answer)]
    failures = [a for _, a in heard if isinstance(a, ProviderError) and not of_itself(a)]
    return rows, failures, {b[0]: str(a) for b, a in heard if isinstance(a, ProviderError) and of_itself(a)}


def _too_few(
    complete: int, required: int, runs: int, refused: Mapping[int, str], unheard: Sequence[ProviderError]
) -> ProviderError | LabelError:
    """Why the labels are too few for any capability to be selected; what was `unheard` the model may answer later."""
    run, why = next(iter(refused.items()))
    few = f"{complete or 'none'} of {runs} labelling runs {'is' if complete < 2 else 'are'} complete, {required} needed"
    if unheard:
        return ProviderError(
            f"{few}, and the model may answer later: {why}; run again: what was answered is kept",
            transient=any(failure.transient for failure in unheard),
            unpaid=any(failure.unpaid for failure in unheard),
        )
    return LabelError(f"{few}; run {run}: {why}")


def _candidate_check(aliases: Mapping[str, Transcript], limit: int) -> Callable[[FoundCapabilities], None]:
    def check(found: FoundCapabilities) -> None:
        names = [capability.name for capability in found.capabilities]
        if not 1 <= len(names) <= limit:
            raise ValueError(f"{len(names)} capabilities; between 1 and {limit} are wanted")
        if len(set(names)) < len(names):
            raise ValueError(f"a name stands twice: {sorted(n for n in set(names) if names.count(n) > 1)}")
        for capability in found.capabilities:
            if not _NAME.fullmatch(capability.name):
                raise ValueError(f"{capability.name[:_NAME_LENGTH]!r} is not snake_case of 2 to 5 words")
            for part, most in ((capability.name, _NAME_LENGTH), (capability.definition, _DEFINITION_LENGTH)):
                if len(part) > most:
                    raise ValueError(f"{part[:40]!r}... has {len(part)} characters; at most {most} are wanted")
            for examples, passed in ((capability.failed_examples, False), (capability.passed_examples, True)):
                wrong = [e for e in examples if e not in aliases or aliases[e].passed is not passed]
                if wrong:
                    kind = "passed" if passed else "failed"
                    raise ValueError(f"{capability.name}: {wrong[:3]} are no {kind} trajectories that were shown")

    return check


def _batches(ids: list[str], settings: MiningSettings, run: int) -> list[list[str]]:
    random.Random(f"{settings.seed}/{run}").shuffle(ids)
    return [ids[start : start + settings.batch] for start in range(0, len(ids), settings.batch)]


def _label_question(
    batch: Sequence[str],
    by_id: Mapping[str, Transcript],
    texts: Mapping[str, str],
    candidates: Sequence[MinedCapability],
    context: str,
    settings: MiningSettings,
    run: int,
) -> Question[GivenLabels]:
    def block(alias: str, trajectory: str) -> str:
        outcome = f" ({'PASSED' if by_id[trajectory].passed else 'FAILED'})" if settings.show_outcome else ""
        return f"### {alias}{outcome}\n{recording(texts[trajectory])}"

    task = (
        "Label every pair of a trajectory and a capability: NA when the task does not require the capability, PRESENT "
        "when it is required and the agent shows it, LACKING when it is required and the agent does not. What the task "
        "requires follows from the request, the policy and what the tools tell, not from what the agent did: when it "
        "is required and the agent made no call, met no error, gave up or never came to it, that is LACKING, not NA; "
        "when nothing in the request calls for it, that is NA, whatever the agent did. Give every pair exactly "
        "once, and no other."
    )
    defined = "\n".join(f"- {candidate.name}: {candidate.definition}" for candidate in candidates)
    blocks = [block(f"T{i + 1}", trajectory) for i, trajectory in enumerate(batch)]
    content = "\n\n".join([context, f"## Capabilities\n{defined}", *blocks])
    wanted = {(f"T{i + 1}", candidate.name) for i in range(len(batch)) for candidate in candidates}
    messages = [{"role": "system", "content": with_recordings(task)}, {"role": "user", "content": content}]
    check = _partition_check(wanted)
    return Question(STAGE, messages, GivenLabels, temperature=settings.temperature, sample=run, check=check)


def _partition_check(wanted: set[tuple[str, str]]) -> Callable[[GivenLabels], None]:
    def check(given: GivenLabels) -> None:
        pairs = [(row.trajectory, row.capability) for row in given.labels]
        unknown = [pair for pair in pairs if pair not in wanted]
        if unknown:
            raise ValueError(f"unknown pair {unknown[0]}")
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"the pair {next(pair for pair in pairs if pairs.count(pair) > 1)} is labelled twice")
        missing = wanted - set(pairs)
        if missing:
            raise ValueError(f"{len(missing)} pairs have no label, first {min(missing)}")

    return check


def _by_trajectory(batch: Sequence[str], given: GivenLabels) -> dict[str, dict[str, str]]:
    """trajectory id -> capability -> label."""
    found: dict[str, dict[str, str]] = {trajectory: {} for trajectory in batch}
    for row in given.labels:
        found[batch[int(row.trajectory[1:]) - 1]][row.capability] = row.label
    return found


def _frame(
    complete: Sequence[tuple[int, Sequence[tuple[str, Mapping[str, Mapping[str, str]]]]]],
    by_id: Mapping[str, Transcript],
    names: Sequence[str],
) -> pd.DataFrame:
    runs: list[int] = []
    ids: list[str] = []
    capabilities: list[str] = []
    labels: list[str] = []
    hashes: list[str] = []
    for run, rows in complete:
        for request_hash, found in rows:
            for trajectory, given in found.items():
                if trajectory not in by_id:  # refused in a later run
                    continue
                runs += [run] * len(names)
                ids += [trajectory] * len(names)
                capabilities += names
                labels += [given[name] for name in names]
                hashes += [request_hash] * len(names)
    return pd.DataFrame(
        {
            "run": np.array(runs, dtype=np.int16),
            "trajectory_id": pd.Categorical(ids, categories=list(by_id)),
            "capability": pd.Categorical(capabilities, categories=list(names)),
            "label": pd.Categorical(labels, categories=list(LABELS)),
            "weight": np.ones(len(runs), dtype=np.int16),
            "passed": np.array([by_id[trajectory].passed for trajectory in ids], dtype=bool),
            "request_hash": pd.Categorical(hashes),
        }
    )
