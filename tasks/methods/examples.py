"""The cheapest prompt: worked examples drawn from what the base solved at diagnosis, behind those of the target.

One of each family in turn, in an order that the seed decides. The first 1, 2, 4 and 8 are tried on validation, once a
task; the best number is taken, none if the bare base is better. A method that cannot lose to leaving things as they are
is the one that a training has to beat.
"""

from __future__ import annotations

import random

from environments.contract import Message
from environments.picking import in_turn
from errors import ConfigurationError, EpisodesSpent
from tasks.methods.seed.answers import Answer, play_answer, success_of
from tasks.methods.seed.budget import Account
from tasks.methods.seed.prompts import Prompting, opening_tokens, worked_example
from tasks.methods.seed.seed_run import SeedRun, solved_at_diagnosis
from tasks.round.context import Context

Example = tuple[Message, ...]
NUMBERS = (1, 2, 4, 8)


def examples(run: SeedRun, context: Context, account: Account) -> Answer:
    """The best number of worked examples, or none."""
    shown = [example for _, example in worked_examples(context)]
    tasks, best, rates, notes = context.tasks("validation"), Prompting(), list[tuple[float, int]](), list[str]()
    for count in (0, *(n for n in NUMBERS if n <= len(shown))):
        tried = Answer(context, prompting=Prompting(examples=tuple(shown[:count])))
        if count and not fits(context, tried.prompting):
            notes.append(f"{count} examples leave too little of the context")
            break
        try:
            ids = play_answer(tried, tasks, 1, f"validation ({count} examples)")
        except EpisodesSpent:
            notes.append(f"the budget ended before {count} examples were tried")
            break
        rates.append((success_of(context, ids), count))
        if rates[-1][0] > max((rate for rate, _ in rates[:-1]), default=-1.0):
            best = tried.prompting
    told = ", ".join(f"{count}: {100 * rate:.1f} %" for rate, count in rates)
    return Answer(context, prompting=best, notes=(f"{len(best.examples)} examples; on validation {told}", *notes))


def fits(context: Context, prompting: Prompting) -> bool:
    """Whether the prompt leaves half of the policy's context to the conversation, and its turns can follow each
    other."""
    try:
        return opening_tokens(context, prompting) <= context.policy.context // 2
    except ConfigurationError:
        return False


def worked_examples(context: Context) -> list[tuple[str, Example]]:
    """Trajectory id and worked turns of what was solved at diagnosis and can stand in a prompt: one of each family in
    turn, in an order that the seed decides."""
    frame = solved_at_diagnosis(context)
    by_family = {
        str(family): sorted(part["id"]) for family, part in sorted(frame.groupby("family"), key=lambda g: str(g[0]))
    }
    draws = random.Random(f"examples:{context.seed}")
    for ids in by_family.values():
        draws.shuffle(ids)
    families = list(by_family)
    draws.shuffle(families)
    order = in_turn([by_family[f] for f in families])
    rows = {row.id: row for row in context.store.trajectories(None, id=order)}
    worked = [(i, worked_example(rows[i].messages)) for i in order]
    return [(i, example) for i, example in worked if example and fits(context, Prompting(examples=(example,)))]
