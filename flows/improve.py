"""One round, whole: from rollouts to promoted adapters and a report. `trace-agent improve` runs the flow `improve`, and
`trace-agent stage NAME` the flow `stage`, the round up to that stage.

Here a round is opened, run and left, whatever ends it; the order of its stages is in `flows/order.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from pydantic import BaseModel, Field

from db import RoundState, open_store
from errors import (
    AdapterError,
    BudgetExceeded,
    ConfigurationError,
    EnvironmentFault,
    NotApproved,
    SandboxError,
    StageHeld,
    StoreError,
    TargetBusy,
    TargetError,
    TraceError,
    TrainingError,
    TrainingMemoryError,
    TransitionError,
)
from flows.code_version import code_version
from flows.order import STAGES, Done, check_name, stages
from flows.runs.left_running import left_runs_ended, shown_as
from flows.runs.missed import makes_way
from flows.runs.one_at_a_time import alone_on, deaths_before
from settings import BUDGET, LARGEST, SCRIPTED_USER, Settings, load_settings
from settings_parts import Part
from tasks.operations.announcements import (
    deaths_announced,
    failure_announced,
    settings_announced,
    tell_failure,
    tell_start,
)
from tasks.operations.devices import check_gpu
from tasks.operations.plan import pace_of, plan_of, rehearse
from tasks.operations.training_memory import check_training, memory_text
from tasks.operations.without_effect import user_without_effect, without_effect
from tasks.rollout import rollout
from tasks.round.analyst import round_client, target_of
from tasks.round.context import Context, peak_gib
from tasks.round.preflight import preflight
from tasks.round.results import GateResult, ReportResult
from tasks.round.stage import forget, open_context
from tasks.round.traffic import check_stage
from tasks.shards.runners import check_runner
from tasks.shards.sharing import SharedPlay
from tasks.synthesis.environments import can_train
from tasks.train import train
from tasks.unattended.alive import LEASE_SECONDS, other_worker
from tasks.unattended.stalls import watched

logger = logging.getLogger("trace")


class ImproveParameters(Part):
    """What a person sets for a round; everything else comes from the profile, `trace.toml` and the environment."""

    target: str | None = Field(default=None, description="what to improve on, such as shop or tau2:retail")
    profile: str | None = Field(default=None, description="laptop, night, bfcl, gpu-small, gpu, cluster, smoke or dry")
    seed: int | None = Field(default=None, ge=0, le=LARGEST, description="another seed gives other draws")
    budget: int | None = Field(default=None, ge=1, le=LARGEST, description=BUDGET)
    base_model: str | None = Field(default=None, description="the embedded model, a folder, or a Hugging Face id")
    home: Path | None = Field(default=None, description="folder of the embedded store, registry and reports")
    fresh: bool = Field(default=False, description="start another round instead of resuming")
    dry_run: bool = Field(default=False, description="check everything and print the plan; play nothing")

    def settings(self) -> Settings:
        """All settings of the round. Raises `ConfigurationError`."""
        return load_settings(**self.model_dump(exclude=NO_SETTINGS))


NO_SETTINGS = {"fresh", "dry_run"}
# Seconds that a round waits, one after another, for a database or MLflow that is away. A stage's own tries take twelve
# seconds, and what the order reads between stages has none; a restart or a move of PostgreSQL takes minutes. None is so
# long that a round stands still for two minutes after the store is back.
PATIENCE = (15, 30, 60, 60, 60, 60)
# How Prefect ends a run that a person suspends or cancels in its UI, or whose worker is stopped.
SIGNALS = (Pause, Abort, TerminationSignal)


class RoundOutcome(BaseModel):
    """How a round ended: where its report is, what was promoted, and why nothing was trained ("" when something was).
    `checked` is what the profile `dry`, or a dry run, found; a dry run opens no round."""

    round: str
    report: str = ""
    promoted: list[str] = []
    reason: str = ""
    checked: list[str] = []


@contextlib.contextmanager
def opened(settings: Settings, fresh: bool) -> Iterator[Context]:
    """An open round. While it is open this process is known to be alive, whatever it waits for; how it ended is stored,
    and people are told of a failure. Where another process works on the round, it is for that one to do both."""
    with failure_announced(settings, bool(deployment.id)):
        check_runner(settings)
        context = open_context(settings, fresh, code_version())
    unheard = user_without_effect(settings, context.target) if settings.target_user != SCRIPTED_USER else []
    for said in [*without_effect(settings, context.parent), *unheard]:
        logger.warning("%s", said)
    context.sharing = SharedPlay(context)
    presence = context.store.presence(context.round.id, LEASE_SECONDS, shown_as())
    try:
        presence.begin()
        with (
            watched(settings.limits.idle_minutes, context.folder),
            left_runs_ended(settings, context.store, context.round.id),
        ):
            context.limits.check()
            yield context
    except (KeyboardInterrupt, SystemExit, *SIGNALS) as stop:
        _leave(context, RoundState.INTERRUPTED, _stopped_by(stop))
        raise
    except StageHeld:
        raise
    except Exception as problem:
        _leave_failed(context, problem)
        raise
    finally:
        presence.close()
        forget(context.round.id)


def _leave_failed(context: Context, problem: Exception) -> None:
    """Store that an error ended or interrupted the round, and tell people."""
    reason = f"{type(problem).__name__}: {problem}"
    state = RoundState.FAILED if _ends(problem, reason, context.round.reason) else RoundState.INTERRUPTED
    ours = True
    try:
        ours = _leave(context, state, reason)
    except StoreError as lost:  # it is the store that fails: people are told all the same
        logger.warning("it could not be stored how the round was stopped (%s)", lost)
    if ours:
        tell_failure(context, problem, state)


def _leave(context: Context, state: RoundState, reason: str) -> bool:
    """Store how the round ended when this process left it. Where another process works on the round nothing is stored,
    as that one would find its round closed, and where another has ended it that holds: False."""
    other = other_worker(context.store, context.round.id)
    if other is not None:
        logger.warning("round %d goes on in another process (%s)", context.round.number, other)
        return False
    try:
        context.store.finish_round(context.round.id, state, reason, peak_gib())
    except TransitionError as ended:
        logger.warning("round %d was ended by another process meanwhile (%s)", context.round.number, ended)
        return False
    return True


def _stopped_by(stop: BaseException) -> str:
    """Who stopped a run: no user sits before a scheduled one, so it was its worker that was stopped."""
    if isinstance(stop, Pause):
        return "suspended in Prefect's UI"
    return "stopped from outside, as with its worker" if deployment.id else "stopped by the user"


# Errors that the same work would meet again, whenever it is done.
_DETERMINISTIC = (TrainingError, TrainingMemoryError, EnvironmentFault, TargetError, AdapterError)


def _ends(problem: Exception, reason: str, before: str) -> bool:
    """Whether an error closes the round as failed, so that the next run begins another. It does where the same work
    would meet it again, and where `before`, the reason of the round's last stop, is the very same error. Else the next
    run resumes the round: what was down may be up again, and a person may have mended a setting or raised a cap."""
    # It waits for a larger limit, or for somebody, who may have to pay a provider.
    if isinstance(problem, BudgetExceeded | NotApproved | TargetBusy) or getattr(problem, "unpaid", False):
        return False
    if isinstance(problem, SandboxError) or getattr(problem, "transient", False):
        return reason == before
    return isinstance(problem, _DETERMINISTIC) or reason == before


def run_name() -> str:
    """A run's name in Prefect's UI: the flow or stage, and the target, profile and seed that its parameters give."""
    what: str = flow_run.parameters.get("stage") or "improve"
    given: Any = flow_run.parameters.get("params") or {}
    values = given.model_dump() if isinstance(given, ImproveParameters) else dict(given)
    try:
        settings = load_settings(**{k: v for k, v in values.items() if k not in NO_SETTINGS})
    except TraceError:  # the flow itself will say what is wrong
        return what
    return f"{what} {settings.target}, profile {settings.profile}, seed {settings.seed}"


@flow(name="improve", flow_run_name=run_name, log_prints=False)
def improve(params: ImproveParameters | None = None) -> RoundOutcome:
    """Run one round, or go on with the one that was not finished."""
    given = params or ImproveParameters()
    with settings_announced(bool(deployment.id), target=given.target, home=given.home):
        settings = given.settings()
    died = deaths_before(settings.target)
    try:
        with deaths_announced(settings, died), contextlib.ExitStack() as held:
            if (way := makes_way()) is not None:
                return way  # type: ignore[no-any-return]
            with failure_announced(settings, bool(deployment.id)):
                check_stage(settings.target, "a whole round")
                preflight(settings)
                check_runner(settings)
                if given.dry_run:
                    return RoundOutcome(round="", checked=rehearse(settings))
                check_machine(settings)
                held.enter_context(alone_on(settings.target))
            return play_round(settings, given.fresh, died)
    except (TargetBusy, StageHeld) as busy:
        if not deployment.id:
            raise
        cancelled: Any = Cancelled(message=str(busy))
        return cancelled  # type: ignore[no-any-return]


def check_machine(settings: Settings) -> None:
    """Raise `ConfigurationError` where trainings need what this machine has not, unless the round can train nothing.
    The target is loaded only to tell whether that is so: it may take seconds."""
    try:
        check_gpu(settings)
        check_training(settings)
    except ConfigurationError:
        with open_store(settings.database_url) as store, contextlib.closing(round_client(settings, store, None)) as c:
            if can_train(settings, target_of(settings, store, c)):
                raise


def play_round(settings: Settings, fresh: bool, deaths: dict[str, str] | None = None) -> RoundOutcome:
    """The round, whole; see `improve`. `deaths` are told with its beginning (`tell_start`)."""
    with opened(settings, fresh) as context:
        if settings.profile == "dry":
            return RoundOutcome(round=context.round.id, checked=open_everything(context))
        pace = pace_of(context.store, settings, context.target)
        plan = plan_of(settings, context.target, pace, context.parent)
        logger.info("plan: %s", plan.text())
        if plan.trains:
            logger.info("memory: %s", memory_text(settings, context.target))
        tell_start(context, deaths)
        for _ in outlasting(context):
            pass
        written = context.result(ReportResult)
        context.store.finish_round(context.round.id, RoundState.DONE, written.reason, peak_gib())
        promoted = context.result(GateResult).promoted
        page = settings.folder / written.page  # earlier versions stored an absolute path, which this leaves as it is
        return RoundOutcome(round=context.round.id, report=str(page), promoted=promoted, reason=written.reason)


def outlasting(context: Context, last: str = STAGES[-1]) -> Iterator[Done]:
    """Each stage up to `last`, as it is done. Where a store is away, the round waits (`PATIENCE`) and goes on from what
    is stored, so a stage may be given twice. Raises the store's error when it stays away. A long round may meet many
    outages: patience begins anew with each stage that no earlier pass gave, for the store was there meanwhile."""
    waits, given = iter(PATIENCE), set[tuple[str, frozenset[str]]]()
    while True:
        try:
            for name, results in stages(context, last):
                if (step := (name, frozenset(results))) not in given:
                    given.add(step)
                    waits = iter(PATIENCE)
                yield name, results
            return
        except StoreError as away:
            wait = next(waits, None)
            if not away.transient or wait is None:
                raise
            logger.warning("%s; round %d waits %d s for it, then goes on", away, context.round.number, wait)
            time.sleep(wait)


@flow(name="stage", flow_run_name=run_name)
def until(stage: str, params: ImproveParameters) -> dict[str, Any]:
    """Run the round up to and with `stage`; what is stored is not done again. Returns the stage's results as JSON, by
    capability where there is one for each."""
    check_name(stage)
    settings = params.settings()
    check_stage(settings.target, stage)
    # The generalist that comes first is trained between rollout and contrast; a model that writes makes none.
    first = settings.train.generalist_first and settings.synthesizer.kind != "llm" and stage != rollout.name
    if first or STAGES.index(stage) >= STAGES.index(train.name):
        check_machine(settings)
    with opened(settings, params.fresh) as context:
        results = dict(outlasting(context, stage)).get(stage, {})
        if stage == STAGES[-1]:
            _leave(context, RoundState.DONE, context.result(ReportResult).reason)
        else:
            _leave(context, RoundState.INTERRUPTED, f"stopped after {stage}, as asked")
        by_capability = {capability: result.model_dump(mode="json") for capability, result in results.items()}
        return {"round": context.round.id, **by_capability.get("", by_capability)}


def open_everything(context: Context) -> list[str]:
    """What the profile `dry` does in place of the stages: open target, registry and store, play nothing."""
    tasks = {split: len(context.tasks(split)) for split in ("diagnosis", "validation", "test")}
    context.registry.champions()
    context.store.finish_round(context.round.id, RoundState.DONE, "dry run: nothing was played", peak_gib())
    return [f"target {context.round.target} with {tasks}", f"store {context.store.url}"]
