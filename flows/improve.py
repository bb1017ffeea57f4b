"""One round, whole: from rollouts to promoted adapters and a report. `trace-agent improve` runs this flow.

The order is all that is here; each step is a task that does what the store says is owed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel, Field

from db import RoundState
from errors import TraceError
from settings import Settings, load_settings
from tasks.calibrate import calibrate
from tasks.contrast import contrast
from tasks.evaluate import evaluate
from tasks.gate import gate_and_promote
from tasks.register import register
from tasks.report import report
from tasks.reporting.nothing_trained import nothing_trained
from tasks.rollout import rollout
from tasks.round.context import Context, current, forget, open_context, peak_gib
from tasks.round.traffic import check_stage
from tasks.route import fit_router
from tasks.select import select_capabilities
from tasks.synthesize import synthesize
from tasks.train import train


class ImproveParameters(BaseModel):
    """What a person sets for a round; everything else comes from the profile, `trace.toml` and the environment."""

    target: str | None = Field(default=None, description="what to improve on, such as shop or tau2:retail")
    profile: str | None = Field(default=None, description="laptop, gpu, smoke or dry")
    seed: int | None = Field(default=None, ge=0, description="another seed is another round")
    budget: int | None = Field(default=None, ge=1, description="rollouts of the round; derives the rest")
    base_model: str | None = Field(default=None, description="the embedded model, a folder, or a Hugging Face id")
    home: Path | None = Field(default=None, description="folder of the embedded store, registry and reports")
    fresh: bool = Field(default=False, description="start another round instead of resuming")


def code_version() -> str:
    """The package's version, with the commit where there is a checkout."""
    folder = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=5
        )
        return f"{version('trace-agent')}+{commit.stdout.strip()}"
    return version("trace-agent")


@contextlib.contextmanager
def opened(settings: Settings, fresh: bool) -> Iterator[Context]:
    """Open a round. The reason for its end is stored, whatever ends it, and stored results stay usable."""
    context = open_context(settings, fresh, code_version())
    try:
        yield context
    except (KeyboardInterrupt, SystemExit):
        context.store.finish_round(context.round.id, RoundState.INTERRUPTED, "stopped by the user", peak_gib())
        raise
    except Exception as problem:
        context.store.finish_round(
            context.round.id, RoundState.INTERRUPTED, f"{type(problem).__name__}: {problem}", peak_gib()
        )
        raise
    finally:
        forget(context.round.id)


def run_name() -> str:
    """What a run is called in Prefect's UI: the target, profile and seed that follow from its parameters."""
    given: Any = flow_run.parameters.get("params") or {}
    values = given.model_dump() if isinstance(given, ImproveParameters) else dict(given)
    values.pop("fresh", None)
    try:
        settings = load_settings(**values)
    except TraceError:  # the flow itself will say what is wrong
        return "improve"
    return f"improve {settings.target}, profile {settings.profile}, seed {settings.seed}"


@flow(name="improve", flow_run_name=run_name, log_prints=False)
def improve(params: ImproveParameters | None = None) -> dict[str, Any]:
    """Run one round, or go on with the one that was not finished. Returns the round's id and the report's path."""
    given = params or ImproveParameters()
    settings = load_settings(**given.model_dump(exclude={"fresh"}))
    check_stage(settings.target, "a whole round")
    with opened(settings, given.fresh) as context:
        round_id = context.round.id
        if settings.profile == "dry":
            return {"round": round_id, "checked": check(context)}
        result = run_round(round_id)
        context.store.finish_round(round_id, RoundState.DONE, result["reason"], peak_gib())
        return {"round": round_id, **result}


def check(context: Context) -> list[str]:
    """What the profile `dry` does: everything is opened, nothing is played."""
    tasks = {split: len(context.tasks(split)) for split in ("diagnosis", "validation", "test")}
    context.registry.champions()
    context.store.finish_round(context.round.id, RoundState.DONE, "dry run: nothing was played", peak_gib())
    return [f"target {context.round.target} with {tasks}", f"store {context.store.url}"]


def run_round(round_id: str) -> dict[str, Any]:
    """The stages in order."""
    rollout(round_id)
    contrast(round_id)
    selected = select_capabilities(round_id)["selected"]
    trained = prepare_all(round_id, selected)
    reason = "" if trained else nothing_trained(round_id, selected)
    if trained:
        fit_router(round_id, trained)
        evaluate(round_id, "validation", trained)
        promoted = gate_and_promote(round_id, trained)["promoted"]
    else:
        promoted = []
    evaluate(round_id, "test", promoted)
    return {"report": report(round_id, reason)["page"], "promoted": promoted, "reason": reason}


def prepare_all(round_id: str, selected: list[str]) -> list[str]:
    """The first capabilities, in order, that reach a registered adapter; at most `selection.most`."""
    most, trained = current(round_id).settings.selection.most, list[str]()
    for capability in selected:
        if len(trained) < most and prepared(round_id, capability):
            trained.append(capability)
    return trained


def prepared(round_id: str, capability: str) -> bool:
    """Synthesize, calibrate, train and register one capability; False when it fails on the way."""
    made = synthesize(round_id, capability)
    if not made["accepted"]:
        return False
    if not calibrate(round_id, capability, made["environment"])["accepted"]:
        return False
    result = train(round_id, capability, made["environment"])
    if result["verdict"]:
        return False
    register(round_id, capability, made["environment"], result["run"])
    return True
