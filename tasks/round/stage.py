"""What a stage of a round is: a function of the open round, made into a Prefect task that is done once.

    @stage("select", title="select by coverage and contrast")
    def select(context: Context) -> SelectResult: ...

    select(round_id)             # opens the round, claims the stage's lease, works, stores the result

A stage that is done gives its stored result; one whose process died is taken over when its lease has run out. A process
that finds a stage held plays episodes of it, where there are some to share. Stages take ids: the round's, and the
capability's name where a stage is done for each capability.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

from prefect import task
from prefect.cache_policies import NO_CACHE

from db import ReleaseRow, Round, RoundState, Store, open_store
from db import Stage as LedgerStage
from db.values.types import utc_now
from environments.task_ids import checked_tasks
from errors import StageHeld, StoreError, TargetBusy, TraceError
from models.telemetry import tracing
from models.telemetry.logs import note_places
from models.telemetry.metrics import METRICS, serve
from models.telemetry.place import Place, at, here
from settings import SCRIPTED_USER, Settings, load_settings, writable_folder
from tasks.releases.lifecycle import live_release, publish, releases_of
from tasks.releases.lookup import check_live_base
from tasks.round.analyst import check_user, round_client, target_of
from tasks.round.context import Context, peak_gib
from tasks.round.preflight import check_analyst
from tasks.round.registry import mlflow_failures, open_registry
from tasks.round.results import StageResult
from tasks.round.stored import StoredRound
from tasks.targets.moved import refuse_moved
from tasks.unattended.alive import LEASE_SECONDS, has_ended, other_worker
from tasks.unattended.left_behind import other_settings
from tasks.unattended.stalls import pulse

P = ParamSpec("P")
R = TypeVar("R", bound=StageResult)
logger = logging.getLogger("trace")

POLL_SECONDS = 2.0

# The rounds that this process has open, by id. Prefect hands tasks ids alone, so a task has to find the round that the
# flow opened beside it: what is loaded (model, registry, servers) is loaded once a process.
_OPEN: dict[str, Context] = {}


def open_context(settings: Settings, fresh: bool = False, code_version: str = "") -> Context:
    """Check everything that can be checked before work starts, then start a round or find the one to resume."""
    folder = writable_folder(settings.folder)
    store = open_store(settings.database_url)
    with closing(round_client(settings, store, None)) as client:
        target = target_of(settings, store, client)
        tasks = checked_tasks(target)
        check_user(settings, target)
        check_analyst(settings, target, store)
    refuse_moved(store, settings.target, target.data_hash, tasks)
    parent = _parent(settings, store, target.data_hash)
    running = {r.id for r in store.rows(Round, target=settings.target, state=RoundState.RUNNING)}
    found = None if fresh else _round_to_resume(store, settings, target.data_hash, parent)
    opened = found or store.start_round(
        settings.target,
        target.data_hash,
        settings.seed,
        settings.profile,
        settings.identity(),
        code_version,
        parent.id if parent else None,
        join=not fresh,
        begun=lambda row: _set_aside(folder / row.id),
    )
    if found is None and (said := other_settings(store, opened)):
        logger.warning("%s", said)
    left = opened.id in running and other_worker(store, opened.id) is None
    context = Context(settings, store, opened, left=left)
    (folder / opened.id).mkdir(exist_ok=True)
    return _watched(context)


def _set_aside(folder: Path) -> None:
    """Keep what lies in the folder of a round that only begins under another name: it is of another database's round
    of the same number and settings, whose trainings this one would take for its own. Raises `StoreError`."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    aside = folder.with_name(f"{folder.name}-before-{utc_now():%Y%m%dT%H%M%S}")
    try:
        folder.rename(aside)
    except OSError as problem:
        raise StoreError(
            f"{folder} has files of another database's round, and cannot be renamed ({problem.strerror or problem}); "
            "move it away, then run the same command"
        ) from problem
    logger.warning(
        "the database is another than the one whose round left files in %s: they are kept as %s, which no command "
        "uses or removes",
        folder,
        aside.name,
    )


def _watched(context: Context) -> Context:
    """The context, known to this process from now on, and what it does with it seen from outside."""
    _OPEN[context.round.id] = context
    note_places()
    METRICS.began(context.round.number, context.round.target, context.round.profile)
    serve(context.settings.metrics_port)
    return context


