"""Stage 2 with the `llm` analyst on a round's stored trajectories: discovery, N labelling runs, and the judge of fit.

What is asked and how it is judged stands in `tasks.mining.labelling`; here it is read from and written to the store.
Replies are kept as they come, so a stage that was killed asks only what is still owed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from db import CapabilityRow, LabelRow, row_id
from errors import LabelError, ProviderError
from tasks.mining.agreement import agreement
from tasks.mining.labelling import Labelling, MinedCapability, MiningSettings, Transcript, discover, judge_fit, label
from tasks.mining.selection import CapabilitySelection
from tasks.mining.transcripts import compact
from tasks.round.context import Context
from tasks.round.results import ContrastResult
from tasks.round.target_prompt import context_text

NAME = "llm"


def mining_settings(context: Context) -> MiningSettings:
    """Sizes of mining, from the round's settings."""
    a = context.settings.analyst
    return MiningSettings(
        candidates=a.candidates,
        runs=context.settings.selection.runs,
        batch=a.batch,
        trajectory_tokens=a.trajectory_tokens,
        temperature=a.temperature,
        show_outcome=not a.blind,
        seed=context.settings.seed,
    )


def transcripts_of(context: Context, passed: Mapping[str, bool]) -> tuple[list[Transcript], list[str]]:
    """(conversations of the trajectories in `passed`, in its order; ids of those that cannot be compacted enough)."""
    rows = {row.id: row.messages for row in context.store.trajectories(None, id=list(passed))}
    fitting, too_long = [], []
    for trajectory, outcome in passed.items():
        try:
            compact(rows[trajectory], context.settings.analyst.trajectory_tokens, trajectory)
        except LabelError:
            too_long.append(trajectory)
        else:
            fitting.append(Transcript(trajectory, rows[trajectory], outcome))
    return fitting, too_long


def contrast_by_model(context: Context, frame: pd.DataFrame) -> ContrastResult:
    """Discover and label, store all of it, and return the figures of the stage.

    `frame` holds the outcomes [trajectory_id, passed]. Raises `LabelError` where there is nothing to contrast and a
    transient `ProviderError` when too few runs are complete to select by and the model may answer later.
    """
    analyst, settings = context.analyst, mining_settings(context)
    outcomes = {str(r.trajectory_id): bool(r.passed) for r in frame.itertuples()}
    transcripts, too_long = transcripts_of(context, outcomes)
    text = context_text(context.target)
    candidates = discover(analyst, transcripts, text, settings)
    labelling = label(analyst, transcripts, candidates, text, settings)
    complete = settings.runs - len({run for run, _ in labelling.refused} | set(labelling.waiting))
    required = context.settings.selection.required
    if complete < required and labelling.waiting:
        raise ProviderError(
            f"{complete} of {settings.runs} labelling runs are complete and {required} are needed "
            f"({labelling.refused[0][1]}); run again: what was answered is kept",
            transient=True,
        )
    _store_candidates(context, candidates)
    _store_labels(context, labelling)
    kappa, by_capability = agreement(labelling.labels)
    result = ContrastResult(
        analyst=NAME,
        model=context.settings.analyst.model,
        candidates=sorted(c.name for c in candidates),
        labels=len(labelling.labels),
        runs=complete,
        refused={str(run): why for run, why in labelling.refused},
        too_long=too_long,
        kappa=kappa,
        kappa_by_capability=by_capability,
        spend=context.spent(),
    )
    _show(candidates, result)
    return result


def judge_fits(
    context: Context, selections: Sequence[CapabilitySelection], passed: Mapping[str, bool]
) -> dict[str, str]:
    """Ask the judges about every selected capability, and store what they say. The names that no environment could
    train, with the reason."""
    analyst, settings = context.analyst, mining_settings(context)
    text = context_text(context.target)
    unfit: dict[str, str] = {}
    for selection in selections:
        row = context.store.row(CapabilityRow, round_id=context.round.id, name=selection.name)
        if not selection.selected or row is None:
            continue
        evidence = [trajectory for trajectory, _ in selection.evidence[:5]]
        transcripts, _ = transcripts_of(context, {i: passed[i] for i in evidence})
        found = MinedCapability(selection.name, row.definition, (), (), "")
        fit = judge_fit(analyst, found, evidence, transcripts, text, settings)
        note = fit.reason if fit.trainable else f"{fit.cause.replace('_', ' ')}: {fit.reason}"
        context.store.put([replace(row, trainable=fit.trainable, note=note)], replace=True)
        if not fit.trainable:
            unfit[selection.name] = f"No environment could train it ({note})"
    return unfit


def _store_candidates(context: Context, candidates: Sequence[MinedCapability]) -> None:
    round_id = context.round.id
    context.store.put(
        [
            CapabilityRow(
                id=row_id(round_id, c.name),
                round_id=round_id,
                name=c.name,
                definition=c.definition,
                analyst=NAME,
                examples={
                    "failed": list(c.failed_examples),
                    "passed": list(c.passed_examples),
                    "request": c.request_hash,
                },
            )
            for c in candidates
        ]
    )


def _store_labels(context: Context, labelling: Labelling) -> None:
    round_id = context.round.id
    context.store.put(
        [
            LabelRow(
                round_id=round_id,
                run=int(r.run),
                trajectory_id=r.trajectory_id,
                capability_id=row_id(round_id, r.capability),
                label=r.label,
                weight=int(r.weight),
                request_hash=r.request_hash,
            )
            for r in labelling.labels.itertuples()
        ]
    )


def _show(candidates: Sequence[MinedCapability], result: ContrastResult) -> None:
    """Artifacts of the stage: agreement per capability, and what it cost."""
    kappas = result.kappa_by_capability
    create_table_artifact(
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
    ]
    create_markdown_artifact(key="labelling", markdown="\n\n".join(lines))


def kappa_text(kappa: float | None) -> str:
    """A kappa to two digits, or the words that say it is undefined."""
    return "undefined" if kappa is None else f"{kappa:.2f}"
