"""The round in a terminal, for people who will not open the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.telemetry.terminal import written_out
from tasks.reporting.figures import HistoryRow, Rate, RoundFigures, duration, percent, release_name, two
from tasks.reporting.headline import headline, unsaid
from tasks.reporting.history import lineages

# Rounds of the history that are printed with a round.
LAST = 10
# Columns of a terminal below which the history is told in narrow columns.
NARROW = 100


def print_summary(figures: RoundFigures, console: Console | None = None) -> None:
    """Prints verdict, what was live before and after, families, the rounds so far, capabilities, warnings and cost;
    plain text where the console has no colour."""
    console = console or Console(emoji=False)  # a reason may have :name: in it
    name = f"{figures.number} ({figures.round})" if figures.number else figures.round
    console.print(f"[bold]Round {_plain(name)} on {_plain(figures.target)}[/bold]")
    console.print(_plain(headline(figures)))
    if figures.before is not None and figures.routed is not None:
        console.print(f"On the test split (look {figures.looks}): {_plain(', '.join(_standing(figures)))}.")
    if figures.families:
        console.print(_family_table(figures))
    if len(figures.history) > 1:
        console.print(
            history_table(
                figures.history[-LAST:],
                console.width,
                f"The last {LAST} rounds" if len(figures.history) > LAST else "The rounds so far",
            )
        )
    if figures.capabilities:
        numbers = ("cov", "delta", "runs", "base", "adapter")
        table = _table("Capabilities", "capability", numbers, "verdict")
        for c in figures.capabilities:
            table.add_row(
                _plain(c.name),
                two(c.mean_cov),
                two(c.mean_delta),
                "–" if c.mean_cov is None else f"{c.runs_passed}/{figures.selection.n}",
                percent(c.base_success),
                percent(c.adapter_success),
                _plain(c.verdict),
            )
        console.print(table)
    for warning in filter(None, (unsaid(figures), *figures.warnings)):
        console.print(f"[yellow]Warning:[/yellow] {_plain(warning)}")
    if figures.errors:
        lost = "episode was" if figures.errors == 1 else "episodes were"
        console.print(f"{figures.errors} {lost} lost to infrastructure errors and in no denominator.")
    cost = [duration(figures.seconds["total"])] if "total" in figures.seconds else []
    cost += [f"{figures.tokens['total']:,} sampled tokens"] if "total" in figures.tokens else []
    cost += [f"peak {figures.peak_gib:.1f} GiB"] if figures.peak_gib is not None else []
    if cost:
        console.print(f"Cost: {', '.join(cost)}.")


def history_table(rows: Sequence[HistoryRow], width: int, title: str = "") -> Table:
    """Rounds and releases (named r and their number), one a row: the release that is live after it, when and what it
    changed, success on test with its interval, verdict and cost. It fits a `width` of 80 columns: where it is narrow,
    intervals and dollars stand on lines of their own, and long texts are wrapped."""
    table = Table(title=title or None, title_justify="left")
    # No least width: where those of all columns together are more than there is, the last columns are cut off.
    for name, narrow in (("round", True), ("live\nafter", True), ("what changed", False), ("success\non test", True)):
        table.add_column(name, no_wrap=narrow, overflow="fold")
    for name in ("verdict", "cost"):
        table.add_column(name, overflow="fold")
    found, then = lineages(rows), "\n" if width < NARROW else " "
    for i, (row, lineage) in enumerate(zip(rows, found, strict=True)):
        if i and lineage != found[i - 1]:
            table.add_section()
        table.add_row(
            row.name,
            "–" if row.after is None else str(row.after) if row.after else "base",
            _plain(_short(f"{row.when[:10]}, {row.change}", 110)),
            _rate(row.test, then) if row.test else "–",
            _plain(row.verdict),
            (duration(row.seconds) if row.seconds is not None else "")
            + (f",{then}{row.dollars:.2f} dollars" if row.dollars else ""),
        )
    return table


def _standing(figures: RoundFigures) -> list[str]:
    """Base, what was live before, and what is live after, with intervals."""
    sides: list[tuple[str, Rate | None]] = [
        ("the bare base", figures.base),
        (f"before ({release_name(figures.before)})", figures.live if figures.before else None),
        (f"after ({release_name(figures.after)})", figures.routed),
    ]
    return [f"{name} {_rate(rate)}" for name, rate in sides if rate is not None]


def _rate(rate: Rate, then: str = " ") -> str:
    return f"{percent(rate.success)}{then}({100 * rate.low:.0f}–{100 * rate.high:.0f})"


def _family_table(figures: RoundFigures) -> Table:
    three = any(f.live is not None for f in figures.families.values())
    columns = ["base", *(["before"] if three else []), "after" if figures.before is not None else "routed"]
    table = _table("Success by family (test split)", "family", (*columns, "change", "n"))
    for name, f in figures.families.items():
        start = f.base if f.live is None else f.live
        rates = [f.base, *([start] if three else []), f.routed]
        moved = f.points if f.live is None else f.gained
        change = "–" if moved is None else f"{moved:+.1f} points"
        table.add_row(_plain(name), *map(percent, rates), change, str(f.n))
    if figures.noop:
        table.add_section()
        table.add_row("doing nothing", percent(figures.noop.success), *[""] * len(columns), str(figures.noop.n))
    return table


def _table(title: str, name: str, numbers: Sequence[str], last: str = "") -> Table:
    """A table whose names and last words are folded where it is narrow: a number is whole, and nothing is cut."""
    table = Table(title=title, title_justify="left")
    table.add_column(name, overflow="fold")
    for column in numbers:
        table.add_column(column, no_wrap=True)
    if last:
        table.add_column(last, overflow="fold")
    return table


def _plain(text: str) -> str:
    """A text that neither marks up the console nor steers the terminal: a round's reason may be a server's answer."""
    return escape(written_out(text))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
