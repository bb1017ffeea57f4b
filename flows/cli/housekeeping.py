"""Commands that keep a home: copies of it, putting one back anywhere, a check of everything around it,
and removing what nothing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import AsJson, Home, Profile, printed, result_alone


def add_housekeeping(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (backup, restore, doctor, clean):
        app.command()(command)


def backup(file: Annotated[Path, typer.Argument(help="The archive to write.")], home: Home = None) -> None:
    """Write store, registry, artifacts and rounds of a home into one archive, also while a round runs; exit 1 when it
    lacks a part that could not be read, or not in peace."""
    from flows.code_version import code_version
    from settings import load_settings
    from tasks.housekeeping.backup import lacking, make_backup

    settings = load_settings(home=home)
    made = make_backup(settings, file, code_version())
    typer.echo(
        f"{file}: {made.rounds} rounds, {len(made.members)} files, {made.bytes / 1e6:.1f} MB (database schema "
        f"{made.revision})"
    )
    if made.left_out:
        typer.echo(
            "left out, as links, because they were being written or removed, or because this user may not read them: "
            + ", ".join(made.left_out),
            err=True,
        )
    if made.not_copied:
        typer.echo(f"not copied, as no part of a home: {', '.join(made.not_copied)}", err=True)
    typer.echo(f"put it back with 'trace-agent restore {file} --home FOLDER'")
    if lost := lacking(settings.folder, made):
        do = "make another one, as a user who may read all of the home"
        typer.echo(f"this backup is not whole: it lacks {', '.join(lost)}; {do}", err=True)
        raise typer.Exit(1)


def restore(
    file: Annotated[Path, typer.Argument(help="An archive that 'trace-agent backup' wrote.")], home: Home = None
) -> None:
    """Put a backup into an empty folder, here or on another machine: the home can be moved."""
    from settings import load_settings
    from tasks.housekeeping.restore import restore_backup

    settings = load_settings(home=home)
    made = restore_backup(file, settings)
    typer.echo(
        f"{settings.folder}: {made.rounds} rounds, {len(made.members)} files, as they were in {made.home} at "
        f"{made.made_at:%Y-%m-%d %H:%M} UTC"
    )


def doctor(
    home: Home = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Look at versions, disk, GPU, servers, clock, model, database and releases; exit 1 when something is wrong."""
    from dataclasses import asdict

    from settings import load_settings
    from tasks.housekeeping.doctor import examine, lines

    with result_alone():
        findings = examine(load_settings(home=home, profile=profile))
    printed([asdict(f) for f in findings], as_json, "\n".join(lines(findings)))
    if any(f.level == "fault" for f in findings):
        raise typer.Exit(1)


def clean(
    older_than: Annotated[
        int | None, typer.Option("--older-than", min=1, max=36_500, help="Days since a file was done with.")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(min=0, help="GB: of these files remove, oldest first, until the home takes this."),
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(
            "--conversations-older-than", min=1, max=36_500, help="Days: remove users' conversations that are older."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove what no release, report or label needs, in the home and in the storage that the setting files names:
    checkpoints of finished rounds, copies that are fetched again. Rounds that were stopped and that later ones have
    left behind are given up. Users' conversations go only with their own option."""
    from errors import ConfigurationError
    from settings import load_settings
    from tasks.housekeeping.retention import forget, forgotten_text, give_up, removal_text, removals, remove

    if older_than is None and (conversations is None or keep is not None):
        raise ConfigurationError(
            "no age is given from which files may go; give --older-than DAYS, or --conversations-older-than DAYS alone "
            "for users' conversations (--keep is about files)"
        )
    settings = load_settings(home=home)
    # Chosen first, for a storage that is away is told there.
    chosen = [] if older_than is None else removals(settings, older_than, keep)
    given_up = [] if older_than is None else give_up(settings, older_than, dry_run)
    if not as_json:
        typer.echo("".join(f"{line}\n" for line in given_up), nl=False)
    for removal in chosen if not as_json else ():  # each is told before the first one goes
        typer.echo(f"{removal.bytes / 1e6:>10.1f} MB  {removal.since:%Y-%m-%d}  {removal.place}  ({removal.what})")
    freed = sum(removal.bytes for removal in chosen) if dry_run else remove(settings, chosen)
    if older_than is not None and not as_json:
        typer.echo(removal_text(settings, len(chosen), freed, dry_run))
    forgotten = None if conversations is None else forget(settings, conversations, dry_run)
    if as_json:
        entries = [{n: getattr(r, n) for n in ("place", "bytes", "since", "what")} for r in chosen]
        said = {"dry_run": dry_run, "bytes": freed, "entries": entries, "given_up": given_up}
        if forgotten is not None:
            said["conversations"] = dict(zip(("removed", "kept"), forgotten, strict=True))
        printed(said, as_json, "")
    elif conversations is not None and forgotten is not None:
        typer.echo(forgotten_text(conversations, forgotten, dry_run))
