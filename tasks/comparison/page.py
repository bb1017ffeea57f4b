"""A comparison as text and as one self-contained HTML page, both from the seeds' files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from tasks.comparison.results import SeedResult
from tasks.comparison.table import REFERENCE, Difference, Share, Table
from tasks.measuring.gate_plan import p_text
from tasks.reporting.charts import curve_chart, heat_chart, lettered
from tasks.reporting.page import environment


def lines(table: Table) -> list[str]:
    """The comparison as text: the methods, then success by family."""
    width = max(len(row.name) for row in table.rows) + 2
    text = [
        f"{table.target}, data {table.data_hash}: {table.tasks} test tasks ({whose_tasks(table)}), seeds "
        f"{', '.join(map(str, table.seeds))}, budget {table.budget} episodes; 95 % intervals {over_what(table)}, p "
        "after Holm",
        f"{'method':<{width}} {'seeds':>5} {'success':>8}  {'interval':<15} {'- trace':>8}  {'interval':<17} {'p':>8} "
        f"{'episodes':>9} {'tokens':>10} {'seconds':>8} {'dollars':>8}",
    ]
    for row in table.rows:
        d = row.difference
        apart = (
            f"{d.points:>+8.1f}  {_span(d.low, d.high, '+'):<17} {p_of(d):>8}" if d else f"{'':>8}  {'':<17} {'':>8}"
        )
        success = "–" if math.isnan(row.success) else f"{100 * row.success:.1f} %"
        text.append(
            f"{row.name:<{width}} {row.seeds:>5} {success:>8}  "
            f"{_span(100 * row.low, 100 * row.high):<15} {apart} {row.episodes:>9.0f} {row.tokens:>10.0f} "
            f"{row.seconds:>8.0f} {row.dollars:>8.4f}"
        )
    text += [*other_seeds(table), *lost_episodes(table), *other_tests(table)]
    names = [row.name for row in table.rows]
    broad = max(6, *(len(f) for f in table.families))
    letters = {lettered(i): name for i, name in enumerate(names)}
    text += ["", "by family, %: " + ", ".join(f"{letter} {name}" for letter, name in letters.items())]
    text.append(f"{'':<{broad}} " + " ".join(f"{letter:>4}" for letter in letters))
    for family, rates in table.families.items():
        shown = [f"{100 * rates[name]:>4.0f}" if rates[name] == rates[name] else f"{'':>4}" for name in names]
        text.append(f"{family:<{broad}} " + " ".join(shown))
    if table.members:
        nested = ", ".join(f"{count}: {100 * rate:.1f} %" for count, rate in table.members)
        text += ["", f"TRACE by number of its release's members (a generalist is the first): {nested}"]
        text += [f"  {line}" for line in added_lines(table)]
    for name, points in table.curves.items():
        shown = [f"{episodes:.0f}: {100 * rate:.1f} %" for episodes, rate in points]
        text.append(f"{name} by episodes: {', '.join(shown)}")
    return text


def lost_episodes(table: Table) -> list[str]:
    """What a reader has to know of a method that errors took episodes from: one sentence a test, none without."""
    return [
        f"{name}: {lost} of {played} episodes of the {test} were lost to errors; its success is that of the rest."
        for name, tests in table.lost.items()
        for test, (lost, played) in tests.items()
    ]


def added_lines(table: Table) -> list[str]:
    """What each further member of TRACE's release adds, a line each; none where no release has a member."""
    return [
        f"member {place} adds {d.points:+.1f} points"
        + ("" if math.isnan(d.low) else f" {_span(d.low, d.high, '+')}, p {p_of(d)}")
        + f" ({d.seeds} of {len(table.seeds)} seeds)"
        for place, d in enumerate(table.added, start=1)
    ]


def other_seeds(table: Table) -> list[str]:
    """What a reader has to know of points that are over other seeds than the rates beside them: one sentence a method,
    none where both are over the same."""
    ours = {row.seeds for row in table.rows if row.name == REFERENCE}
    return [
        f"{row.name}: points are over the {d.seeds} seed{'s' if d.seeds > 1 else ''} that it and TRACE have."
        for row in table.rows
        if (d := row.difference) and {d.seeds} != {row.seeds} | ours
    ]


def other_tests(table: Table) -> list[str]:
    """The shift test, untouched families and repeated success as text; nothing where none was measured."""
    heads = heads_of(table)
    if not heads:
        return []
    width = max(14, *(len(o.name) for o in table.others)) + 2
    text = ["", f"{'other tests, %':<{width}} " + "  ".join(f"{head:>20}" for head in heads.values())]
    for o in table.others:
        text.append(f"{o.name:<{width}} " + "  ".join(f"{share_text(getattr(o, name)):>20}" for name in heads))
    return text


def heads_of(table: Table) -> dict[str, str]:
    """What the other tests are called, by field of `OtherTests`; those that nothing was measured of are left out."""
    heads = {"shift": "shift test", "untouched": "untouched families", "pass_k": f"pass^{table.trials}"}
    return {name: head for name, head in heads.items() if any(getattr(o, name) for o in table.others)}


def whose_tasks(table: Table) -> str:
    """Whether the seeds have test tasks of their own."""
    return "drawn for each seed" if table.drawn else "the same for every seed"


def over_what(table: Table) -> str:
    """What intervals and p-values are taken over."""
    if len(table.seeds) == 1:
        return "over tasks alone (one seed)"
    return "over seeds" if table.drawn else "over seeds and tasks"


def share_text(share: Share | None) -> str:
    """A share in per cent with its interval; "" without one."""
    return f"{100 * share.value:.1f} {_span(100 * share.low, 100 * share.high)}".rstrip() if share else ""


def p_of(difference: Difference) -> str:
    """The p-value as text, "" where there is none."""
    return "" if math.isnan(difference.p) else p_text(difference.p)


def _span(low: float, high: float, sign: str = "") -> str:
    return "" if math.isnan(low) else f"[{low:{sign}.1f}, {high:{sign}.1f}]"


def render(table: Table, results: Sequence[SeedResult]) -> str:
    """The page as text (UTF-8 when written)."""
    names = [row.name for row in table.rows]
    points = [(float(count), rate) for count, rate in table.members]
    curve = curve_chart("TRACE by number of its release's members", "members", points) if points else ""
    template = environment().get_template("methods.html.j2")
    return template.render(
        t=table, results=results, lettered=lettered, heads=heads_of(table), share_text=share_text, p_of=p_of,
        whose_tasks=whose_tasks(table), over_what=over_what(table), notes=[*other_seeds(table), *lost_episodes(table)],
        added=added_lines(table),
        heat=Markup(heat_chart(table.families, names)),
        curve=Markup(curve),
        curves={n: Markup(curve_chart(f"{n} by episodes", "episodes", p)) for n, p in table.curves.items()},
    )  # fmt: skip
