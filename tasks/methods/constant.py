"""One answer for every task: what a sceptic tries first, because it needs no model at all.

The candidates are whole solutions: the reference of each diagnosis task, where the target has one, and what the bare
base did where it succeeded at diagnosis. Those that occur most often are each played on validation, one episode a task;
the best answers everything. A method that does not beat it may have learnt no more than what is asked most often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from environments.contract import Action, canonical_json
from environments.validation.playing import oracle_policy, recorded
from errors import EpisodesSpent
from models.scripted import NoopPolicy, ReplayPolicy
from tasks.methods.seed.answers import Answer, play_answer, success_of
from tasks.methods.seed.budget import Account
from tasks.methods.seed.prompts import worked_example
from tasks.methods.seed.seed_run import SeedRun, solved_at_diagnosis
from tasks.round.context import Context

Solution = tuple[Action, ...]
# Candidates that are played on validation.
TRIED = 4
# Characters of a solution that a note shows.
SHOWN = 80


def constant(run: SeedRun, context: Context, account: Account) -> Answer:
    """The solution that solves most validation tasks, whatever is asked; doing nothing where there is no solution."""
    tried, notes = list[tuple[float, ReplayPolicy]](), list[str]()
    for solution in most_frequent(context):
        policy = ReplayPolicy(solution)
        try:
            ids = play_answer(Answer(context, scripted=policy), context.tasks("validation"), 1, "validation")
        except EpisodesSpent:
            notes.append(f"the budget ended after {len(tried)} solutions were tried")
            break
        tried.append((success_of(context, ids), policy))
    if not tried:
        return Answer(context, scripted=NoopPolicy(), notes=("no solution is known: nothing is done", *notes))
    rate, best = max(tried, key=lambda pair: pair[0])  # of equal ones the more frequent
    told = f"{shown(best.actions)}: {100 * rate:.1f} % on validation, best of {len(tried)}"
    return Answer(context, scripted=best, notes=(told, *notes))


def most_frequent(context: Context) -> list[Solution]:
    """The solutions that occur most often, at most `TRIED`; equal ones count as one, ids of calls aside."""
    found, counts = dict[str, Solution](), Counter[str]()
    for solution in (*references(context), *successes(context)):
        key = canonical_json([[a.content, [[c.name, c.arguments] for c in a.tool_calls]] for a in solution])
        found.setdefault(key, solution)
        counts[key] += 1
    return [found[key] for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TRIED]]


def references(context: Context) -> Iterator[Solution]:
    """The reference solution of each diagnosis task that has one."""
    environment = context.target.environment()
    try:
        for task in context.tasks("diagnosis"):
            if solution := tuple(recorded(environment, task, oracle_policy)):
                yield solution
    finally:
        environment.close()


def successes(context: Context) -> Iterator[Solution]:
    """What the base did in each diagnosis task that it solved."""
    for row in context.store.trajectories(None, id=list(solved_at_diagnosis(context)["id"])):
        turns = worked_example(row.messages)
        if solution := tuple(Action(m.content, m.tool_calls) for m in turns if m.role == "assistant"):
            yield solution


def shown(solution: Solution) -> str:
    """A solution in a few words: what is said or called, turn by turn."""
    words = [a.content or ", ".join(f"{c.name}({canonical_json(c.arguments)})" for c in a.tool_calls) for a in solution]
    told = "; ".join(words)
    return told if len(told) <= SHOWN else told[:SHOWN] + "..."
