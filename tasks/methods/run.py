"""Running what a seed owes: each method once, in order, its figures in the seed's file as soon as they are there.

A method that is in the file is never run again. One that was stopped goes on: its episodes, stages and checkpoints are
in the homes of the seed, and what is stored is not played again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from db import MethodAccountRow, open_store
from environments.contract import DrawsTests, TargetTask
from errors import ConfigurationError
from models.telemetry.place import at, here
from tasks.comparison.results import (
    MethodFigures,
    Point,
    SeedResult,
    alone_writing,
    changed_settings,
    check_same,
    files_of,
    machine,
    read_result,
    read_results,
    settings_hash,
    write_result,
)
from tasks.methods.catalogue import EVERY, Method
from tasks.methods.seed.answers import (
    Answer,
    first_of,
    play_answer,
    play_checkpoint,
    shift_tasks,
    successes,
    test_tasks,
)
from tasks.methods.seed.budget import TEST, Account, Lender
from tasks.methods.seed.seed_run import SeedRun, close_round, diagnose, own_home, pay

logger = logging.getLogger("trace")


def run_seed(
    run: SeedRun, names: Sequence[str], path: Path, head: SeedResult, done: Callable[[SeedResult, str], object]
) -> SeedResult:
    """Run the methods of `names` that no file of the seed beside `path` has; `head` is the file without methods. `done`
    is called with the result after each, and again for those that the files have: what could not be told before is told
    now, and where it fails the seed goes on. Raises `ConfigurationError`, before anything is played, for files of the
    folder that cannot stand in one table with it: other data, settings, budget or tasks."""
    files = {file: read_result(file) for file in files_of(path)}
    check_same([head, *files.values(), *read_results(path.parent, head.target)])
    result, there = files.get(path, head), {name: file for file in files.values() for name in file.methods}
    for name in names:
        if name in there:
            logger.info("%s: there already%s", name, "; --curve measures none of its checkpoints" if run.points else "")
            _tell(done, there[name], name)
            continue
        logger.info("%s: begins", name)
        with at(replace(here(), of_method=name)):
            figures = run_method(run, name).model_copy(update={"commit": head.commit})
        with alone_writing(path):  # other processes write their methods of the seed there meanwhile
            if path.is_file():
                result = read_result(path)
                check_same([head, result])
            result = in_order(result.with_method(name, figures))
            write_result(path, result)
        _tell(done, result, name)
    return result


def in_order(result: SeedResult) -> SeedResult:
    """The result with its methods in the catalogue's order, in which tables have them, whichever ended first."""
    known = [*EVERY, *result.methods]  # a file may have one of another version
    return result.model_copy(update={"methods": {n: result.methods[n] for n in known if n in result.methods}})


def _tell(done: Callable[[SeedResult, str], object], result: SeedResult, name: str) -> None:
    """Call `done`. The figures are in the seed's file, so that a server that is away, or takes no such name, is no
    reason to end a seed of hours."""
    try:
        done(result, name)
    except Exception as problem:
        logger.warning(
            "%s: MLflow did not take its figures (%s: %s); they are in the seed's file, and the same command logs them",
            name,
            type(problem).__name__,
            problem,
        )


def head_of(run: SeedRun, command: str, commit: str) -> SeedResult:
    """A seed's file before any method was run."""
    context = run.context
    return SeedResult(
        target=context.round.target,
        data_hash=context.round.data_hash,
        seed=context.settings.seed,
        budget=run.episodes,
        profile=context.settings.profile,
        base=context.base.identity.base,
        revision=context.base.identity.revision,
        settings=settings_hash(context.settings),
        trials=context.settings.evaluation.trials,
        command=command,
        commit=commit,
        machine=machine(),
        drawn=isinstance(context.target, DrawsTests),
        families={task.id: task.family for task in test_tasks(context)},
        needs={task.family: list(task.capabilities) for task in test_tasks(context)},
        shift={task.id: task.family for task in shift_tasks(context)},
        changed=changed_settings(context.settings),
    )


