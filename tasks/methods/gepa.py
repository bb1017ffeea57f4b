"""GEPA (Agrawal et al., 2025, arXiv 2507.19457) over our rollouts: prompts that evolve on the diagnosis tasks and are
kept for what they do on validation tasks. The library is `gepa`; what it tries next is in `proposals.py`.

Its own state would be pickled, so it is kept nowhere: a run that was stopped begins again with the same seed, and goes
through the same candidates without playing anything again, because every episode is stored under its prompt.

`trace+gepa` is the prompt first, with half of the budget; then TRACE, for what the prompted base still lacks. TRACE's
round stands on the target behind the new prompt: it is diagnosed again, its environments show that prompt, and its
adapters are trained behind it. It has a home of its own, where the account is GEPA's and TRACE's together.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from db import TrajectoryRow
from environments.contract import Target, TargetTask
from environments.picking import spread
from tasks.methods.examples import fits, worked_examples
from tasks.methods.proposals import EXAMPLES, INSTRUCTIONS, SCRIPTED, Proposer, by_analyst
from tasks.methods.seed.answers import Answer, play_answer
from tasks.methods.seed.budget import TEST, Account, Lender
from tasks.methods.seed.prompts import PromptedEnvironment, Prompting
from tasks.methods.seed.seed_run import SeedRun, close_round, open_round, pay, solved_at_diagnosis
from tasks.methods.trace import play_round
from tasks.rollout import rollout
from tasks.round.context import Context
from tasks.round.progress import Meter
from tasks.round.results import RolloutResult
from tasks.round.target_prompt import first_opening

logger = logging.getLogger("trace")
# GEPA before TRACE, in the catalogue and on its account.
TRACE_GEPA = "trace+gepa"
# Validation tasks on which candidates are kept: all are played for every candidate that its small batch prefers.
VALIDATED = 40
# Tasks of the small batch on which a candidate is first held against its parent.
BATCH = 3


def gepa(run: SeedRun, context: Context, account: Account) -> Answer:
    """The prompt with the highest success on the validation tasks that GEPA saw."""
    prompting, notes = evolve(context, account.episodes)
    return Answer(context, prompting=prompting, notes=notes)


def evolve(context: Context, episodes: int) -> tuple[Prompting, tuple[str, ...]]:
    """The best prompt within `episodes`, the diagnosis among them, and what has to be said of it."""
    from gepa import optimize

    proposer = proposer_of(context)
    reflects = context.settings.analyst.model if proposer.rewrite else SCRIPTED
    validation = spread(context.tasks("validation"), VALIDATED)
    # What is the same whenever it is asked: a run that is begun again spends its calls again, on stored episodes.
    calls = episodes - len(context.result(RolloutResult).trajectories) - 2 * BATCH - len(validation)
    if calls < len(validation):
        return Prompting(), ("the budget does not pay for one candidate prompt: it stays as it is",)
    with _Lines("gepa", calls, "calls") as meter:
        adapter: Any = Rollouts(context, proposer, meter)  # GEPA's protocol is generic in what it hands back unseen
        found: Any = optimize(
            seed_candidate={INSTRUCTIONS: proposer.original, EXAMPLES: ""},
            trainset=list(context.tasks("diagnosis")),
            valset=validation,
            adapter=adapter,
            max_metric_calls=calls,
            reflection_minibatch_size=BATCH,
            track_best_outputs=False,
            logger=_Quiet(),
            seed=context.seed,
        )
    best = proposer.prompting(found.best_candidate)
    told = (
        f"{found.num_candidates} candidates in {found.total_metric_calls} calls; {len(best.examples)} examples, "
        f"instructions {'changed' if best.wording[0] != best.wording[1] else 'as they were'}"
    )
    return best, (f"reflection by {reflects}", told)


def trace_gepa(run: SeedRun, context: Context, account: Account) -> Answer:
    """TRACE on the prompt that GEPA found."""
    prompting, told = evolve(context, run.episodes // 2)
    home = context.settings.folder / "trace-gepa"
    target = behind(context.target, prompting)
    own = open_round(context.settings.model_copy(update={"home": home}), base=context.base, target=target)
    try:
        whole = pay(own, TRACE_GEPA, run.episodes, ())
        whole.lender = Lender(context.store, own.round.id)
        paid = account.charged()
        for purpose in sorted(set(paid.values()) - {TEST}):
            whole.admit([i for i, known in paid.items() if known == purpose], purpose)
        if not prompting.is_none:
            whole.lender = None  # the base's episodes are others behind this prompt
        with whole.working():
            rollout.do(own)
            answer = play_round(run, own, whole)
        return replace(answer, notes=(*told, *answer.notes), account=whole)
    except BaseException:
        close_round(own)
        raise


def behind(target: Target, prompting: Prompting) -> Target:
    """The target with every environment behind another prompt."""
    if prompting.is_none:
        return target
    found, make = copy.copy(target), target.environment
    object.__setattr__(found, "environment", lambda: PromptedEnvironment(make(), prompting))
    return found


def proposer_of(context: Context) -> Proposer:
    """What makes new prompts: with the analyst's model where one is configured."""
    solved = solved_at_diagnosis(context).set_index("id")["family"]
    pool = dict(worked_examples(context))
    model = context.settings.analyst.model
    return Proposer(
        original=first_opening(context.target)[0].instructions,
        pool=pool,
        families={i: str(solved[i]) for i in pool},
        fits=lambda prompting: fits(context, prompting),
        draws=random.Random(f"gepa:{context.seed}"),
        rewrite=by_analyst(context.analyst, context.settings.analyst.temperature) if model else None,
    )


@dataclass(frozen=True)
class Rollouts:
    """GEPA's adapter: a candidate is a prompt of the bare base, its score on a task the success of one episode."""

    context: Context
    proposer: Proposer
    meter: Meter

    @property
    def propose_new_texts(self) -> Any:
        return self.proposer.propose

    def evaluate(self, batch: list[TargetTask], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """One episode a task; 0 for one that was lost to the infrastructure."""
        from gepa import EvaluationBatch

        answer = Answer(self.context, prompting=self.proposer.prompting(candidate))
        ids = play_answer(answer, list({t.id: t for t in batch}.values()), 1, "a prompt")
        rows = {row.task_id: row for row in self.context.store.trajectories(None, id=ids)}
        played = [rows[task.id] for task in batch]
        scores = [float(row.success or False) for row in played]
        self.meter.advance_by(len(batch), f"{100 * sum(scores) / len(scores):.0f} % of the last {len(scores)}")
        return EvaluationBatch(outputs=played, scores=scores, trajectories=played if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What each episode showed, the same for every component."""
        records = [_record(row) for row in evaluated.trajectories]
        return dict.fromkeys(components_to_update, records)


def _record(row: TrajectoryRow) -> dict[str, Any]:
    failed = [check for check in row.checks if check.required and not check.passed]
    said = [f"{m['role']}: {m['content']} {m.get('tool_calls') or ''}".strip() for m in row.messages]
    feedback = "solved" if row.success else "; ".join(f"{c.name} failed. {c.detail}".strip() for c in failed)
    return {
        "Inputs": said[0] if said else "",
        "Generated Outputs": "\n".join(said[1:]),
        "Feedback": feedback or "not solved",
        "Failed checks": sorted({check.kind for check in failed}),
        "Family": row.family,
        "Solved": bool(row.success),
    }


class _Lines(Meter):
    """Lines alone: the episodes of a candidate have a bar of their own."""

    bars: ClassVar[bool] = False


class _Quiet:
    """GEPA's progress, for those who ask for it."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)
