"""A training as a job of its own (`models/training/job.py`): a process that can be ended, or one for each GPU.

    limits.training_minutes = 90        # how long one may take; 0, the default: without a limit
    devices.processes = 4               # processes that train together; 0, the default: one for each visible GPU
    devices.trainings = 2               # capabilities that are trained at once, each on its share of the machine

A call that hangs in C takes no exception, a process can be killed. What it had stored stays, and it goes on from its
last whole checkpoint. The job loads the base once more (time and memory), so with one process and no limit a training
stays in the round's own process. Where it does not, that one keeps the base alone on their GPU
(`tasks/operations/training_memory.py` counts it).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from db import open_store
from errors import BudgetExceeded, TraceError, TrainingStuck
from models.deadline import end_with_parent
from settings import MachineSettings, load_settings
from tasks.operations.devices import shares, training_processes
from tasks.operations.jobs import Stopped, raise_failure, run_job, say_failure
from tasks.operations.training_memory import made_apart
from tasks.round.context import Context
from tasks.round.registry import mlflow_failures
from tasks.round.results import TrainResult
from tasks.round.stage import RETRIES, adopt, forget
from tasks.train import train
from tasks.unattended.progress import Meter
from tasks.unattended.stalls import watched

logger = logging.getLogger("trace")
# How often a training is attempted. One that was ended is resumed, for what hung by chance does not hang again.
ATTEMPTS = 2
JOB = ("-m", "models.training.job")


def apart(context: Context) -> bool:
    """Whether trainings of the round are jobs. Where methods compete they are not: this process holds the account that
    they are paid from."""
    return context.budget is None and made_apart(context.settings)


def at_once(context: Context) -> int:
    """How many capabilities the round trains at once. Where methods compete it is one: what a training may play follows
    from what those before it have played."""
    return context.settings.devices.trainings if context.budget is None else 1


def train_together(context: Context, capabilities: Sequence[str]) -> dict[str, TrainResult]:
    """Do the stage `train` of these capabilities, each as a job and a Prefect task of its own, `devices.trainings` at a
    time. Their results, in this order.

    One that fails stops no other; raises the first's error when all are over. What the round may not take is begun by
    none. Where this process is stopped its jobs are ended.
    """
    places, stop, spent = SimpleQueue[Mapping[str, str]](), threading.Event(), list[BudgetExceeded]()
    for share in shares(context.settings):
        places.put(share)
    with mlflow_failures(context.settings, "trainings were begun"):
        _ = context.run  # jobs that look for it at the same time would begin one each
    context.rest()

    def job(round_id: str, capability: str) -> Any:
        share = places.get()
        try:
            if spent:
                raise spent[0]
            train_apart(context, capability, share=share, stop=stop)
        except BudgetExceeded as problem:
            spent.append(problem)
            raise
        except Stopped as problem:
            return Cancelled(message=str(problem))
        finally:
            places.put(share)
        return context.result(TrainResult, capability)

    one: Any = task(name=train.name, task_run_name="train {capability}", cache_policy=NO_CACHE, **RETRIES)(job)
    threads: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=context.settings.devices.trainings)
    with threads as runner:
        try:
            futures = {c: runner.submit(one, {"round_id": context.round.id, "capability": c}) for c in capabilities}
            wait([future.wrapped_future for future in futures.values()])
        except BaseException:
            stop.set()
            raise
    return _results(futures)


def _results(futures: Mapping[str, Any]) -> dict[str, TrainResult]:
    """What the tasks returned; raises the error of the first that failed, and tells those of the others."""
    results, problems = dict[str, TrainResult](), list[Exception]()
    for capability, future in futures.items():
        try:
            results[capability] = future.result()
        except Exception as problem:
            if problems:
                logger.error("the training of %s failed, too: %s: %s", capability, type(problem).__name__, problem)
            problems.append(problem)
    if problems:
        raise problems[0]
    return results


def command_of(processes: int) -> tuple[str, ...]:
    """The command of a job, up to its SPEC. `--multi_gpu` is accelerate's word for several processes of a machine;
    without a GPU they meet over gloo."""
    if processes == 1:
        return (sys.executable, *JOB)
    said = {"num_processes": str(processes), "num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}
    several = ("--multi_gpu", *(word for name, value in said.items() for word in (f"--{name}", value)))
    return (sys.executable, "-m", "accelerate.commands.launch", *several, "--main_process_port", "0", *JOB)


def train_apart(
    context: Context,
    capability: str,
    command: tuple[str, ...] = (),
    share: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Do the stage `train` of a capability in another process, or several, unless it is done. Its result is in the
    store. `share` are variables of its environment, `stop` ends it.

    Raises `TrainingStuck` when it took longer than `limits.training_minutes` twice, `Stopped`, and what the stage
    raised.
    """
    if context.found(TrainResult, capability) is not None:
        return
    minutes = context.settings.limits.training_minutes
    command = command or command_of(training_processes(context.settings))
    for attempt in range(ATTEMPTS):
        # Readable by its owner alone: the store's address may hold a password.
        with tempfile.TemporaryDirectory(prefix="training-") as folder:
            spec = Path(folder) / "spec.json"
            spec.write_text(json.dumps(spec_of(context, capability)), encoding="utf-8")
            done = run_job((*command, str(spec)), 60 * minutes or float("inf"), share or {}, stop or threading.Event())
        if done is not None:
            raise_failure(done, f"the process that trained {capability!r}")
            return
        logger.warning(
            "the training of %s took longer than limits.training_minutes = %g and was ended%s",
            capability, minutes, "; it goes on from its last checkpoint" if attempt + 1 < ATTEMPTS else "",
        )  # fmt: skip
    raise TrainingStuck(
        f"the training of {capability!r} was ended {ATTEMPTS} times after limits.training_minutes = {minutes:g}; raise "
        "it if the training was slow, or look at the log for what it waited for: its checkpoints are kept"
    )


def spec_of(context: Context, capability: str) -> dict[str, Any]:
    """The job as `models/training/job.py` takes it. Trainings at once share the turns in flight on servers."""
    s = context.settings
    settings = _settings_of(context)
    settings["policy"]["concurrency"] = max(1, s.policy.concurrency // s.devices.trainings)
    order = {"settings": settings, "round": context.round.id, "capability": capability}
    base: dict[str, Any] = {"name": s.base_model, "dtype": s.dtype, "calls": s.calls, "rows": s.rollout.rows}
    if s.devices.shard:  # larger than a GPU: it is parted where it lies
        base["host"] = True
    return {"lead": "flows.train_apart:lead", "order": order, "base": base}


def _settings_of(context: Context) -> dict[str, Any]:
    """The round's settings without the machine's, which the other process reads for itself: a key stays where it is."""
    return context.settings.model_dump(mode="json", exclude=set(MachineSettings.model_fields))


def lead(order: dict[str, Any]) -> int:
    """The other process, the first of several: do the stage, or say what went wrong in a line of JSON."""
    end_with_parent()
    settings = load_settings(**order["settings"])
    Meter.bars = settings.devices.trainings == 1
    with open_store(settings.database_url) as store:
        context = adopt(settings, store, store.round(order["round"]))
        Path(context.folder).mkdir(exist_ok=True)
        try:
            with watched(settings.limits.idle_minutes, context.folder):
                train.do(context, order["capability"])
        except TraceError as problem:
            say_failure(problem)
            return 1
        finally:
            forget(context.round.id)
    return 0
