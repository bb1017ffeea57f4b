"""Commands beside the round: measure a target, compare what was measured, select from published labels, play and
validate written environments, write the base model to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.evaluate import evaluate
from flows.cli.methods import compare_methods
from flows.cli.options import AsJson, Base, Home, printed, told

WHAT = "release@N (or N; 0: the bare base), capability@vN, an evaluation's id, or a .csv or .jsonl file of outcomes."


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (evaluate, compare, compare_methods, select, play, validate, export_model):
        app.command()(command)


def compare(
    a: Annotated[str, typer.Argument(help=WHAT)],
    b: Annotated[str, typer.Argument(help="The same, on the same tasks.")],
    target: Annotated[
        str | None, typer.Option(help="Whose releases and adapters; without it, the newest round's.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """What B does better or worse than A: paired difference with interval and p-value, the smallest difference that
    would have been found, families and pass^k. A file has the columns task, trial, success, and family if there is
    one."""
    from tasks.measuring.comparison import compare_named

    result = compare_named(a, b, target, home)
    printed(result.as_json(), as_json, "\n".join(result.lines()))


def select(
    candidates: Annotated[Path, typer.Option(help="JSON file with the candidate capabilities.")],
    runs: Annotated[Path, typer.Option(help="Folder with one JSON file per labelling run.")],
    required: Annotated[int, typer.Option(min=1, help="Runs in which a capability has to reach both thresholds.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Select capabilities from published labelling runs."""
    from tasks.mining.published import published_selection

    result = published_selection(candidates, runs, k=required)
    printed(result.as_dict(), as_json, "\n".join(result.table()))


def play(
    environment: Annotated[Path, typer.Argument(help="A written environment (.py).")],
    seed: Annotated[int, typer.Option(help="Another seed gives another scenario.")] = 0,
    level: Annotated[int, typer.Option(min=0, help="Level of difficulty; 0 is the easiest.")] = 0,
) -> None:
    """Play a written environment by hand, in the sandbox."""
    from environments.synthesized.module_files import load_module, play_by_hand

    module: Any = load_module(environment)
    try:
        play_by_hand(module.environment(), module.scenario(seed, level), input, told)
    finally:
        module.close()


def validate(environment: Annotated[Path, typer.Argument(help="A written environment (.py).")]) -> None:
    """Judge a written environment again, without a model; exit 1 when it is refused."""
    from environments.synthesized.module_files import validate_file, verdict_lines

    verdict = validate_file(environment)
    told("\n".join(verdict_lines(verdict)))
    if not verdict.accepted:
        raise typer.Exit(1)


def export_model(
    folder: Annotated[Path, typer.Argument(help="Where it is to lie; a model that lies there stays.")],
    base_model: Base = None,
) -> None:
    """Write the base model to a folder, for rounds and vLLM to have the very same weights."""
    from models.local.export import export_base
    from settings import load_settings

    settings = load_settings(base_model=base_model)
    revision = export_base(settings.base_model, folder, settings.cache)
    typer.echo(f"{settings.base_model} is in {folder}, weights {revision}")
