"""Commands about releases: what answers users now and before, going back, and going on by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import AsJson, Home, TargetName, printed

if TYPE_CHECKING:
    from db import ReleaseRow
    from tasks.reporting.figures import HistoryRow


def add_releases(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (history, rollback, promote):
        app.command()(command)


def _open(target: str | None, home: Path | None, live: bool = False) -> tuple[str, Any, Any]:
    """Target, store and registry: of the target that is given or set, else of the newest round's, as it is served, or,
    with `live`, of what has a release that is."""
    from db import open_stored
    from settings import load_settings
    from tasks.releases.lookup import target_named
    from tasks.round.registry import open_registry

    settings = load_settings(target=target, home=home)
    store = open_stored(settings.database_url)
    name = target_named(store, settings, live)
    return name, store, open_registry(settings, name)


def _tell(target: str, home: Path | None, kind: Any, text: str) -> None:
    """Give the notice that the change deserves."""
    from settings import load_settings
    from tasks.unattended.notices import Notice, notify

    notify(load_settings(target=target, home=home), Notice(kind, target, text))


def history(target: TargetName = None, home: Home = None, as_json: AsJson = False) -> None:
    """The rounds and releases of a target: what each changed, what was live after it, success, verdict, cost."""
    from tasks.releases.lifecycle import heal
    from tasks.releases.lookup import live_release
    from tasks.reporting.history import history_of

    name, store, registry = _open(target, home)
    with store:
        rows, live = history_of(store, name), live_release(store, name)
        if as_json:
            printed([row.model_dump(mode="json") for row in rows], as_json, "")
        else:
            _print_history(name, rows, live)
        if rows:  # last: who looks is answered by the database, whatever MLflow does
            heal(store, registry, name)


def _print_history(name: str, rows: Sequence[HistoryRow], live: ReleaseRow | None) -> None:
    from rich.console import Console

    from tasks.releases.lookup import version_name
    from tasks.reporting.summary import history_table

    if not rows:
        typer.echo(f"no round of {name} yet; run 'trace-agent improve --target {name}'")
        return
    console = Console(emoji=False)
    console.print(history_table(rows, console.width))
    typer.echo(
        f"release {live.number} of {name} is live: {', '.join(version_name(*m) for m in live.members.items())}"
        if live
        else f"the bare base answers for {name}: no release is live"
    )
    for row in rows:
        if row.barred:
            typer.echo(
                f"release {row.candidate}: {', '.join(row.barred)} barred from automatic promotion; "
                f"'trace-agent promote {row.candidate}' allows it"
            )


def rollback(
    to: Annotated[
        int | None, typer.Option(min=0, help="Number of the release to go back to; 0 is the bare base.")
    ] = None,
    target: TargetName = None,
    home: Home = None,
) -> None:
    """Make the live release's parent live again, or --to N. What is left is barred until you promote it."""
    from tasks.releases.lifecycle import rollback as go_back
    from tasks.releases.lookup import live_release, version_name

    name, store, registry = _open(target, home, live=True)
    with store:
        left = live_release(store, name)
        back = go_back(store, registry, name, to)
    said = f"release {back.number} of {name} is live again" if back else f"the bare base answers for {name} again"
    typer.echo(said)
    _tell(name, home, "rolled-back", f"release {left.number if left else 0} was rolled back by hand: {said}")
    kept = set() if back is None else {member["sha256"] for member in back.members.values()}
    gone = [version_name(c, m) for c, m in left.members.items() if m["sha256"] not in kept] if left else []
    if left is not None and gone:
        typer.echo(
            f"barred from automatic promotion: {', '.join(gone)}; 'trace-agent promote {left.number}' brings release "
            f"{left.number} back"
        )


def promote(
    release: Annotated[int, typer.Argument(min=1, help="Number of the release, from 'trace-agent history'.")],
    reason: Annotated[str, typer.Option(help="Why; kept with the release.")] = "by hand",
    target: TargetName = None,
    home: Home = None,
) -> None:
    """Make any release live by hand, without a gate; what is barred of it is allowed again."""
    from db import ReleaseState
    from tasks.releases.lifecycle import promote as go_live
    from tasks.releases.lifecycle import release_numbered

    name, store, registry = _open(target, home)
    with store:
        before = release_numbered(store, name, release)
        row = go_live(store, registry, before.id, reason, by_hand=True)
    if before.state == ReleaseState.LIVE:  # only MLflow was made to say so
        typer.echo(f"release {row.number} of {name} is live already: nothing has changed")
        return
    said = f"release {row.number} of {name} is live: {', '.join(row.members)}"
    typer.echo(said)
    _tell(name, home, "promoted", f"{said} (by hand: {reason})")
