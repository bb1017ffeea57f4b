"""`trace-agent compare`: two releases, adapter versions, evaluations, or files of outcomes of anybody's."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.options import AsJson, Home, printed

WHAT = "release@N (or N; 0: the bare base), capability@vN, an evaluation's id, or a .csv or .jsonl file of outcomes."


def compare(
    a: Annotated[str, typer.Argument(help=WHAT)],
    b: Annotated[str, typer.Argument(help="The same, on the same tasks.")],
    target: Annotated[
        str | None, typer.Option(help="Whose releases and adapters; without it, the newest round's.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """What B does better or worse than A: paired difference with interval and p-value, the smallest difference that
    would have been found, families and pass^k. A file has the columns task, trial, success, and family if there is
    one."""
    from tasks.measuring.comparison import compare_named

    result = compare_named(a, b, target, home)
    printed(result.as_json(), as_json, "\n".join(result.lines()))
