"""The round in a terminal, for people who will not open the page."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks.reporting.figures import RoundFigures, duration, headline, percent


def print_summary(figures: RoundFigures, console: Console | None = None) -> None:
    """Prints verdict, families, capabilities, warnings and cost; plain text where the console has no colour."""
    console = console or Console()
    console.print(f"[bold]Round {escape(figures.round)} on {escape(figures.target)}[/bold]")
    console.print(escape(headline(figures)))
    if figures.families:
        table = Table(
            "family", "base", "routed", "change", "n", title="Success by family (test split)", title_justify="left"
        )
        for name, f in figures.families.items():
            table.add_row(
                escape(name), percent(f.base), percent(f.routed), f"{100 * (f.routed - f.base):+.1f} points", str(f.n)
            )
        if figures.noop:
            table.add_section()
            table.add_row("doing nothing", percent(figures.noop.success), "", "", str(figures.noop.n))
        console.print(table)
    if figures.capabilities:
        table = Table(
            "capability",
            "cov",
            "delta",
            "runs",
            "base",
            "adapter",
            "verdict",
            title="Capabilities",
            title_justify="left",
        )
        for c in figures.capabilities:
            table.add_row(
                escape(c.name),
                f"{c.mean_cov:.2f}",
                f"{c.mean_delta:.2f}",
                f"{c.runs_passed}/{figures.selection.n}",
                percent(c.base_success),
                percent(c.adapter_success),
                escape(c.verdict),
            )
        console.print(table)
    for warning in figures.warnings:
        console.print(f"[yellow]Warning:[/yellow] {escape(warning)}")
    if figures.errors:
        console.print(f"{figures.errors} episodes were lost to infrastructure errors and are in no denominator.")
    cost = [duration(figures.seconds["total"])] if "total" in figures.seconds else []
    cost += [f"{figures.tokens['total']:,} tokens"] if "total" in figures.tokens else []
    cost += [f"peak {figures.peak_gib:.1f} GiB"] if figures.peak_gib is not None else []
    if cost:
        console.print(f"Cost: {', '.join(cost)}.")
