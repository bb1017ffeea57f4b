"""`trace-agent compare-methods`: TRACE against every cheaper way at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import Base, Profile, TargetName

if TYPE_CHECKING:
    from settings import Settings

# Seeds of one comparison at most: each takes minutes to hours, and a round of every method.
MOST_SEEDS = 100
RESULTS, USED = Path("benchmarks/results"), Path("benchmarks/seeds.toml")


def compare_methods(
    target: TargetName = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="How many seeds, the first not used yet. \\[5]")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="This seed alone; may be given several times.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Episodes of every method, whoever asks for them.")] = None,
    methods: Annotated[
        str, typer.Option(help="Names with commas between; without it all but those that run only by name.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds; base, examples, grpo-target, trace.")] = False,
    curve: Annotated[int, typer.Option(min=0, help="Checkpoints of a training measured on test, for a curve.")] = 0,
    at_once: Annotated[
        int, typer.Option(min=1, help="Seeds and methods side by side, each on its share of the cores.")
    ] = 1,
    render: Annotated[bool, typer.Option("--render", help="Only draw table and page, from the files alone.")] = False,
    profile: Profile = None,
    base_model: Base = None,
    home: Annotated[Path | None, typer.Option(help="Folder in which the seeds' homes lie.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the seeds' files, of table and page.")] = RESULTS,
    used: Annotated[Path, typer.Option("--used-seeds", help="File with the seeds that may not be compared.")] = USED,
) -> None:
    """Run what is owed of every method and seed, then draw the table. What is there is not run again; what was stopped
    goes on."""
    from errors import ConfigurationError
    from settings import load_settings

    if seed and seeds is not None:
        raise ConfigurationError(
            f"--seeds {seeds} and --seed {' --seed '.join(map(str, seed))} are both given; give a number of seeds, or "
            "the seeds themselves"
        )
    given: dict[str, Any] = {
        "target": target,
        "profile": profile,
        "base_model": base_model,
        "home": home,
        "budget": budget,
    }
    settings = load_settings(**given)
    if not render:
        given["seeds"] = _fresh(seed or (), seeds or (2 if quick else 5), used)
        if budget is None:
            raise ConfigurationError("no budget is given; say how many episodes every method may play, with --budget")
        names = [name.strip() for name in methods.split(",") if name.strip()]
        _play(settings, names, quick, given | {"out": out, "points": curve, "at_once": at_once})
    _draw(settings.target, out)


def _fresh(seed: Sequence[int], count: int, used: Path) -> list[int]:
    """The seeds to compare on: those that are given, or the first `count` that are not used yet."""
    from tasks.comparison.seeds import check_seed, fresh_seeds, used_seeds

    known = used_seeds(used)
    wanted = list(seed) or fresh_seeds(count, known)
    for one in wanted:
        check_seed(one, known, used)
    return wanted


def _play(settings: Settings, names: Sequence[str], quick: bool, given: Mapping[str, Any]) -> None:
    """Run what every method owes of every seed; `given` are the parameters of the flow."""
    from flows.cli.ready import ready

    def parameters(flow: Any) -> Any:
        return flow.CompareParameters(**given, methods=names or (list(flow.QUICK) if quick else []))

    flow = ready(settings, "flows.compare_methods", lambda module: module.check(parameters(module)), round=False)
    flow.warn(parameters(flow), settings)
    flow.compare_methods(parameters(flow))


def _draw(target: str, folder: Path) -> None:
    """Print the table of the seeds' files in `folder`, and write the page beside them."""
    from tasks.comparison.page import lines, render
    from tasks.comparison.results import read_results
    from tasks.comparison.table import table_of
    from tasks.round.registry import registry_name

    results = read_results(folder, target)
    table = table_of(results)
    typer.echo("\n".join(lines(table)))
    page = folder / f"{registry_name(target)}.html"
    page.write_text(render(table, results), encoding="utf-8")
    typer.echo(f"page: {page}")