def _parent(settings: Settings, store: Store, data_hash: str) -> ReleaseRow | None:
    """The release that a round goes on from: the live one, or the bare base (None) where there is none, and where the
    live one was proven on other data, which begins a new lineage. A promotion or rollback that died on its way to
    MLflow is completed first. Raises `ConfigurationError` where the live one stands on another base model."""
    check_live_base(store, settings.target, settings.base_model)
    live = live_release(store, settings.target)
    if releases_of(store, settings.target):
        publish(store, open_registry(settings, settings.target), settings.target)
    if live is None or live.data_hash == data_hash:
        return live
    logger.warning(
        "release %d was proven on data %s of %s, which is now %s: a new lineage begins from the bare base, and figures "
        "are not compared across the two; release %d goes on answering until something better than it is promoted",
        live.number,
        live.data_hash,
        settings.target,
        data_hash,
        live.number,
    )
    return None


def _round_to_resume(store: Store, settings: Settings, data_hash: str, parent: ReleaseRow | None) -> Round | None:
    """The newest unfinished round of the settings. One that cannot be resumed is closed as failed with the reason:
    an upgrade, other data of the target or another live release must not stop a schedule. Its trajectories are found by
    their ids. Raises `TargetBusy` where another process is at work on it: that one would find its round closed."""
    while found := store.open_round(settings.target, settings.seed, settings.profile, settings.identity()):
        reason = StoredRound(store, found).unreadable()
        if found.data_hash != data_hash:
            reason = f"the data of {settings.target} changed from {found.data_hash} to {data_hash} since it began"
        elif found.parent_id != (parent.id if parent else None) and not (parent and parent.round_id == found.id):
            reason = f"another release of {settings.target} became live since it began"
        if not reason:
            return found
        if (other := other_worker(store, found.id)) is not None:
            raise TargetBusy(
                f"round {found.number} of {settings.target} goes on in another process ({other}), and cannot "
                f"be joined: {reason}; wait for its end, or stop it first"
            )
        logger.warning("round %d is closed, and another begins: %s", found.number, reason)
        store.finish_round(found.id, RoundState.FAILED, reason)
    return None


def current(round_id: str) -> Context:
    """The context of a round, opened from the environment and the stored settings if this process has not opened it."""
    if round_id not in _OPEN:
        settings = load_settings()
        store = open_store(settings.database_url)
        row = store.round(round_id)
        merged = load_settings(
            **{
                "target_user": SCRIPTED_USER,
                **row.config,
                "home": settings.home,
                "files": settings.files,
                "database": settings.database,
                "tracking": settings.tracking,
                "policy": {**settings.policy.model_dump(), **row.config.get("policy", {"backend": "local"})},
            }
        )
        _watched(Context(merged, store, row))
    return _OPEN[round_id]


def adopt(settings: Settings, store: Store, opened: Round) -> Context:
    """The context of a round that another process has opened, with these settings."""
    _OPEN[opened.id] = Context(settings, store, opened, adopted=True)
    return _OPEN[opened.id]


def forget(round_id: str) -> None:
    """Drop a round's context from this process: close what it keeps open, take its adapters from the servers."""
    context = _OPEN.pop(round_id, None)
    if context is not None:
        context.close()


