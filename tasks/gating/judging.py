"""What the stages from challenge to gate have in common: the gate's levels, a round's looks at a split, and what the
rules say of its candidate. The rules themselves are pure functions (`tasks.measuring.gate_rules`)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from db import LookRow, row_id
from errors import PolicyError
from tasks.measuring.decisions import ReleaseDecision
from tasks.measuring.gate_plan import GateRules, Look, alpha_at
from tasks.measuring.gate_rules import judge_release
from tasks.measuring.statistics import align
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult
from tasks.round.rollouts import outcomes
from tasks.synthesis.environments import families_of


def rules_of(context: Context) -> GateRules:
    """The gate's levels, from the round's settings."""
    s = context.settings.evaluation
    return GateRules(alpha=s.alpha, margin=s.margin, settling=s.own_tasks)


def look_at(context: Context, split: str) -> LookRow:
    """This round's look at a split, counted once: how many there were, and what it may spend of alpha."""
    this = context.round
    drawn = this.number if context.drawing.draws(split) else 0
    looks = context.store.rows(LookRow, target=this.target, data_hash=this.data_hash, split=split, draw=drawn)
    for look in looks:
        if look.round_id == this.id:
            return look
    number = 1 + len(looks)
    alpha = context.settings.evaluation.alpha
    # Test decides nothing, so it spends nothing; a fresh draw is seen once, by the round that drew it.
    spent = 0.0 if split == "test" else alpha_at(number, alpha, drawn=bool(drawn))
    look = LookRow(
        id=row_id("look", this.id, split),
        round_id=this.id,
        number=number,
        alpha=spent,
        target=this.target,
        data_hash=this.data_hash,
        split=split,
        draw=drawn,
    )
    context.store.put([look])
    return look


def own_families(context: Context) -> dict[str, Sequence[str]]:
    """The families that each adapter is about which passed the challenge, by its capability."""
    return {c: families_of(context, c) for c in context.result(ChallengeResult).passed}


def decision_on(context: Context, evaluated: EvaluateResult) -> ReleaseDecision:
    """What the gate's rules say of the candidate, from the episodes that are stored."""
    challenged = context.result(ChallengeResult)
    return judge_release(
        pairs_of(context, evaluated.live_ids, evaluated.routed_ids),
        rules_of(context),
        Look(challenged.alpha, challenged.look),
        context.settings.evaluation.validation_trials,
        own_families(context),
        settled=pairs_of(context, evaluated.settled_live_ids, evaluated.settled_routed_ids),
        left=evaluated.left,
        further=pairs_of(context, evaluated.further_live_ids, evaluated.further_routed_ids),
    )


def pairs_of(context: Context, live: Sequence[str], routed: Sequence[str]) -> pd.DataFrame:
    """The episodes of both sides, joined by task and trial; NaN where one was lost. Without those that neither side's
    policy could answer, as a prompt that fits no context: nothing can fall there, whenever it is played."""
    sides = [outcomes(context.store, ids, lost=True) for ids in (live, routed)]
    pair = align(*sides)
    unanswered = [side[side["error_boundary"] == PolicyError.boundary] for side in sides]
    nobody = set.intersection(*({*zip(some["task"], some["trial"], strict=True)} for some in unanswered))
    return pair.loc[[key not in nobody for key in zip(pair["task"], pair["trial"], strict=True)]]
