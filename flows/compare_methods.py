"""TRACE against every cheaper way, seed by seed: `trace-agent compare-methods` runs this flow.

What a file has is not run again, what was stopped goes on, and each seed's file is written after every method, so a
kill costs at most what was being played.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from prefect import flow
from pydantic import BaseModel

from db import open_store
from flows.improve import code_version, stages
from settings import Settings, load_settings, writable_folder
from tasks.comparison.results import path_of
from tasks.comparison.tracking import log_method
from tasks.methods.catalogue import QUICK, chosen
from tasks.methods.preflight import check_budget, check_files, seed_settings
from tasks.methods.run import head_of, run_seed
from tasks.methods.seed_run import SeedRun, close_round, open_round
from tasks.operations.devices import check_whole
from tasks.round.analyst import round_client, target_of
from tasks.round.context import Context
from tasks.round.registry import open_registry

logger = logging.getLogger("trace")
__all__ = ["QUICK", "CompareParameters", "check", "compare_methods"]


class CompareParameters(BaseModel):
    """What a person sets for a comparison; everything else comes from the profile, `trace.toml` and the environment."""

    target: str | None = None
    profile: str | None = None
    base_model: str | None = None
    home: Path | None = None
    budget: int
    seeds: list[int]
    methods: list[str] = []
    points: int = 0
    out: Path


def check(params: CompareParameters) -> Settings:
    """The settings, once everything that can be wrong before the first episode was looked at."""
    names = chosen(params.methods)
    settings = load_settings(**params.model_dump(include={"target", "profile", "base_model", "home", "budget"}))
    check_whole(settings)
    first = seed_settings(settings, params.seeds[0], params.budget)
    writable_folder(first.folder)
    with open_store(first.database_url) as store, closing(round_client(first, store, None)) as client:
        target = target_of(first, store, client)
    check_budget(first, target, names)
    check_files(writable_folder(params.out), first, target)
    return settings


@flow(name="compare-methods", log_prints=False)
def compare_methods(params: CompareParameters) -> list[str]:
    """Run what is owed of every seed; the files that were written, by name."""
    settings, names = check(params), chosen(params.methods)
    if settings.devices.trainings > 1:
        logger.info(
            "devices.trainings = %d does not hold for a comparison: trainings come one after another, as what one may "
            "play follows from what those before it have played",
            settings.devices.trainings,
        )
    registry = open_registry(settings, settings.target)
    written = []
    for seed in params.seeds:
        context = open_round(seed_settings(settings, seed, params.budget))
        run = SeedRun(context, params.budget, play_round, params.points)
        path = path_of(params.out, settings.target, seed)
        try:
            head = head_of(run, command_of(settings, seed, params.budget, names), code_version())
            run_seed(run, names, path, head, lambda result, name: log_method(registry, result, name))
        finally:
            close_round(context)
        written.append(path.name)
    return written


def play_round(context: Context) -> None:
    """A round's stages up to the gate: the test split is measured for every method alike, afterwards."""
    for _ in stages(context, "gate"):
        pass


def command_of(settings: Settings, seed: int, budget: int, names: Sequence[str]) -> str:
    """The command that runs this seed again, without a folder of this machine."""
    model = Path(settings.base_model).name if Path(settings.base_model).is_dir() else settings.base_model
    return (
        f"trace-agent compare-methods --target {settings.target} --profile {settings.profile} --base-model {model} "
        f"--seed {seed} --budget {budget} --methods {','.join(names)}"
    )