def leave(context: Context, back_to: Context | None = None) -> None:
    """Drop this context of a round, of which another home may have one with the same id: close what it keeps open. The
    id means the round that the process goes `back_to`, from now on."""
    if _OPEN.get(context.round.id) is context:
        del _OPEN[context.round.id]
    context.close()
    if back_to is not None:
        _OPEN[back_to.round.id] = back_to


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Retry condition of all tasks: only what may go away by itself is tried again."""
    try:
        state.result()
    except TraceError as problem:
        return problem.transient
    except (ConnectionError, TimeoutError):
        return True
    except Exception:  # a defect does not go away by itself
        return False
    return False


# The one rule by which all tasks of a round are tried again.
RETRIES: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [2, 10], "retry_condition_fn": is_transient}


class Stage(Generic[P, R]):
    """A stage: called with the round's id (and a capability), it gives its typed result. Made by `stage`."""

    def __init__(self, name: str, title: str, work: Callable[Concatenate[Context, P], R]) -> None:
        self.name, self._work = name, work
        self.result: type[R] = get_type_hints(work)["return"]
        if self.result.stage != name:
            raise TypeError(f"stage {name!r} returns {self.result.__name__}, the result of {self.result.stage!r}")
        _, *given = inspect.signature(work).parameters.values()

        def run(round_id: str, *args: Any, **kwargs: Any) -> R:
            return self.do(current(round_id), *args, **kwargs)

        # Prefect reads names and parameters from the function: the run's title is made of them.
        run.__name__, run.__doc__ = work.__name__, work.__doc__
        first = inspect.Parameter("round_id", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
        run.__signature__ = inspect.Signature([first, *given], return_annotation=self.result)  # type: ignore[attr-defined]
        # The ledger says what is done. Prefect's cache would take stages with equal arguments for one another.
        self._task: Any = task(name=name, task_run_name=title or name, cache_policy=NO_CACHE, **RETRIES)(run)

    def __call__(self, round_id: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the stage as a Prefect task, retried by the one rule of RETRIES."""
        result: R = self._task(round_id, *args, **kwargs)
        return result

    def do(self, context: Context, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the stage once: its stored result if it is done, else claim it, work, and store the result.

        Raises `StageHeld` when a process that is alive holds the stage, and `StoreError` where MLflow fails.
        """
        # Prefect fills in defaults: a stage of nothing in particular has the name alone.
        of = [str(given) for given in (*args, *kwargs.values()) if given != ""]
        ledger_name = ":".join([self.name, *of])
        number, capability = str(context.round.number or ""), ledger_name.partition(":")[2]
        place = replace(here(), round=number, stage=self.name, capability=capability)
        with at(place), mlflow_failures(context.settings, f"stage {ledger_name!r} was done"):
            done = self._claimed(context, ledger_name, place, lambda: self._work(context, *args, **kwargs))
        return done or context.result(self.result, *of)

    def _claimed(self, context: Context, ledger_name: str, place: Place, work: Callable[[], R]) -> R | None:
        """Claim the stage, work, and store the result; None when it is done already. While another process holds the
        stage this one plays episodes of it, or waits."""
        row = context.store.stage(context.round.id, ledger_name)
        waited, announced = 0.0, ""
        while not row.finished:
            if _claim(row):
                return self._worked(context, row, place, work)
            if context.sharing is not None and context.sharing.help():
                waited = 0.0
                continue
            owner = row.row().owner
            if waited > 2 * LEASE_SECONDS:
                raise StageHeld(
                    f"stage {ledger_name!r} is held by {owner}, which is alive; wait for it or stop that process"
                )
            if owner and owner != announced:  # once for each that holds it, not at every look
                logger.info("stage %s is held by %s; waiting for it, or for its lease", ledger_name, owner)
                announced = owner
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
        return None

    def _worked(self, context: Context, row: LedgerStage, place: Place, work: Callable[[], R]) -> R:
        """Work on the claimed stage and store its result, with what this attempt has spent."""
        pulse()
        logger.info("stage %s begins", row.name)
        began = time.perf_counter()
        model_before, environment_before = context.model.seconds, context.environment.seconds
        earlier = row.row().seconds or 0.0
        with (
            row.working(),
            context.working_on(row),
            METRICS.stage(place),
            tracing.span(row.name, {f"trace.{k}": v for k, v in place.fields().items()}, context.span),
        ):
            context.same_data()
            done = work()
            context.still_ours()  # else what another process has stored of the stage is its result
        # What the last attempt spent; what earlier ones did is known by its sum only.
        result = done.model_copy(
            update={
                "earlier_seconds": round(earlier, 3),
                "peak_gib": round(peak_gib(), 3),
                "model_seconds": round(context.model.seconds - model_before, 3),
                "environment_seconds": round(context.environment.seconds - environment_before, 3),
            }
        )
        if result.skipped:
            row.skip(result.skipped)
            logger.info("stage %s skipped: %s", row.name, result.skipped)
        else:
            row.finish(result.model_dump(mode="json"))
            logger.info("stage %s done in %.1f s", row.name, time.perf_counter() - began)
        return result


def _claim(row: LedgerStage) -> bool:
    """Claim a stage, also from a process of this machine that died while the clock was ahead of what it is now."""
    if row.claim(lease_seconds=LEASE_SECONDS):
        return True
    owner = row.row().owner
    return bool(owner and has_ended(owner)) and row.claim(lease_seconds=LEASE_SECONDS, ended=owner)


def stage(name: str, title: str = "") -> Callable[[Callable[Concatenate[Context, P], R]], Stage[P, R]]:
    """Make a function of the open round a stage. `title` is the task run's in Prefect's UI, with the parameters' names
    in braces."""

    def decorate(work: Callable[Concatenate[Context, P], R]) -> Stage[P, R]:
        return Stage(name, title, work)

    return decorate
