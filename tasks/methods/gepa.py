"""GEPA (Agrawal et al., 2025, arXiv 2507.19457) over our rollouts: prompts that evolve on the diagnosis tasks and are
kept for what they do on validation tasks. The library is `gepa`; what it tries next is in `proposals.py`.

Its own state would be pickled, so it is kept nowhere: a run that was stopped begins again with the same seed, and goes
through the same candidates without playing anything again, because every episode is stored under its prompt. So it ends
by what the run itself has asked for, not by what the account has left, which an earlier process may have charged.

`trace+gepa` is the prompt first, with half of the budget; then TRACE, for what the prompted base still lacks. TRACE's
round stands on the target behind the new prompt: it is diagnosed again, its environments show that prompt, and its
adapters are trained behind it. It has a home of its own, where the account is GEPA's and TRACE's together.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar

from db import TrajectoryRow
from db.values.types import utc_now
from environments.contract import Target, TargetTask
from environments.picking import spread
from errors import PolicyError
from tasks.comparison.results import reflection_of
from tasks.methods.examples import Worked, fits, reference_notes, worked_examples
from tasks.methods.proposals import EXAMPLES, INSTRUCTIONS, SCRIPTED, Proposer, by_analyst, paid_by_others
from tasks.methods.seed.answers import Answer, play_answer
from tasks.methods.seed.budget import TEST, Account, Lender
from tasks.methods.seed.prompts import PromptedEnvironment, Prompting
from tasks.methods.seed.seed_run import SeedRun, close_round, open_round, pay
from tasks.methods.trace import play_round
from tasks.rollout import rollout
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.target_prompt import first_opening
from tasks.unattended.progress import Meter

logger = logging.getLogger("trace")
# GEPA before TRACE, in the catalogue and on its account.
TRACE_GEPA = "trace+gepa"
# Validation tasks on which candidates are kept: all are played for every candidate that its small batch prefers.
VALIDATED = 40
# Tasks of the small batch on which a candidate is first held against its parent.
BATCH = 3
# Small batches in a row for which nothing new had to be played: what is proposed is known by then.
IDLE = 50


def gepa(run: SeedRun, context: Context, account: Account) -> Answer:
    """The prompt with the highest success on the validation tasks that GEPA saw."""
    found = evolve(context, account.method, account.episodes)
    return Answer(
        context,
        prompting=found.prompting,
        notes=found.notes,
        reflection=found.reflection,
        shared_dollars=found.shared_dollars,
    )


@dataclass(frozen=True)
class Evolved:
    """The best prompt, what has to be said of it, what has reflected (`reflection_of`; None: nothing was tried), and
    the dollars of its replies that another method has paid."""

    prompting: Prompting = field(default_factory=Prompting)
    notes: tuple[str, ...] = ()
    reflection: Mapping[str, Any] | None = None
    shared_dollars: float = 0.0


def evolve(context: Context, method: str, episodes: int) -> Evolved:
    """The best prompt within `episodes`, the diagnosis among them. Raises what the model that reflects could not be
    asked for (see `Analyst.ask`), as soon as it is known."""
    from gepa import optimize

    pool = worked_examples(context)
    proposer = proposer_of(context, pool, method)
    reflection = reflection_of(context.settings)
    validation = spread(context.tasks("validation"), VALIDATED)
    diagnosis = context.result(RolloutResult).trajectories
    # A candidate is played on its parent's small batch, and where it is better on validation.
    candidate = 2 * BATCH + len(validation)
    if episodes - len(diagnosis) < len(validation) + candidate:
        return Evolved(notes=("the budget does not pay for one candidate prompt: it stays as it is",))
    with _Lines("gepa", episodes, "episodes", len(diagnosis)) as meter:
        rollouts = Rollouts(context, proposer, meter, set(diagnosis))
        adapter: Any = rollouts  # GEPA's protocol is generic in what it hands back unseen
        found: Any = optimize(
            seed_candidate={INSTRUCTIONS: proposer.original, EXAMPLES: ""},
            trainset=list(context.tasks("diagnosis")),
            valset=validation,
            adapter=adapter,
            stop_callbacks=_Spent(rollouts.asked, episodes - candidate, proposer),
            reflection_minibatch_size=BATCH,
            track_best_outputs=False,
            logger=_Quiet(),
            seed=context.seed,
        )
    if proposer.problem is not None:
        raise proposer.problem
    best = proposer.prompting(found.best_candidate)
    told = (
        f"{found.num_candidates} candidates in {found.total_metric_calls} calls; {len(best.examples)} examples, "
        f"instructions {'changed' if best.wording[0] != best.wording[1] else 'as they were'}"
    )
    shown = [i for i in found.best_candidate[EXAMPLES].split() if i in proposer.pool]
    failed = f"{proposer.unusable} of {proposer.reflections} reflections gave no usable text"
    by = f"reflection by {reflection['model'] or SCRIPTED}"
    notes = (by, *([failed] if proposer.unusable else []), told, *reference_notes(shown, pool))
    return Evolved(best, notes, reflection, paid_by_others(context.store, proposer.used, method))


def trace_gepa(run: SeedRun, context: Context, account: Account) -> Answer:
    """TRACE on the prompt that GEPA found. Behind another prompt the base's episodes are others: none is lent, and what
    GEPA has played is copied into no round, for what it cost alone."""
    found = evolve(context, account.method, run.episodes // 2)
    prompting = found.prompting
    home = context.settings.folder / "trace-gepa"
    target = behind(context.target, prompting)
    own = open_round(context.settings.model_copy(update={"home": home}), base=context.base, target=target)
    try:
        whole = pay(own, TRACE_GEPA, run.episodes, ())
        whole.lender = Lender(context.store, own.round.id if prompting.is_none else None)
        paid = account.charged()
        for purpose in sorted(set(paid.values()) - {TEST}):
            whole.admit([i for i, known in paid.items() if known == purpose], purpose)
        if not prompting.is_none:
            whole.lender = None
        account.rest()  # what a process that dies from here on has taken is kept by the other
        with whole.working():
            rollout.do(own)
            answer = play_round(run, own, whole)
        notes = (*found.notes, *answer.notes)
        return replace(
            answer,
            notes=notes,
            account=whole,
            reflection=found.reflection,
            shared_dollars=answer.shared_dollars + found.shared_dollars,
        )
    except BaseException:
        close_round(own)
        raise


def behind(target: Target, prompting: Prompting) -> Target:
    """The target with every environment behind another prompt, whose id tells its episodes from others
    (`Context.ground`)."""
    if prompting.is_none:
        return target
    found, make = copy.copy(target), target.environment
    object.__setattr__(found, "environment", lambda: PromptedEnvironment(make(), prompting))
    object.__setattr__(found, "prompt_id", prompting.id)
    return found


def proposer_of(context: Context, pool: Sequence[Worked], method: str = "gepa") -> Proposer:
    """What makes new prompts of a method: with the analyst's model where one is configured."""
    how, used = context.settings.analyst, set[str]()
    return Proposer(
        original=first_opening(context.target)[0].instructions,
        pool={worked.id: worked.turns for worked in pool},
        families={worked.id: worked.family for worked in pool},
        fits=lambda prompting: fits(context, prompting),
        draws=random.Random(f"gepa:{context.seed}"),
        rewrite=by_analyst(context.analyst, how.temperature, method, used) if how.model else None,
        used=used,
    )


