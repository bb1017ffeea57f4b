"""The command line `trace-agent`. Commands import the heavy libraries that they need, so that looking is fast."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import typer

from errors import TraceError
from flows.cli.database import add_database
from flows.cli.environments import add_environments
from flows.cli.housekeeping import add_housekeeping
from flows.cli.operations import add_operations
from flows.cli.options import AsJson, Base, Budget, Home, Profile, Seed, TargetName, printed
from flows.cli.ready import ready
from flows.cli.releases import add_releases
from flows.cli.serve import add_serving
from flows.cli.tools import add_commands
from models.telemetry.logs import VARIABLE, configure

# Quiet and offline by default; set before the libraries that read them are imported.
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # What fails is said once, by main(); Prefect would print the whole traceback as well.
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "trace",  # the round's own lines stand in Prefect's UI, too
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # and those of what is no flow, a dry run, are not missing
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}

# How often torch's threads look for one another before they sleep: some ten microseconds. The 300,000 that libgomp has
# of its own keep a core that another program wants, and each of thousands of operations then waits for the next slice
# of time: beside one busy program a round took ten times as long. Alone it gains nothing (benchmarks/README.md).
SPINS = "10000"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes an agent better at one environment by itself.",
)


def _logging() -> None:
    configure()
    # Renamed arguments inside transformers and TRL: for their authors, not for who reads a round's progress.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    # A model of a dependency gives a field an alias where pydantic ignores it: pydantic says so at the import, in the
    # middle of a round's progress, and nobody here can mend it. By its text, for pydantic is not imported yet.
    warnings.filterwarnings("ignore", message="The 'alias' attribute with value 'id' was provided to the `Field")


def _store(home: Path | None) -> tuple[Any, Any]:
    from flows.cli.ready import loading

    with loading():
        from db import open_store
        from settings import load_settings

    settings = load_settings(home=home)
    return settings, open_store(settings.database_url)


@app.callback()
def options(
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar=VARIABLE, help="Log lines as JSON objects, for a program.")
    ] = False,
) -> None:
    """Makes an agent better at one environment by itself."""
    if log_json:
        os.environ[VARIABLE] = "true"
        configure()


@app.command()
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

    settings = load_settings(target=target, profile=profile, seed=seed, budget=budget, base_model=base_model, home=home)
    told = f"round on {settings.target}, profile {settings.profile}, seed {settings.seed}: preparing"
    logging.getLogger("trace").info(told)
    from tasks.round.traffic import check_stage

    check_stage(settings.target, "a whole round")
    if dry_run:
        from tasks.round.preflight import preflight

        preflight(settings)
        from tasks.operations.plan import rehearse
        from tasks.shards.runners import check_runner

        check_runner(settings)
        typer.echo("\n".join(rehearse(settings)))
        return
    flow = ready(settings, "flows.improve")
    # The parameters' defaults are None, so that a later change of a profile is seen by a schedule too.
    params = flow.ImproveParameters(
        target=target, profile=profile, seed=seed, budget=budget, base_model=base_model, home=home, fresh=fresh
    )
    for _ in range(rounds):
        result = flow.improve(params)
        params = params.model_copy(update={"fresh": False})
        if result.report:
            from tasks.reporting.lookup import figures_by_key
            from tasks.reporting.summary import print_summary

            settings, store = _store(home)
            print_summary(figures_by_key(settings, store, result.round))
            typer.echo(f"report: {result.report}")
        else:
            typer.echo("\n".join(result.checked))


@app.command()
def status(
    round: Annotated[str | None, typer.Argument(help="Id or number; the latest by default.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """The figures of a round."""
    from tasks.reporting.lookup import figures_by_key

    settings, store = _store(home)
    figures = figures_by_key(settings, store, round)
    if as_json:
        printed(figures.as_json(), as_json, "")
        return
    from tasks.reporting.summary import print_summary

    print_summary(figures)


@app.command()
def report(round: Annotated[str | None, typer.Argument()] = None, home: Home = None, as_json: AsJson = False) -> None:
    """Where the report of a round is; written again when the page is gone, or is of the round while it ran."""
    from models.objects import files_of
    from tasks.reporting.figures import GONE
    from tasks.reporting.lookup import EPISODES, FIGURES, REPORT, figures_by_key

    settings, store = _store(home)
    figures = figures_by_key(settings, store, round)
    files = files_of(settings)
    page, whole, _ = (files.fetch(f"{figures.round}/{name}") for name in (REPORT, FIGURES, EPISODES))
    if figures.stopped == GONE and page.is_file():  # it has what could not be written again
        logging.getLogger("trace").warning("%s is as it was made, and is not written again: %s", page, GONE)
    elif not (page.is_file() and whole.is_file()):  # a page without figures is of a round that was still running
        from tasks.episodes.pages import write_report

        write_report(settings, store, figures)
    printed({"report": str(page)}, as_json, str(page))


@app.command()
def rounds(home: Home = None, as_json: AsJson = False) -> None:
    """All rounds."""
    from textwrap import shorten

    from db import Round
    from tasks.unattended.alive import as_told

    _, store = _store(home)
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


@app.command()
def show(
    key: Annotated[str, typer.Argument(help=SHOWN)],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """The round that has this number, or the row that has this id."""
    from errors import StoreError
    from tasks.reporting.lookup import find_row

    _, store = _store(home)
    found = find_row(store, key)
    if found is None:
        raise StoreError(
            f"{key!r} is no round's number, and not exactly one id begins with it; rounds are in 'trace-agent rounds', "
            "and other ids in a round's report"
        )
    table, row = found
    printed({"table": table, **row}, as_json, f"{table}\n" + "\n".join(f"  {k}: {v}" for k, v in row.items()))


@app.command()
def targets(home: Home = None, as_json: AsJson = False) -> None:
    """What can be improved on: splits, counts, hash, licence, and what is missing to run it."""
    from dataclasses import asdict

    from environments.targets.catalogue import describe_targets
    from settings import load_settings
    from tasks.round.traffic import describe_traffic

    user = load_settings(home=home).target_user
    rows = [asdict(t) for t in [*describe_targets(user), *describe_traffic(home)]]
    lines, width = [], max(len(r["name"]) for r in rows)
    for r in rows:
        splits = ", ".join(f"{k} {v}" for k, v in (r.get("splits") or {}).items())
        splits += " + draws" if r.get("draws") else ""
        # ToolSandbox of a commit that is not known here is counted when it is loaded, which takes seconds.
        absent = "not installed" if r.get("how_to_get") else "does not load"
        splits = splits or (absent if r.get("missing") else "counted when it is loaded")
        lines.append(
            f"{r['name']:<{width}} {splits:<48} {str(r.get('data_hash') or '')[:12]:<13} "
            f"{r.get('missing') or r.get('licence') or ''}"
        )
    printed(rows, as_json, "\n".join(lines))


@app.command()
def schedule(cron: str = "0 2 * * *", target: TargetName = None, profile: Profile = None) -> None:
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


@app.command()
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

    settings = load_settings(target=target, profile=profile, seed=seed, budget=budget, base_model=base_model, home=home)
    flow = ready(settings, "flows.improve", lambda module: module.check_name(name), name)
    result = flow.until(
        name,
        flow.ImproveParameters(
            target=target, profile=profile, seed=seed, budget=budget, base_model=base_model, home=home
        ),
    )
    printed(result, as_json, "\n".join(f"{k}: {v}" for k, v in result.items()))


add_commands(app)
add_releases(app)
add_serving(app)
add_housekeeping(app)
add_environments(app)
add_operations(app)
add_database(app)


# What a person does about a path that the system does not let this process use.
UNREACHABLE = {
    errno.EACCES: "let this user read and write it, or give another path",
    errno.EPERM: "let this user read and write it, or give another path",
    errno.EROFS: "it lies on a disk that takes no writing: give another path",
    errno.ENAMETOOLONG: "give a shorter one",
}

# The exit code of a command that Ctrl-C ended, as shells have it: 128 and the signal's number.
INTERRUPTED = 130


def _cannot_print() -> bool:
    """Whether standard output takes nothing any more, not even a line's end. It is let go then, or Python would try
    once more at its end, and fail once more."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what libraries read when they are imported, where the user has not."""
    for name, value in QUIET.items():
        environ.setdefault(name, value)
    spin_briefly(environ)


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Set how long torch's threads look for one another, where the user has not. It is read when torch is imported."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)


def main() -> None:
    """Entry point: one line for what the user can mend, a non-zero exit for every failure."""
    prepare(os.environ)
    sys.path.insert(0, os.getcwd())  # a user's own target lies in the working folder
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a dash that a terminal cannot show must not end a round in an error
            stream.reconfigure(errors="replace")
    _logging()
    try:
        app()
    except TraceError as problem:
        typer.echo(f"error ({problem.boundary}): {problem}", err=True)
        raise SystemExit(2) from None
    except OSError as problem:
        if problem.errno in UNREACHABLE and problem.filename is not None:
            typer.echo(f"error (files): {problem.filename}: {problem.strerror}; {UNREACHABLE[problem.errno]}", err=True)
            raise SystemExit(2) from None
        if problem.filename is not None or not _cannot_print():
            raise
        why = problem.strerror or problem
        typer.echo(f"error (output): standard output cannot be written ({why}); free space there", err=True)
        raise SystemExit(2) from None
    except SystemExit as end:  # Typer's own answer to Ctrl-C, which says nothing
        if end.code == INTERRUPTED:
            typer.echo("stopped; the same command goes on from here", err=True)
        raise


if __name__ == "__main__":
    main()
