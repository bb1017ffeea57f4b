"""TRACE against every cheaper way, seed by seed: `trace-agent compare-methods` runs this flow.

What a file has is not run again, what was stopped goes on, and each seed's file is written after every method, so a
kill costs at most what was being played.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import flow
from pydantic import Field

from db import open_store
from errors import TraceError
from flows.code_version import code_version
from flows.order import stages
from flows.session import alone_in
from models.adapters.registry import Registry
from models.deadline import end_with_parent
from models.telemetry.place import Place, at
from settings import Settings, load_settings, variable_of, writable_folder
from settings_parts import Part
from tasks.comparison.results import changed_settings, methods_there, path_of
from tasks.comparison.tracking import log_method
from tasks.methods.catalogue import EVERY, QUICK, chosen
from tasks.methods.lanes import Lane, lanes, plays_first
from tasks.methods.preflight import check_budget, check_files, check_reflection, reflects, seed_settings
from tasks.methods.run import head_of, run_seed
from tasks.methods.seed.seed_run import SeedRun, close_round, diagnose, open_round, round_beside
from tasks.operations.devices import check_at_once, check_whole, parts_of_machine
from tasks.operations.jobs import run_at_once, say_failure
from tasks.operations.without_effect import without_effect_in
from tasks.round.analyst import round_client, target_of
from tasks.round.context import Context
from tasks.round.registry import open_registry
from tasks.unattended.progress import Meter

logger = logging.getLogger("trace")
# A process of a comparison; its lines are set up before Prefect would do it.
PROCESS = (
    "import sys; from models.telemetry.logs import configure; configure(); "
    "from flows.compare_methods import main; raise SystemExit(main(sys.argv[1]))"
)
__all__ = ["QUICK", "CompareParameters", "check", "compare_methods", "warn"]


class CompareParameters(Part):
    """What a person sets for a comparison; everything else comes from the profile, `trace.toml` and the environment.
    `part_of` are all methods of the comparison where this process plays a part of them, `beside` whether it does so
    while another is at work in the seed's home."""

    target: str | None = None
    profile: str | None = None
    base_model: str | None = None
    home: Path | None = None
    budget: int
    seeds: list[int]
    methods: list[str] = Field(default_factory=list)
    points: int = 0
    out: Path
    at_once: int = 1
    part_of: list[str] = Field(default_factory=list)
    beside: bool = False

    @property
    def names(self) -> list[str]:
        """The methods that this process plays, in order."""
        return self.methods if self.part_of else chosen(self.methods)

    @property
    def title(self) -> str:
        """Of a flow run."""
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return f"{seeds}: {', '.join(self.methods)}" if self.part_of and self.methods else seeds


def check(params: CompareParameters) -> Settings:
    """The settings, once everything that can be wrong before the first episode was looked at."""
    names = params.names
    settings = load_settings(**params.model_dump(include={"target", "profile", "base_model", "home", "budget"}))
    check_whole(settings)
    check_at_once(params.at_once)
    check_reflection(settings, names)
    first = seed_settings(settings, params.seeds[0], params.budget)
    writable_folder(first.folder)
    with open_store(first.database_url) as store, closing(round_client(first, store, None)) as client:
        target = target_of(first, store, client)
    check_budget(first, target, names)
    check_files(writable_folder(params.out), first, target, names)
    return settings


def warn(params: CompareParameters, settings: Settings) -> None:
    """Say which settings have no effect in the rounds that are compared: once, where each seed may be a process."""
    if settings.devices.trainings > 1:
        logger.info(
            "devices.trainings = %d does not hold for a comparison: trainings come one after another, as what one may "
            "play follows from what those before it have played",
            settings.devices.trainings,
        )
    for said in without_effect_in(settings, chosen(params.methods)):
        logger.warning("%s", said)


@flow(name="compare-methods", flow_run_name="compare methods, {params.title}", log_prints=False)
def compare_methods(params: CompareParameters) -> list[str]:
    """Run what is owed of every seed; the files that were written, by name."""
    settings = check(params)
    registry = open_registry(settings, settings.target)
    owed = {seed: _owed(params, settings, seed) for seed in params.seeds}
    width = min(params.at_once, sum(map(len, owed.values())))
    if width > 1:
        _side_by_side(params, settings, owed, width)
    else:
        for seed in params.seeds:
            with at(Place(seed=str(seed))):
                _play(params, settings, registry, seed)
    return [path_of(params.out, settings.target, seed).name for seed in params.seeds]


def _owed(params: CompareParameters, settings: Settings, seed: int) -> list[Lane]:
    """The lanes of a seed with what no file has."""
    there = methods_there(path_of(params.out, settings.target, seed))
    return lanes([name for name in params.names if name not in there and not plays_first(name)])


