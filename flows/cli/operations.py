"""Commands of who operates it: tell a Prefect server what to run, watch what is live, start and stop all services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[Path | None, typer.Option(help="Folder of the embedded store, registry and reports.")]


def add_operations(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (deploy, watch):
        app.command()(command)


def deploy(
    pool: Annotated[str, typer.Option(help="Name of the work pool; made when it is not there.")] = "trace",
    kind: Annotated[str, typer.Option("--type", help="process, docker or kubernetes.")] = "process",
    project: Annotated[Path, typer.Option(help="Folder of the checkout, with prefect.yaml.")] = Path(),
) -> None:
    """Make the work pool, the deployments and the automation for dead runs on the server that PREFECT_API_URL names."""
    from flows.deploy import deploy as make

    typer.echo("\n".join(make(pool, kind, project)))


def watch(
    target: Annotated[str | None, typer.Option(help="What the release answers on, such as shop.")] = None,
    profile: Annotated[str | None, typer.Option(help="laptop, gpu, smoke or dry.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The model that rounds train.")] = None,
    home: Home = None,
) -> None:
    """Compare what is live with what it replaced, once: fresh tasks and feedback. Exit 1 after a significant fall."""
    from settings import load_settings
    from tasks.operations.watch import told, watch_release
    from tasks.round.preflight import preflight

    settings = load_settings(target=target, profile=profile, base_model=base_model, home=home)
    preflight(settings)
    watched = watch_release(settings)
    typer.echo(told(watched))
    if watched.falls:
        raise typer.Exit(1)
