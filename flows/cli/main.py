"""The command line `trace-agent`: what is set before any library reads it, all groups of commands, and how an error is
told. Commands import the heavy libraries that they need, so that looking is fast."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import MutableMapping
from typing import Annotated

import typer

from errors import TraceError
from flows.cli.database import add_database
from flows.cli.environments import add_environments
from flows.cli.housekeeping import add_housekeeping
from flows.cli.operations import add_operations
from flows.cli.options import Commands
from flows.cli.releases import add_releases
from flows.cli.rounds import add_rounds
from flows.cli.serve import add_serving
from flows.cli.tools import add_commands
from models.telemetry.logs import VARIABLE, configure
from models.telemetry.terminal import written_out

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
# of time: beside one busy program a round took ten times as long. Alone it gains nothing
# (benchmarks/findings/speed.md).
SPINS = "10000"

app = Commands(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes an agent better at one environment by itself.",
)


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


add_rounds(app)
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
    try:
        # A user's own target lies in the working folder; what is called there like a module of the project hides none
        # of these (models/own_modules.py).
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        typer.echo("error (files): the working folder was removed; change into one that is there", err=True)
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a dash that a terminal cannot show must not end a round in an error
            stream.reconfigure(errors="replace")
    configure()
    try:
        app()
    except TraceError as problem:
        typer.echo(f"error ({problem.boundary}): {written_out(str(problem))}", err=True)
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
