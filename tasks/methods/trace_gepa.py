"""`trace+gepa`: the prompt first, by GEPA with half of the budget; then TRACE, for what the prompted base still lacks.

TRACE's round stands on the target behind the new prompt: it is diagnosed again, its environments show that prompt, and
its adapters are trained behind it. It has a home of its own, where the account is GEPA's and TRACE's together.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from environments.contract import Target
from tasks.methods.answers import Answer
from tasks.methods.budget import TEST, Account, Lender
from tasks.methods.gepa import evolve
from tasks.methods.prompts import PromptedEnvironment, Prompting
from tasks.methods.seed_run import SeedRun, close_round, find_lacking, open_round, pay
from tasks.methods.trace import play_round
from tasks.rollout import rollout
from tasks.round.context import Context

NAME = "trace+gepa"


def trace_gepa(run: SeedRun, context: Context, account: Account) -> Answer:
    """TRACE on the prompt that GEPA found."""
    prompting, told = evolve(context, run.episodes // 2)
    home = context.settings.folder / "trace-gepa"
    target = behind(context.target, prompting)
    own = open_round(context.settings.model_copy(update={"home": home}), base=context.base, target=target)
    try:
        whole = pay(own, NAME, run.episodes, ())
        whole.lender = Lender(context.store, own.round.id)
        paid = account.charged()
        for purpose in sorted(set(paid.values()) - {TEST}):
            whole.admit([i for i, known in paid.items() if known == purpose], purpose)
        if not prompting.is_none:
            whole.lender = None  # the base's episodes are others behind this prompt
        with whole.working():
            rollout.do(own)
            find_lacking(own)
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