def _play(params: CompareParameters, settings: Settings, registry: Registry, seed: int) -> None:
    """Run what one seed owes. Raises `ConfigurationError` where another process does."""
    of_seed = seed_settings(settings, seed, params.budget)
    with nullcontext() if params.part_of else _alone_on(of_seed), _opened(of_seed, params) as context:
        run = SeedRun(context, params.budget, play_round, params.points)
        path, every = path_of(params.out, settings.target, seed), params.part_of or params.names
        head = head_of(run, command_of(settings, seed, params.budget, every, params.points), code_version())
        if params.part_of and any(EVERY[name].inherits for name in set(every) - methods_there(path)):
            diagnose(run)  # before the lanes begin, which take it from here
        run_seed(run, params.names, path, head, lambda result, name: log_method(registry, result, name))


def _alone_on(of_seed: Settings) -> AbstractContextManager[None]:
    """Hold a seed's home. Raises `ConfigurationError` when another comparison does."""
    busy = f"another comparison plays seed {of_seed.seed} in {of_seed.folder}; wait for its end, or give another --home"
    return alone_in(writable_folder(of_seed.folder), busy)


@contextmanager
def _opened(of_seed: Settings, params: CompareParameters) -> Iterator[Context]:
    """The seed's round: begun or gone on with, or where another process is at work on it, to take from."""
    if params.beside:
        with round_beside(of_seed) as context:
            yield context
        return
    context = open_round(of_seed)
    try:
        yield context
    finally:
        close_round(context)


def _side_by_side(
    params: CompareParameters, settings: Settings, owed: Mapping[int, Sequence[Lane]], width: int
) -> None:
    """Each seed's beginning, and then each of its lanes, as a process, and a flow run, of its own: two of one thread
    play more than one of two threads. One that fails stops no other seed, and its error is raised when all are over."""
    commands, after, names = dict[str, tuple[str, ...]](), dict[str, list[str]](), params.names

    def part(seed: int, methods: Sequence[str], beside: bool = False) -> tuple[str, ...]:
        given = {"seeds": [seed], "at_once": 1, "methods": [*methods], "part_of": names, "beside": beside}
        return sys.executable, "-c", PROCESS, params.model_copy(update=given).model_dump_json()

    with ExitStack() as held:
        for seed, found in owed.items():
            held.enter_context(_alone_on(seed_settings(settings, seed, params.budget)))
            first, waiting = f"seed {seed}", {name for lane in found for name in lane.methods}
            commands[first] = part(seed, [name for name in names if name not in waiting])
            called = {lane.home: f"{first}: {lane.name}" for lane in found}
            for lane in found:
                commands[called[lane.home]] = part(seed, lane.methods, bool(lane.home))
                after[called[lane.home]] = [first, *(called[home] for home in lane.after)]
        lines = {"PREFECT_LOGGING_EXTRA_LOGGERS": os.environ.get("PREFECT_LOGGING_EXTRA_LOGGERS", "")}
        run_at_once(commands, [place | lines for place in parts_of_machine(width)], after)


def play_round(context: Context, last: str = "gate") -> None:
    """A round's stages up to `last`: the test split is measured for every method alike, afterwards."""
    for _ in stages(context, last):
        pass


def command_of(settings: Settings, seed: int, budget: int, names: Sequence[str], points: int = 0) -> str:
    """The command that runs this seed again, with the settings that differ from the profile's as variables, `points` of
    each curve and without a folder of this machine."""
    changed = changed_settings(seed_settings(settings, seed, budget), reflects(names)).items()
    given = "".join(f"{variable_of(n)}={shlex.quote(_read_as(v))} " for n, v in changed)
    model = Path(settings.base_model).name if Path(settings.base_model).is_dir() else settings.base_model
    return given + (
        f"trace-agent compare-methods --target {settings.target} --profile {settings.profile} --base-model "
        f"{shlex.quote(model)} --seed {seed} --budget {budget} --methods {','.join(names)}"
        + (f" --curve {points}" if points else "")
    )


def _read_as(value: Any) -> str:
    """A setting as its variable holds it; nothing is 0, as upper_layers has it."""
    return "0" if value is None else value if isinstance(value, str) else json.dumps(value)


def main(order: str) -> int:
    """One of several processes: play the part that `order` names; an error is a line of JSON."""
    end_with_parent()
    Meter.bars = False
    try:
        compare_methods(CompareParameters.model_validate_json(order))
    except TraceError as problem:
        say_failure(problem)
        return 1
    return 0