@dataclass(frozen=True)
class Rollouts:
    """GEPA's adapter: a candidate is a prompt of the bare base, its score on a task the success of one episode. `asked`
    has the ids of all episodes that the run has asked for, stored or not; those stored before `began` were not played
    again."""

    context: Context
    proposer: Proposer
    meter: Meter
    asked: set[str] = field(default_factory=set)
    began: datetime = field(default_factory=utc_now)

    @property
    def propose_new_texts(self) -> Any:
        return self.proposer.propose

    def evaluate(self, batch: list[TargetTask], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """One episode a task. One that was lost to the infrastructure says nothing of the prompt: its score is the mean
        of those of the batch that ended, and 0 where none did. One that the policy itself could not answer, as where
        the prompt leaves its task no room, is a failure."""
        from gepa import EvaluationBatch

        answer = Answer(self.context, prompting=self.proposer.prompting(candidate))
        ids = play_answer(answer, list({t.id: t for t in batch}.values()), 1, "a prompt")
        rows = {row.task_id: row for row in self.context.store.trajectories(None, id=ids)}
        played = [rows[task.id] for task in batch]
        known = [0.0 if row.error_boundary == PolicyError.boundary else row.success for row in played]
        ended = [float(success) for success in known if success is not None]
        mean = sum(ended) / len(ended) if ended else 0.0
        scores = [mean if success is None else float(success) for success in known]
        new = set(ids) - self.asked
        self.asked.update(new)
        stored = sum(row.created_at < self.began for row in rows.values() if row.id in new)
        said = f"{100 * sum(scores) / len(scores):.0f} % of the last {len(scores)}"
        self.meter.advance_by(len(new), said, stored=stored)
        return EvaluationBatch(outputs=played, scores=scores, trajectories=played if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What each episode showed that was not lost, the same for every component."""
        records = [_record(row) for row in evaluated.trajectories if row.success is not None]
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


@dataclass
class _Spent:
    """Ends a run once it has asked for more than `most` episodes, so that the next candidate may not be paid for, or
    has asked for nothing new in IDLE small batches, or nothing more can be proposed. GEPA itself would count calls, of
    which many are on episodes that are stored."""

    asked: set[str]
    most: int
    proposer: Proposer
    before: int = -1
    idle: int = 0

    def __call__(self, gepa_state: Any) -> bool:
        self.idle = self.idle + 1 if len(self.asked) == self.before else 0
        self.before = len(self.asked)
        return self.before > self.most or self.idle >= IDLE or self.proposer.problem is not None


class _Lines(Meter):
    """Lines alone: the episodes of a candidate have a bar of their own."""

    bars: ClassVar[bool] = False


class _Quiet:
    """GEPA's progress, for those who ask for it."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)
