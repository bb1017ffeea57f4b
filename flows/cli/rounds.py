"""Commands about rounds: run one, whole or up to a stage, now or on a schedule; look at those that were run; and what
rounds can improve on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import AsJson, Base, Budget, Home, Profile, Seed, TargetName, printed, result_alone
from flows.cli.ready import open_home, ready

if TYPE_CHECKING:
    from environments.targets.third_party.adapter import TargetInfo
    from settings import Settings

Which = Annotated[str | None, typer.Argument(help="Id or number; the latest by default.")]


def add_rounds(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (improve, status, report, rounds, show, targets, schedule, stage):
        app.command()(command)


def improve(
    target: TargetName = None,
    profile: Profile = None,
    seed: Seed = None,
    budget: Budget = None,
    base_model: Base = None,
    home: Home = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start another round instead of resuming.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in a row, each from what the last made live.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, play nothing.")] = False,
) -> None:
    """Run one round, whole: the rest of the one that was stopped, or the next one, from what is live today."""
    from settings import load_settings

    given: dict[str, Any] = {"target": target, "profile": profile, "seed": seed, "budget": budget}
    given |= {"base_model": base_model, "home": home}
    settings = load_settings(**given)
    logging.getLogger("trace").info(
        "round on %s, profile %s, seed %d: preparing", settings.target, settings.profile, settings.seed
    )
    from tasks.round.traffic import check_stage

    check_stage(settings.target, "a whole round")
    if dry_run:
        typer.echo("\n".join(_rehearsed(settings)))
        return
    flow = ready(settings, "flows.improve")
    # What is not given stays None, so that a later change of a profile is seen by a schedule too.
    params = flow.ImproveParameters(**given, fresh=fresh)
    for _ in range(rounds):
        result = flow.improve(params)
        params = params.model_copy(update={"fresh": False})
        if result.report:
            _print_figures(result.round, home)
            typer.echo(f"report: {result.report}")
        else:
            typer.echo("\n".join(result.checked))


def _rehearsed(settings: Settings) -> list[str]:
    """The plan of a round, once everything that can be checked before it is right."""
    from tasks.round.preflight import preflight

    preflight(settings)  # before the imports below, which take longer
    from tasks.operations.plan import rehearse
    from tasks.shards.runners import check_runner

    check_runner(settings)
    return rehearse(settings)


def _print_figures(round: str | None, home: Path | None) -> None:
    from tasks.reporting.lookup import figures_by_key
    from tasks.reporting.summary import print_summary

    print_summary(figures_by_key(*open_home(home), round))


def status(round: Which = None, home: Home = None, as_json: AsJson = False) -> None:
    """The figures of a round."""
    if not as_json:
        _print_figures(round, home)
        return
    from tasks.reporting.lookup import figures_by_key

    printed(figures_by_key(*open_home(home), round).as_json(), as_json, "")


def report(round: Which = None, home: Home = None, as_json: AsJson = False) -> None:
    """Where the report of a round is; written again when the page is gone, or is of the round while it ran."""
    from models.objects import files_of
    from tasks.reporting.figures import GONE
    from tasks.reporting.lookup import EPISODES, FIGURES, REPORT, figures_by_key

    settings, store = open_home(home)
    figures = figures_by_key(settings, store, round)
    files = files_of(settings)
    page, whole, _ = (files.fetch(f"{figures.round}/{name}") for name in (REPORT, FIGURES, EPISODES))
    if figures.stopped == GONE and page.is_file():  # it has what could not be written again
        logging.getLogger("trace").warning("%s is as it was made, and is not written again: %s", page, GONE)
    elif not (page.is_file() and whole.is_file()):  # a page without figures is of a round that was still running
        from tasks.episodes.pages import write_report

        write_report(settings, store, figures)
    printed({"report": str(page)}, as_json, str(page))


def rounds(home: Home = None, as_json: AsJson = False) -> None:
    """All rounds."""
    from textwrap import shorten

    from db import Round
    from tasks.unattended.alive import as_told

    _, store = open_home(home)
    rows = as_told(store, sorted(store.rows(Round), key=lambda r: r.number))
    keep = ("number", "id", "target", "seed", "profile", "state", "seconds", "reason")
    table = [{name: getattr(r, name) for name in keep} for r in rows]
    lines = [
        f"{r.number:>4}  {r.id[:12]}  {r.target:<14} seed {r.seed:<5} {r.profile:<8} {r.state:<12} "
        f"{shorten(r.reason, 60, placeholder=' …')}".rstrip()
        for r in rows
    ]
    printed(table, as_json, "\n".join(lines) or "no rounds yet; run 'trace-agent improve'")


SHOWN = (
    "A round's number, or the id, or its beginning, of a round, stage, trajectory, adapter, environment, capability, "
    "evaluation of a round, or release."
)


def show(
    key: Annotated[str, typer.Argument(help=SHOWN)],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """The round that has this number, or the row that has this id."""
    from errors import StoreError
    from tasks.reporting.lookup import find_row

    _, store = open_home(home)
    found = find_row(store, key)
    if found is None:
        raise StoreError(
            f"{key!r} is not the number of a round, nor the beginning of exactly one id; rounds are in 'trace-agent "
            "rounds', and other ids in a round's report"
        )
    table, row = found
    printed({"table": table, **row}, as_json, f"{table}\n" + "\n".join(f"  {k}: {v}" for k, v in row.items()))


def targets(home: Home = None, as_json: AsJson = False) -> None:
    """What can be improved on: splits, counts, hash, licence, and what is missing to run it."""
    from dataclasses import asdict

    from environments.targets.catalogue import describe_targets
    from settings import load_settings
    from tasks.round.traffic import describe_traffic

    user = load_settings(home=home).target_user
    with result_alone():
        found = [*describe_targets(user), *describe_traffic(home)]
    width = max(len(t.name) for t in found)
    lines = [f"{t.name:<{width}} {_splits(t):<48} {t.data_hash[:12]:<13} {t.missing or t.licence}" for t in found]
    printed([asdict(t) for t in found], as_json, "\n".join(lines))


def _splits(target: TargetInfo) -> str:
    """How many tasks a target has, or why that is not known."""
    if target.splits:
        return ", ".join(f"{name} {count}" for name, count in target.splits.items()) + " + draws" * target.draws
    if target.missing:
        return "not installed" if target.how_to_get else "does not load"
    # As of ToolSandbox at a commit that is not known here: loading it takes seconds.
    return "counted when it is loaded"


def schedule(
    cron: Annotated[
        str, typer.Option(help="When rounds begin, in UTC: minute, hour, day, month, weekday.")
    ] = "0 2 * * *",
    target: TargetName = None,
    profile: Profile = None,
) -> None:
    """Run rounds on a schedule in this process (needs a Prefect server: PREFECT_API_URL)."""
    from environments.targets.catalogue import check_target_name
    from settings import load_settings
    from tasks.round.traffic import check_stage
    from tasks.unattended.servers import check_lasting_prefect, check_servers

    settings = load_settings(target=target, profile=profile)
    check_stage(settings.target, "a whole round")
    check_target_name(settings.target)
    check_lasting_prefect()
    check_servers(settings)
    from flows.schedule import serve_schedule

    serve_schedule(cron, target, profile)


def stage(
    name: Annotated[str, typer.Argument(help="A stage's name, such as select; a wrong one prints all of them.")],
    target: TargetName = None,
    profile: Profile = None,
    seed: Seed = None,
    budget: Budget = None,
    base_model: Base = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Run the round up to one stage, with what it still needs, then stop."""
    from settings import load_settings

    given: dict[str, Any] = {"target": target, "profile": profile, "seed": seed, "budget": budget}
    given |= {"base_model": base_model, "home": home}
    settings = load_settings(**given)
    from tasks.round.traffic import check_stage

    check_stage(settings.target, name)
    with result_alone():
        flow = ready(settings, "flows.improve", lambda module: module.check_name(name), name)
        result = flow.until(name, flow.ImproveParameters(**given))
    printed(result, as_json, "\n".join(f"{k}: {v}" for k, v in result.items()))
