"""Stage 7, first half, `trace-agent stage challenge`: each new adapter, alone, against what answers users today
(method, section 7; the rules are `tasks.measuring.gate_rules`).

The release that was live when the round began and each new adapter play the same validation tasks with the same seeds.
An adapter plays the tasks of its own families, and passes when it is better there than the live release. What it would
cost to be chosen wrongly on others is known from the diagnosis tasks that `route` has it play. The rules are stored,
with their hash, before the first of these episodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prefect.artifacts import create_table_artifact

from db import AdapterRow, AdapterState, GatePlanRow, LookRow, VerdictRow, row_id
from environments.contract import TargetTask
from errors import StoreError
from tasks.gating.judging import look_at, rules_of
from tasks.measuring.decisions import CapabilityDecision
from tasks.measuring.gate_plan import GatePlan, Look, p_text, rules_sha256
from tasks.measuring.gate_rules import even_shares, judge_capabilities
from tasks.measuring.lineup import Trials, lineup_of, members_of, play_alone, play_lineup
from tasks.measuring.statistics import align, tasks_needed
from tasks.round.adapters import own_adapter, registered
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, RegisterResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.environments import families_of
from tasks.tracking.versions import log_decision
from tasks.unattended.prefect_pages import show

SPLIT = "validation"


@stage("challenge", title="adapters against the live release")
def challenge(context: Context) -> ChallengeResult:
    """Store the plan, play, and judge every adapter that the round registered."""
    capabilities = registered(context.stored)
    if not capabilities:
        return ChallengeResult(skipped="no capability was trained")
    own = {c: families_of(context, c) for c in capabilities}
    look = look_at(context, SPLIT)
    further = _further(context, own, look)
    split, trials = context.tasks(SPLIT), context.settings.evaluation.validation_trials
    more = context.drawing.further(further)
    further = dict(Counter(t.family for t in more))  # a family may have fewer left
    tasks = [*split, *more]
    plan = _plan(context, own, (split, more), look)
    lineup = lineup_of(context, context.incumbent)
    live_ids = play_lineup(context, lineup, Trials(tasks, trials, context.seed), SPLIT).ids
    live = outcomes(context.store, live_ids, lost=True)
    alone_ids, pairs = {}, {}
    for capability in capabilities:
        mine = _own_tasks(own[capability], split, more)
        alone_ids[capability] = _alone(context, capability, mine, trials) if mine else []
        alone = outcomes(context.store, alone_ids[capability], lost=True)
        pairs[capability] = align(live[live["task"].isin([t.id for t in mine])], alone)
    spent = Look(look.alpha, look.number)
    decisions = judge_capabilities(pairs, own, rules_of(context), spent, _gains(context, own))
    for capability, decision in decisions.items():
        _store(context, capability, decision)
    show(
        create_table_artifact,
        key="challenge",
        description="Each new adapter, alone, against the live release on validation",
        table=[
            {
                "capability": c,
                "verdict": str(d.verdict),
                "points": round(d.difference.points, 1) if d.difference else "",
                "p (Holm)": p_text(d.adjusted_p, 4) if d.adjusted_p is not None else "",
                "reasons": " ".join(d.reasons),
            }
            for c, d in decisions.items()
        ],
    )
    return ChallengeResult(
        further=further,
        live_ids=live_ids,
        alone_ids=alone_ids,
        verdicts={c: str(d.verdict) for c, d in decisions.items()},
        passed=[c for c, d in decisions.items() if d.passed],
        look=look.number,
        alpha=look.alpha,
        plan=plan,
    )


def _gains(context: Context, capabilities: Iterable[str]) -> dict[str, float]:
    """Points that each adapter gained on fresh seeds of its own environment over the best that answers today."""
    after = {c: context.result(RegisterResult, c).adapter_success for c in capabilities}
    return {c: round(100 * (success - _before(context, c)), 6) for c, success in after.items()}


def _before(context: Context, capability: str) -> float:
    """Success in a capability's environment of the best that may answer its tasks today, as far as it was measured: the
    base and the champion on the adapter's fresh seeds, and other members of the live release where the training
    compared them to begin from one. What the round itself has trained is not live and does not count."""
    measured, live = context.result(RegisterResult, capability), set(members_of(context.incumbent).values())
    starts = [s for s in context.result(TrainResult, capability).starts if s.capability != capability]
    known = [measured.base_success, measured.champion_success]
    known += [s.success if s.own is None else s.own for s in starts if s.adapter in live]
    return max(success for success in known if success is not None)


def _further(context: Context, own: Mapping[str, Sequence[str]], look: LookRow) -> dict[str, int]:
    """How many more validation tasks of which family find the gains seen on fresh seeds with 80 % power, at most
    `evaluation.own_tasks` a capability in all. A family of several capabilities gets what the one needs that needs
    most. None where the target cannot draw, the families are not known, or nothing was gained."""
    s, gains = context.settings.evaluation, _gains(context, own)
    there = Counter(t.family for t in context.tasks(SPLIT))
    further: dict[str, int] = {}
    for capability, families in own.items():
        gain = min(100.0, gains[capability])
        if not look.draw or not families or gain <= 0:
            continue
        before = _before(context, capability)
        needed = tasks_needed(gain, before, s.validation_trials, look.alpha / len(own))
        short = min(needed, s.own_tasks) - sum(there[f] for f in families)
        if short > 0:
            each = math.ceil(short / len(families))
            further |= {f: max(each, further.get(f, 0)) for f in families}
    return further


def _plan(
    context: Context, own: Mapping[str, Sequence[str]], tasks: tuple[Sequence[TargetTask], ...], look: LookRow
) -> str:
    """Store what the gate will decide by; the hash of it. `tasks` are the split's and the further ones. Raises
    `StoreError` when another plan is stored already."""
    plan = GatePlan(
        rules_of(context),
        {c: tuple(families) for c, families in own.items()},
        tuple(t.id for part in tasks for t in part),
        context.settings.evaluation.validation_trials,
        look.number,
        bool(look.draw),
        _gains(context, own),
        tuple(t.id for t in tasks[1]),
    )
    against = context.incumbent.number if context.incumbent else 0
    rules = {**plan.as_json(), "split": SPLIT, "seed": context.seed, "against": against}
    row = GatePlanRow(round_id=context.round.id, sha256=rules_sha256(rules), rules=rules)
    context.store.put([row])
    stored = context.store.row(GatePlanRow, round_id=context.round.id)
    if stored is None or stored.sha256 != row.sha256:
        raise StoreError(
            f"round {context.round.number} was to be judged by the rules {stored.sha256[:12] if stored else ''}, which "
            f"were stored before its first evaluation episode; they are {row.sha256[:12]} now. Set them back, or begin "
            "another round with --fresh"
        )
    return row.sha256


def _own_tasks(own: Sequence[str], split: Sequence[TargetTask], more: Sequence[TargetTask]) -> list[TargetTask]:
    """The tasks that an adapter is judged on: of its own families, with further ones where these may count; the split
    where its families are not known."""
    if not own:
        return list(split)
    counted = [*split, *more] if even_shares(own, {t.family for t in split}, {t.family for t in more}) else split
    return [t for t in counted if t.family in own]


def _alone(context: Context, capability: str, tasks: Sequence[TargetTask], trials: int) -> list[str]:
    """Episodes of the adapter without a router."""
    adapter = own_adapter(context.stored, capability)
    return play_alone(context, capability, adapter, Trials(tasks, trials, context.seed), SPLIT)


def _store(context: Context, capability: str, decision: CapabilityDecision) -> None:
    """Keep the verdict where people look for it, and close what did not pass. Done again it changes nothing."""
    identity = own_adapter(context.stored, capability)
    context.store.put(
        [
            VerdictRow(
                round_id=context.round.id,
                subject=capability,
                capability_id=row_id(context.round.id, capability),
                verdict=str(decision.verdict),
                points=decision.difference.points if decision.difference else None,
                p=decision.difference.p if decision.difference else None,
                p_holm=decision.adjusted_p,
                mde=decision.mde,
                reasons=list(decision.reasons),
            )
        ],
        replace=True,
    )
    row = context.store.row(AdapterRow, id=identity)
    assert row is not None
    assert row.registered_version is not None, "only registered adapters are judged"
    log_decision(context.registry, capability, row.registered_version, decision)
    if not decision.passed and row.state == AdapterState.REGISTERED:
        context.store.set_state(AdapterRow, identity, AdapterState.REJECTED)
