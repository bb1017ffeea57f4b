"""`trace-agent compare-methods`: TRACE against every cheaper way at equal cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Base, Profile, TargetName

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
    methods: Annotated[str, typer.Option(help="Names with commas between; all without it.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds; base, examples, grpo-target, trace.")] = False,
    curve: Annotated[int, typer.Option(min=0, help="Checkpoints of a training measured on test, for a curve.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Seeds side by side, each on its share of the cores.")] = 1,
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
    from tasks.comparison.seeds import check_seed, fresh_seeds, used_seeds

    if seed and seeds is not None:
        raise ConfigurationError(
            f"--seeds {seeds} and --seed {' --seed '.join(map(str, seed))} are both given; give a number of seeds, or "
            "the seeds themselves"
        )
    settings = load_settings(target=target, profile=profile, base_model=base_model, home=home, budget=budget)
    if not render:
        known = used_seeds(used)
        wanted = seed or fresh_seeds(seeds or (2 if quick else 5), known)
        for one in wanted:
            check_seed(one, known, used)
        if budget is None:
            raise ConfigurationError("no budget is given; say how many episodes every method may play, with --budget")
        from flows.cli.ready import ready

        names = [name.strip() for name in methods.split(",") if name.strip()]

        def parameters(flow: typer.Typer) -> object:
            given = names or (list(flow.QUICK) if quick else [])  # type: ignore[attr-defined]
            return flow.CompareParameters(  # type: ignore[attr-defined]
                target=target, profile=profile, base_model=base_model, home=home, budget=budget, seeds=wanted,
                methods=given, out=out, points=curve, at_once=at_once,
            )  # fmt: skip

        flow = ready(settings, "flows.compare_methods", lambda module: module.check(parameters(module)), round=False)
        flow.compare_methods(parameters(flow))
    from tasks.comparison.page import lines
    from tasks.comparison.page import render as page_of
    from tasks.comparison.results import read_results
    from tasks.comparison.table import table_of
    from tasks.round.registry import registry_name

    results = read_results(out, settings.target)
    table = table_of(results)
    typer.echo("\n".join(lines(table)))
    page = out / f"{registry_name(settings.target)}.html"
    page.write_text(page_of(table, results), encoding="utf-8")
    typer.echo(f"page: {page}")
