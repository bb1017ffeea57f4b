"""`trace-agent db upgrade`: a database is brought to this program's schema when a person says so."""

from __future__ import annotations

import typer

from flows.cli.options import Commands, Home

database = Commands(no_args_is_help=True, help="The database of a home.")


def add_database(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.add_typer(database, name="db")


@database.command()
def upgrade(
    home: Home = None,
) -> None:
    """Bring the database to the newest schema, in one transaction. Make a backup first; stop what else uses it."""
    from db.copies import check_there
    from db.engine import parse_url, show
    from db.migrate import upgrade_database
    from settings import load_settings

    url = load_settings(home=home).database_url
    where = show(parse_url(url))
    check_there(url)
    before, after = upgrade_database(url)
    if before == after:
        typer.echo(f"{where} has the newest schema, {after}, already")
    else:
        typer.echo(f"{where}: schema {before or 'none'} -> {after}")


@database.callback()
def _commands() -> None:
    """Keeps `upgrade` a command of its own: with a single one typer would fold the two."""
