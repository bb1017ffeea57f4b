"""Options that several commands have, each said once, and how a result is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from errors import ConfigurationError
from models.telemetry.terminal import written_out

Home = Annotated[Path | None, typer.Option(help="Folder of the embedded store, registry and reports.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
TargetName = Annotated[str | None, typer.Option(help="What to improve on, such as shop or tau2:retail.")]
Profile = Annotated[str | None, typer.Option(help="laptop, night, bfcl, gpu-small, gpu, cluster, smoke or dry.")]
Seed = Annotated[int | None, typer.Option(help="Another seed gives other draws.")]
Budget = Annotated[
    int | None,
    typer.Option(
        help="36 % of it are rollouts of a round's trainings, which gives their steps; it does not limit a round"
    ),
]
Base = Annotated[str | None, typer.Option(help="The embedded model, a folder, or a Hugging Face id.")]


class GivenOnce(TyperCommand):
    """A command that refuses an option with one value which is given twice: the last alone would count, unsaid."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order:
            single = isinstance(option, TyperOption) and not (option.multiple or option.is_flag or option.count)
            if single and (times := order.count(option)) > 1:
                raise ConfigurationError(f"{option.opts[0]} is given {times} times and takes one value; give it once")
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A group of commands, each `GivenOnce`."""

    def command(self, name: str | None = None, **given: Any) -> Any:
        """As `typer.Typer.command`."""
        return super().command(name, cls=GivenOnce, **given)


@contextmanager
def result_alone() -> Iterator[None]:
    """What is printed meanwhile, by the code of a user's own target for one, goes to standard error: standard output is
    the result's, which a program may read."""
    with redirect_stdout(sys.stderr):
        yield


def told(text: str) -> None:
    """Print what models or their code may have said, with what would steer a terminal written out."""
    typer.echo(written_out(text))


def printed(value: Any, as_json: bool, text: str) -> None:
    """Print a result: as JSON for a program, else its text, with what would steer a terminal written out."""
    typer.echo(json.dumps(value, indent=1, default=str) if as_json else written_out(text))
