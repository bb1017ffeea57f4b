"""The order of a round's stages, which stands here alone: find what is lacking, practise it capability by capability,
prove it and tell. Each stage is a task that does what the store says is owed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from db import GENERALIST
from errors import ConfigurationError, EpisodesSpent
from flows.approval import ask_approval
from flows.train_apart import apart, at_once, train_together
from tasks.calibrate import calibrate, pays_for
from tasks.challenge import challenge
from tasks.contrast import contrast
from tasks.evaluate import evaluate, test
from tasks.gate import gate
from tasks.register import register
from tasks.report import report
from tasks.rollout import rollout
from tasks.round.context import Context
from tasks.round.results import SelectResult, StageResult, TrainResult
from tasks.round.stage import Stage
from tasks.route import route
from tasks.select import select
from tasks.synthesis.learning.generalist import comes_first, specialists, store_generalist
from tasks.synthesis.starting import training_order
from tasks.synthesize import synthesize, withdraw
from tasks.train import train

FIND = (rollout, contrast, select)
PRACTISE = (synthesize, calibrate, train, register)
PROVE = (challenge, route, evaluate, gate, test, report)
STAGES = tuple(stage.name for stage in (*FIND, *PRACTISE, *PROVE))

# A stage's name, and its results by capability ("": the round's).
Done = tuple[str, Mapping[str, StageResult]]


def check_name(stage: str) -> None:
    """Raise `ConfigurationError` for a name that is no stage's."""
    if stage not in STAGES:
        raise ConfigurationError(f"there is no stage {stage!r}; choose from {', '.join(STAGES)}")


def stages(context: Context, last: str = STAGES[-1]) -> Iterator[Done]:
    """Each stage of the round up to `last`, as it is done.

    Capabilities are practised in order of selection until `selection.most` have come through to a registered adapter:
    those that are still wanted go through each stage together, and where one falls out the next takes its place. One
    whose episodes the round's budget does not pay for (`Context.budget`) falls out, too. The generalist comes last, or
    before anything is mined, and is mined itself (`tasks/synthesis/learning/generalist.py`).
    """
    yield from _until(_found(context, last), last)
    if last in {stage.name for stage in FIND}:
        return
    yield from _until(_practised_in_turn(context), last)
    if last in {stage.name for stage in PRACTISE}:
        return
    yield from _until(_proven(context), last)


def _until(done: Iterator[Done], last: str) -> Iterator[Done]:
    """What is done up to the stage `last`. One that no capability came to does not count as done."""
    for name, results in done:
        yield name, results
        if name == last and results:
            return


def _found(context: Context, last: str) -> Iterator[Done]:
    for stage in FIND:
        results: dict[str, StageResult] = {"": stage(context.round.id)}
        if stage.name == rollout.name and last != rollout.name and comes_first(context):
            store_generalist(context, rank=None)
            *_, (_, registered) = _practised(context, [GENERALIST])
            if _through(registered):  # what it cannot do either is what is mined
                results[GENERALIST] = FIND[0](context.round.id, GENERALIST)
        yield stage.name, results


def _practised_in_turn(context: Context) -> Iterator[Done]:
    selected, most = context.result(SelectResult).selected, context.settings.selection.most
    waiting, wanted = specialists(selected), most
    while waiting and wanted:
        batch, waiting = waiting[:wanted], waiting[wanted:]
        results: Mapping[str, StageResult] = {}
        for name, results in _practised(context, batch):
            yield name, results
        wanted -= len(_through(results))
        # What takes another's place was not planned with the others: its calibration would take what proves them.
        waiting = [c for c in waiting if pays_for(context, c)]
    if GENERALIST in selected and not comes_first(context):
        yield from _practised(context, [GENERALIST])


def _proven(context: Context) -> Iterator[Done]:
    for stage in PROVE:
        if stage.name == gate.name:
            ask_approval(context)
        yield stage.name, {"": stage(context.round.id)}


def _practised(context: Context, capabilities: Sequence[str]) -> Iterator[Done]:
    """Each stage of practising these capabilities, with the results of those that have come so far."""
    so_far = list(capabilities)
    for stage in PRACTISE:
        results = _trained(stage, context, so_far) if stage.name == train.name else _each(stage, context, so_far)
        yield stage.name, results
        so_far = _through(results)


def _through(results: Mapping[str, StageResult]) -> list[str]:
    """The capabilities that go on to the next stage."""
    return [capability for capability, result in results.items() if result.goes_on]


def _trained(stage: Stage[[str], Any], context: Context, capabilities: Sequence[str]) -> dict[str, StageResult]:
    """The last results of capabilities' trainings. An environment that taught the wrong thing, or nothing that carries
    over, goes back for another version, which is checked, calibrated and trained on in its turn (method, section 4)."""
    in_order = training_order(context, capabilities)
    results = _each(stage, context, in_order)
    for together in [[c] for c in in_order] if at_once(context) == 1 else [in_order]:
        back = together
        while back := [c for c in back if _sent_back(context, c, results[c])]:
            results |= _made_again(context, back)
    return results


def _made_again(context: Context, capabilities: Sequence[str]) -> dict[str, StageResult]:
    """Each capability's result of the last stage that it comes to, from its environment's next version to training."""
    last, so_far = dict[str, StageResult](), list(capabilities)
    for stage in PRACTISE:
        last |= _each(stage, context, so_far)
        so_far = [c for c in so_far if last[c].goes_on]
        if stage.name == train.name:
            break
    return last


def _sent_back(context: Context, capability: str, result: StageResult) -> bool:
    """Take the environment back where its training says that it has to be; whether another version may be made."""
    return isinstance(result, TrainResult) and result.goes_back and withdraw(context, capability, result.verdict)


def _each(stage: Stage[[str], Any], context: Context, capabilities: Sequence[str]) -> dict[str, StageResult]:
    """Results of a stage of these capabilities, one after another; trainings at once, as many as are asked for."""
    if stage.name == train.name and apart(context):
        together = at_once(context)
        parts = [list(capabilities)] if together > 1 else [[c] for c in capabilities]
        return {c: result for part in parts if part for c, result in train_together(context, part).items()}
    return {capability: _paid_for(stage, context, capability) for capability in capabilities}


def _paid_for(stage: Stage[[str], Any], context: Context, capability: str) -> StageResult:
    """A capability's result of a stage; skipped where the budget of episodes does not pay for it."""
    try:
        result: StageResult = stage(context.round.id, capability)
    except EpisodesSpent as problem:
        return StageResult(skipped=str(problem))
    return result
