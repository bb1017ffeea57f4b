"""Commands for operators: tell a Prefect server what to run, watch what is live, start and stop all services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Home, Profile


def add_operations(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (deploy, watch, up, down):
        app.command()(command)


def deploy(
    pool: Annotated[str, typer.Option(help="Name of the work pool; made when it is not there.")] = "trace",
    kind: Annotated[str, typer.Option("--type", help="process, docker or kubernetes.")] = "process",
    project: Annotated[Path, typer.Option(help="Folder of the checkout, with prefect.yaml.")] = Path(),
) -> None:
    """Make work pool, deployments and the automations for dead runs on the server that PREFECT_API_URL names."""
    from flows.deploy import deploy as make
    from flows.runs.left_running import end_left_runs_of
    from settings import load_settings

    typer.echo("\n".join(make(pool, kind, project)))
    end_left_runs_of(load_settings())


def watch(
    target: Annotated[str | None, typer.Option(help="What the release answers on, such as shop.")] = None,
    profile: Profile = None,
    base_model: Annotated[str | None, typer.Option(help="The model that rounds train.")] = None,
    home: Home = None,
) -> None:
    """Compare what is live with what it replaced, once: fresh tasks and feedback. Exit 1 after a significant fall, or
    one that cannot be excluded."""
    from db import open_stored
    from settings import load_settings
    from tasks.operations.watch import watch_release, watch_text
    from tasks.releases.lookup import target_named
    from tasks.round.preflight import preflight
    from tasks.unattended.notices import deliver

    settings = load_settings(target=target, profile=profile, base_model=base_model, home=home)
    with open_stored(settings.database_url) as store:
        settings = settings.model_copy(update={"target": target_named(store, settings, live=True)})
    preflight(settings)
    watched = watch_release(settings)
    typer.echo(watch_text(watched))
    deliver(settings)  # what the webhook's receiver has not taken yet
    if watched.falls or watched.losses:
        raise typer.Exit(1)


def up(
    home: Home = None,
    target: Annotated[
        str | None, typer.Option(help="What the nights play, and whose release the gateway serves.")
    ] = None,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prefect's server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of MLflow's server.")] = 5000,
    gateway_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")] = 8900,
    worker_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the worker's health.")] = 8080,
) -> None:
    """Start Prefect, MLflow, a worker with the nightly deployment, and the gateway; what dies is started again."""
    import signal
    import time
    from contextlib import suppress

    from db import open_store
    from environments.targets.catalogue import check_target_name
    from flows.services import Ports, Services, follow
    from settings import load_settings
    from tasks.releases.lookup import served_round, set_target

    settings = load_settings(home=home, target=target)
    check_target_name(settings.target)
    ports = Ports(prefect_port, mlflow_port, gateway_port, worker_port)
    services = Services(settings, ports, target)
    services.check()
    # A stop by 'kill' ends them as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    typer.echo(f"starting the services of {settings.folder} (logs in {services.folder})", err=True)
    # A stop while they start; once they run, `follow` hears of it.
    with suppress(KeyboardInterrupt), open_store(settings.database_url) as store, services.started() as supervisor:
        wanted = set_target(settings)
        serves = served_round(store, wanted) is not None
        if serves:
            supervisor.startProcess("gateway", False)
        services.wait_for("prefect")
        # First: the worker would begin with the nights on which nothing ran.
        for line in services.make_deployments():
            typer.echo(line, err=True)
        supervisor.startProcess("worker", False)
        services.wait_for("mlflow", "worker")
        # No night waits for the gateway: it may load a large base, or wait for servers that are away.
        late = serves and not services.in_time("gateway")
        typer.echo("\n".join(services.addresses()))
        if not serves:
            of = f" on {wanted}" if wanted else ""
            typer.echo(
                f"the gateway starts when there is a round{of}: 'trace-agent improve', or the deployment 'improve'"
            )
        if late:
            typer.echo(f"the gateway is not healthy yet: {services.log('gateway')}")
        well = "all others" if late else "all"
        typer.echo(f"{well} healthy after {time.monotonic() - began:.0f} s; stop with Ctrl-C or 'trace-agent down'")
        follow(services, lambda: served_round(store, wanted) is not None, lambda said: typer.echo(said, err=True))
    typer.echo(f"the services of {settings.folder} are stopped")


def down(home: Home = None) -> None:
    """Stop what 'trace-agent up' started for a home, also while it starts."""
    import time

    from errors import ConfigurationError, StoreError
    from flows.services import SECONDS_TO_STOP, Ports, Services, stop
    from flows.session import held
    from settings import load_settings

    settings = load_settings(home=home)
    services, deadline, seen = Services(settings, Ports()), time.monotonic() + SECONDS_TO_STOP, False
    while not stop(services.socket):
        if not held(services.folder):
            if seen:  # it has ended meanwhile
                break
            raise ConfigurationError(f"no services run for {settings.folder}; 'trace-agent up' starts them")
        if time.monotonic() > deadline:
            raise StoreError(
                f"a 'trace-agent up' holds {services.folder} and neither listens nor ends; look at the logs there, and "
                "end that process"
            )
        seen = True
        time.sleep(0.1)
    typer.echo(f"the services of {settings.folder} are stopped")