def run_method(run: SeedRun, name: str) -> MethodFigures:
    """Make what the method makes within its budget, and measure it on the test split."""
    method = EVERY[name]
    _check_needs(run, method, name)
    if method.inherits:
        diagnose(run)
    context = run.context
    if method.changes is not None:
        context = own_home(run, method.home or name, **method.changes(run.context.settings))
    account = pay(context, name, run.episodes, method.inherits)
    if context is not run.context:
        account.lender = Lender(run.context.store, context.round.id)
    opened = [context]
    try:
        with account.working():
            answer = method.make(run, context, account)
        opened.append(answer.context)
        return measured(answer, account)
    finally:
        for own in {id(c): c for c in opened if c is not run.context}.values():
            close_round(own, back_to=run.context)


def _check_needs(run: SeedRun, method: Method, name: str) -> None:
    """Raise `ConfigurationError`, before anything is played, where what the method takes is not in the home of those
    that it needs, though the seed's file has their figures: the bare base would answer under the method's name."""
    known = _played(run, method.home) if method.needs else set()
    for need in method.needs:
        if need not in known:
            raise ConfigurationError(
                f"{name} takes the work of {need}, whose figures of seed {run.context.settings.seed} are there, but "
                "which was played in another home; give that one (--home), or another folder (--out), so that both are "
                "run"
            )


def _played(run: SeedRun, home: str) -> set[str]:
    """The methods with an account in the seed's own home, or in that of the method `home`."""
    if not home:
        return {row.method for row in run.context.store.rows(MethodAccountRow)}
    there = run.context.settings.model_copy(update={"home": run.context.settings.folder / home})
    if not (there.folder / "trace.db").is_file():  # opened, it would be made
        return set()
    with open_store(there.database_url) as store:
        return {row.method for row in store.rows(MethodAccountRow)}


def measured(answer: Answer, account: Account) -> MethodFigures:
    """Play the test split and the shift test, which no budget pays for, and add up what the method used."""
    context, paying = answer.context, answer.account or account
    tasks, trials = test_tasks(context), context.settings.evaluation.trials

    def outcomes_of(what: Answer, title: str, tasks: Sequence[TargetTask] = tasks) -> dict[str, list[float | None]]:
        found = successes(what, play_answer(what, tasks, trials, title))
        # What does not draw is played once, and every further trial would have come to the same.
        return {task: ended * trials for task, ended in found.items()} if what.scripted is not None else found

    outcomes = outcomes_of(answer, f"test ({account.method})")
    shifted = shift_tasks(context)
    beyond = outcomes_of(answer, f"shift test ({account.method})", shifted) if shifted else {}
    nested = [
        Point(count=k, outcomes=outcomes_of(first_of(answer, k), f"test ({account.method}, {k} capabilities)"))
        for k in range(len(answer.nested) + 1)
        if answer.nested
    ]
    rollouts = [
        Point(count=c.episodes, outcomes=successes(answer, play_checkpoint(answer, c, tasks, trials)))
        for c in answer.checkpoints
    ]
    paid = [i for i, purpose in paying.charged().items() if purpose != TEST]
    used = context.store.trajectory_frame(None, id=paid, columns=["prompt_tokens", "sampled_tokens"])
    rows = account.rows if answer.account is None else [*account.rows, answer.account.row]
    return MethodFigures(
        outcomes=outcomes,
        episodes=len(paid),
        purposes=paying.counts(),
        prompt_tokens=int(used["prompt_tokens"].sum()),
        sampled_tokens=int(used["sampled_tokens"].sum()),
        seconds=round(sum(row.seconds for row in rows) + answer.shared_seconds, 1),
        dollars=round(sum(row.dollars for row in rows) + answer.shared_dollars, 6),
        notes=answer.notes,
        shift=beyond,
        trained=answer.trained,
        capabilities=nested,
        rollouts=rollouts,
        reflection=None if answer.reflection is None else dict(answer.reflection),
    )
