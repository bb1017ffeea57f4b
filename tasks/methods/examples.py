"""The cheapest prompt: worked examples drawn from what the base solved at diagnosis, behind those of the target.

One of each family in turn, in an order that the seed decides. The first 1, 2, 4 and 8 are tried on validation, once a
task; the best number is taken, none if the bare base is better. A method that cannot lose to leaving things as they are
is the one that a training has to beat.

Where TRACE may learn from reference solutions (`train.demonstrations`), a prompt may show some, too: those of diagnosis
tasks, for the families that the base never solved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from environments.contract import Generators, Message
from environments.picking import in_turn
from environments.synthesized.hints import solved
from errors import ConfigurationError, EpisodesSpent
from tasks.methods.seed.answers import Answer, play_answer, success_of
from tasks.methods.seed.budget import Account
from tasks.methods.seed.prompts import Prompting, opening_tokens, worked_example
from tasks.methods.seed.seed_run import SeedRun, solved_at_diagnosis
from tasks.round.context import Context

Example = tuple[Message, ...]
NUMBERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Worked:
    """The turns of a worked example, by the id of the trajectory or the `reference` solution that it shows."""

    id: str
    family: str
    turns: Example
    reference: bool = False


def examples(run: SeedRun, context: Context, account: Account) -> Answer:
    """The best number of worked examples, or none."""
    pool = worked_examples(context)
    shown = [worked.turns for worked in pool]
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
    said = (f"{len(best.examples)} examples; on validation {told}", *notes)
    return Answer(
        context, prompting=best, notes=(*said, *reference_notes([w.id for w in pool[: len(best.examples)]], pool))
    )


def fits(context: Context, prompting: Prompting) -> bool:
    """Whether the prompt leaves half of the policy's context to the conversation, and its turns can follow each
    other."""
    try:
        return opening_tokens(context, prompting) <= context.policy.context // 2
    except ConfigurationError:
        return False


def worked_examples(context: Context) -> list[Worked]:
    """What was solved at diagnosis and can stand in a prompt, and reference solutions for families that were not: one
    of each family in turn, in an order that the seed decides."""
    frame = solved_at_diagnosis(context)
    by_family = {str(family): sorted(part["id"]) for family, part in frame.groupby("family")}
    references = {worked.id: worked for worked in reference_examples(context, by_family)}
    for worked in references.values():
        by_family.setdefault(worked.family, []).append(worked.id)
    by_family = dict(sorted(by_family.items()))
    draws = random.Random(f"examples:{context.seed}")
    for ids in by_family.values():
        draws.shuffle(ids)
    families = list(by_family)
    draws.shuffle(families)
    order = in_turn([by_family[f] for f in families])
    rows = {row.id: row for row in context.store.trajectories(None, id=list(frame["id"]))}
    known = references | {i: Worked(i, row.family, worked_example(row.messages)) for i, row in rows.items()}
    found = [known[i] for i in order]
    return [w for w in found if w.turns and fits(context, Prompting(examples=(w.turns,)))]


def reference_examples(context: Context, without: Collection[str]) -> list[Worked]:
    """Reference solutions of diagnosis tasks, at most `train.demonstrations` of each family, `without` those of these
    families; none of a target whose references TRACE may not learn from."""
    most, counts, found = context.settings.train.demonstrations, Counter[str](), list[Worked]()
    if not most or not isinstance(context.target, Generators):
        return found
    for place, task in enumerate(context.tasks("diagnosis")):
        if task.family in without or counts[task.family] == most:
            continue
        turns = solved(context.target.environment(), task)
        if turns and turns[0].role == "user":
            counts[task.family] += 1
            found.append(Worked(f"reference-{place}", task.family, turns, reference=True))
    return found


def reference_notes(shown: Sequence[str], pool: Sequence[Worked]) -> tuple[str, ...]:
    """For a method's notes: how many of the examples with the ids `shown`, and of those that it had to choose from, are
    reference solutions; nothing where none is."""
    references = {worked.id for worked in pool if worked.reference}
    if not references:
        return ()
    chosen = sum(i in references for i in shown)
    return (
        f"reference solutions of diagnosis tasks: {chosen} of the {len(shown)} examples, "
        f"{len(references)} of the {len(pool)} to choose from",
    )
