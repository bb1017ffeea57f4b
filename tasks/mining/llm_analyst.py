"""Stage 2 with the `llm` analyst on a round's stored trajectories: discovery, N labelling runs, and the judge of fit.

What is asked and how it is judged stands in `tasks.mining.labelling`; here it is read from and written to the store.
Replies are kept as they come, so a stage that was killed asks only what is still owed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from db import CapabilityRow, Store
from errors import LabelError
from models.providers.analyst import Analyst
from settings import Settings
from tasks.mining.agreement import agreement
from tasks.mining.discovery import discover_readable
from tasks.mining.judging import judge_fit
from tasks.mining.labelling import MinedCapability, MiningSettings, Transcript, label
from tasks.mining.labels import store_candidates, store_labels
from tasks.mining.selection import CapabilitySelection
from tasks.mining.transcripts import compact
from tasks.round.context import Context
from tasks.round.results import ContrastResult
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import context_text
from tasks.unattended.prefect_pages import show

NAME = "llm"


def mining_settings(settings: Settings) -> MiningSettings:
    """Sizes of mining, from the round's settings."""
    a = settings.analyst
    return MiningSettings(
        candidates=a.candidates,
        runs=settings.selection.runs,
        batch=a.batch,
        trajectory_tokens=a.trajectory_tokens,
        temperature=a.temperature,
        show_outcome=not a.blind,
        seed=settings.seed,
    )


def transcripts_of(
    store: Store, passed: Mapping[str, bool], trajectory_tokens: int
) -> tuple[list[Transcript], list[str]]:
    """(conversations of the trajectories in `passed`, in its order; ids of those that cannot be compacted to
    `trajectory_tokens`)."""
    rows = {row.id: row.messages for row in store.trajectories(None, id=list(passed))}
    fitting, too_long = [], []
    for trajectory, outcome in passed.items():
        try:
            compact(rows[trajectory], trajectory_tokens, trajectory)
        except LabelError:
            too_long.append(trajectory)
        else:
            fitting.append(Transcript(trajectory, rows[trajectory], outcome))
    return fitting, too_long


@dataclass(frozen=True)
class LlmAnalyst:
    """Labels a round's trajectories with a language model, and has it judge what was selected. `text` is the target's
    policy and tools, as they stand in front of every request (`context_text`)."""

    client: Analyst
    stored: StoredRound
    settings: MiningSettings
    text: str

    @classmethod
    def of(cls, context: Context) -> LlmAnalyst:
        """The analyst of an open round."""
        return cls(context.analyst, context.stored, mining_settings(context.settings), context_text(context.target))

    def contrast(self, frame: pd.DataFrame, required: int) -> ContrastResult:
        """Discover and label, store all of it, and return the figures of the stage.

        `frame` holds the outcomes [trajectory_id, passed]. Where there is nothing to contrast (one outcome alone, or
        what the model refuses, to name candidates or to label, leaves one alone) nothing is found and stored. Raises
        what `label` raises where fewer than `required` runs can be complete: nothing could be selected.
        """
        outcomes = {str(r.trajectory_id): bool(r.passed) for r in frame.itertuples()}
        transcripts, too_long = transcripts_of(self.stored.store, outcomes, self.settings.trajectory_tokens)
        if len({t.passed for t in transcripts}) < 2:
            return self._nothing(too_long, [], [])
        found = discover_readable(self.client, transcripts, self.text, self.settings)
        candidates, unread = found.candidates, list(found.refused)
        if not candidates:
            return self._nothing(too_long, [], unread)
        labelling = label(self.client, transcripts, candidates, self.text, self.settings, required)
        filtered = list(labelling.filtered)
        if labelling.labels["passed"].nunique() < 2:
            return self._nothing(too_long, filtered, unread)
        complete = self.settings.runs - len({run for run, _ in labelling.refused} | set(labelling.waiting))
        store, round_id = self.stored.store, self.stored.round.id
        store_candidates(store, round_id, NAME, candidates, {c.name: c.request_hash for c in candidates})
        store_labels(store, round_id, labelling.labels)
        kappa, by_capability = agreement(labelling.labels)
        result = ContrastResult(
            analyst=NAME,
            model=self.client.settings.model,
            candidates=sorted(c.name for c in candidates),
            labels=len(labelling.labels),
            runs=complete,
            refused={str(run): why for run, why in labelling.refused},
            too_long=too_long,
            filtered=filtered,
            unread=unread,
            kappa=kappa,
            kappa_by_capability=by_capability,
            spend=self.stored.spent(),
        )
        _show(candidates, result)
        return result

    def _nothing(self, too_long: list[str], filtered: list[str], unread: list[str]) -> ContrastResult:
        """The result where failures and successes do not stand side by side."""
        return ContrastResult(
            analyst=NAME,
            model=self.client.settings.model,
            candidates=[],
            labels=0,
            too_long=too_long,
            filtered=filtered,
            unread=unread,
            spend=self.stored.spent(),
        )

    def judge_fits(self, selections: Sequence[CapabilitySelection], passed: Mapping[str, bool]) -> dict[str, str]:
        """Ask the judges about every selected capability, and store what they say. The names that no environment could
        train, with the reason."""
        store, unfit = self.stored.store, dict[str, str]()
        # All of them, not the evidence alone: they show whether the target's user answers questions.
        transcripts, _ = transcripts_of(store, passed, self.settings.trajectory_tokens)
        for selection in selections:
            row = store.row(CapabilityRow, round_id=self.stored.round.id, name=selection.name)
            if not selection.selected or row is None:
                continue
            evidence = [trajectory for trajectory, _ in selection.evidence[:5]]
            found = MinedCapability(selection.name, row.definition, (), (), "")
            fit = judge_fit(self.client, found, evidence, transcripts, self.text, self.settings)
            note = fit.reason if fit.trainable else f"{fit.cause.replace('_', ' ')}: {fit.reason}"
            store.put([replace(row, trainable=fit.trainable, note=note)], replace=True)
            if not fit.trainable:
                unfit[selection.name] = f"No environment could train it ({note})"
        return unfit


def _show(candidates: Sequence[MinedCapability], result: ContrastResult) -> None:
    """Artifacts of the stage: agreement per capability, and what it cost."""
    kappas = result.kappa_by_capability
    show(
        create_table_artifact,
        key="candidates",
        description="Candidate capabilities, and how far the labelling runs agree on each (Fleiss' kappa)",
        table=[
            {"capability": c.name, "kappa": kappa_text(kappas.get(c.name)), "definition": c.definition}
            for c in candidates
        ],
    )
    spend = result.spend
    lines = [
        f"{result.labels} labels in {result.runs} complete runs by {result.model}.",
        f"Fleiss' kappa over all pairs: {kappa_text(result.kappa)}.",
        f"Cost so far: {spend['calls']:.0f} calls, {spend['prompt_tokens']:.0f} + {spend['sampled_tokens']:.0f} "
        f"tokens, {spend['dollars']:.4f} dollars.",
        *(f"Run {run} was refused: {why}" for run, why in result.refused.items()),
        *([f"{len(result.too_long)} trajectories were too long to label."] if result.too_long else []),
        *(
            [f"{len(result.filtered)} trajectories were refused, or got no usable reply, also alone."]
            if result.filtered
            else []
        ),
        *([f"Candidates were named without {len(result.unread)} refused trajectories."] if result.unread else []),
    ]
    show(create_markdown_artifact, key="labelling", markdown="\n\n".join(lines))


def kappa_text(kappa: float | None) -> str:
    """A kappa to two digits, or the words that say it is undefined."""
    return "undefined" if kappa is None else f"{kappa:.2f}"
