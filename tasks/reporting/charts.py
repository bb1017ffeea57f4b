"""The report's plots as small inline SVG drawn by hand: colours are CSS classes, so that they follow light, dark and
print.

Each function returns one `<svg>` with a title and description for screen readers; the page puts a table under every
plot. Narrow view boxes keep the text readable when a phone scales them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tasks.reporting.figures import (
    CapabilityFigures,
    FamilyFigures,
    HistoryRow,
    Rate,
    RouterFigures,
    SelectionRule,
    TrainingStep,
    percent,
    two,
)

WIDTH = 560
_LABEL = 168  # room for names on the left
# How much darker a cell is with all than with nothing: with more its number cannot be read where the page is dark.
SHADE = 0.4
# Of a history: x, the rate there, its row, and the lineage.
_Point = tuple[float, Rate, HistoryRow, int]
# Rounds whose intervals are drawn one by one, with a dot each; more are a band. Labels that fit under the axis.
_SINGLE, _LABELS = 40, 10


def history_chart(rows: Sequence[HistoryRow], lineages: Sequence[int]) -> str:
    """Success on the test split round by round: of the bare base, and of what was live after each round with its
    interval. A full dot is a round whose release became live. Nothing is joined across lineages."""
    height, x0, x1, y0, y1 = 250, 50, WIDTH - 62, 196, 24
    slot = (x1 - x0) / len(rows)
    xs = [x0 + slot * (i + 0.5) for i in range(len(rows))]

    def y_of(rate: float) -> float:
        return y0 + (y1 - y0) * rate

    parts = []
    for value in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>')
        parts.append(_text(x0 - 8, y_of(value) + 4, f"{100 * value:.0f} %", "axis end"))
    for i in range(0, len(rows), -(-len(rows) // _LABELS)):
        parts.append(_text(xs[i], y0 + 20, rows[i].name, "axis middle"))
    parts.append(_text((x0 + x1) / 2, y0 + 42, "round", "axis middle"))
    for i in range(1, len(rows)):
        if lineages[i] != lineages[i - 1]:
            x = x0 + slot * i
            parts.append(f'<line class="threshold" x1="{x:.1f}" x2="{x:.1f}" y1="{y1 - 6}" y2="{y0}"/>')
            parts.append(_text(x, y1 - 11, *_parted(rows[i - 1], rows[i])))
    ends = []
    for kind, key in (("base", "base"), ("routed", "test")):
        found: list[_Point] = [
            (x, getattr(row, key), row, lineage)
            for x, row, lineage in zip(xs, rows, lineages, strict=True)
            if getattr(row, key) is not None
        ]
        for lineage in sorted({point[3] for point in found}):
            mine = [point for point in found if point[3] == lineage]
            crowded = len(rows) > _SINGLE
            dotted = kind == "base" or crowded  # else every round has a dot anyway
            parts += _history_line(kind, [(x, y_of(rate.success)) for x, rate, *_ in mine], dotted)
            if kind == "routed":
                spans = [(x, y_of(rate.low), y_of(rate.high)) for x, rate, *_ in mine]
                parts += _history_spans(spans, crowded and len(spans) > 1)
        if kind == "routed" and len(rows) <= _SINGLE:
            parts += [
                f'<circle class="{kind} dot{"" if _became_live(row) else " hollow"}" '
                f'cx="{x:.1f}" cy="{y_of(rate.success):.1f}" r="4.5"/>'
                for x, rate, row, _ in found
            ]
        if found:
            ends.append((y_of(found[-1][1].success), kind, percent(found[-1][1].success)))
    parts += [_text(x1 + 4, y + 4, text, f"value {kind}-ink") for y, kind, text in _apart(ends, y1, y0)]
    said = "; ".join(
        f"round {r.name}: {percent(r.test.success)}{f' (release {r.candidate})' if _became_live(r) else ''}"
        for r in rows
        if r.test is not None
    )
    return _svg(height, "Success on the test split by round", said or "no round was tested", parts)


def _became_live(row: HistoryRow) -> bool:
    return row.candidate is not None and row.after == row.candidate


def _history_line(kind: str, points: Sequence[tuple[float, float]], dotted: bool) -> list[str]:
    """The points joined; a lone one as a dot, where it is `dotted`."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = " dashed" if kind == "base" else ""
    single = [f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points[:1] if dotted]
    return [f'<polyline class="{kind} curve{dash}" points="{path}"/>'] if len(points) > 1 else single


def _history_spans(spans: Sequence[tuple[float, float, float]], crowded: bool) -> list[str]:
    """Intervals as (x, low, high): lines, or a band where they are too many."""
    if crowded:
        edge = [(x, low) for x, low, _ in spans] + [(x, high) for x, _, high in reversed(spans)]
        return [f'<polygon class="routed band" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in edge)}"/>']
    return [
        f'<line class="routed whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        for x, low, high in spans
    ]


def _parted(before: HistoryRow, after: HistoryRow) -> tuple[str, str, str]:
    """Label, class and title of the line between two lineages."""
    what, why = "other data", "the target's data changed"
    if before.base_model and after.base_model not in ("", before.base_model):
        what, why = "other base", "the base model is another"
    return what, "axis middle", f"{why}: not comparable"


def _apart(
    ends: Sequence[tuple[float, str, str]], top: float, bottom: float, least: float = 16
) -> list[tuple[float, str, str]]:
    """Names at the ends of curves, as (y, kind, text), moved so far that each can be read."""
    found: list[tuple[float, str, str]] = []
    for y, kind, text in sorted(ends):
        found.append((max(y, found[-1][0] + least) if found else max(y, top), kind, text))
    over = max(0.0, found[-1][0] - bottom) if found else 0.0
    return [(y - over, kind, text) for y, kind, text in found]


def family_chart(families: Mapping[str, FamilyFigures]) -> str:
    """Base and routed success by family, with intervals, as dots on a common 0-100 % axis; between them what was live
    before, where that was not the base."""
    three = any(f.live is not None for f in families.values())
    row, top = 60 if three else 46, 30
    height = top + row * len(families) + 24
    x0, x1 = _LABEL + 8, WIDTH - 56
    parts = [_axis(x0, x1, top - 6, height - 20, [0, 0.25, 0.5, 0.75, 1])]
    for i, (name, f) in enumerate(families.items()):
        y = top + row * i + row / 2
        parts.append(_name(name, y, f"n = {f.n}"))
        for kind, rate, interval, dy in (
            ("base", f.base, f.base_interval, -16 if three else -8),
            ("live", f.live, f.live_interval, 0),
            ("routed", f.routed, f.routed_interval, 16 if three else 8),
        ):
            if rate is None:
                continue
            if interval is not None:
                a, b = (x0 + (x1 - x0) * v for v in interval)
                parts.append(
                    f'<line class="{kind} whisker" x1="{a:.1f}" x2="{b:.1f}" y1="{y + dy:g}" y2="{y + dy:g}"/>'
                )
            cx = x0 + (x1 - x0) * rate
            parts.append(f'<circle class="{kind} dot" cx="{cx:.1f}" cy="{y + dy:g}" r="5"/>')
            parts.append(_text(x1 + 8, y + dy + 4, f"{100 * rate:.0f} %", f"value {kind}-ink"))
    said = "; ".join(
        f"{n}: base {percent(f.base)}, {f'live before {percent(f.live)}, ' if f.live is not None else ''}"
        f"routed {percent(f.routed)}"
        for n, f in families.items()
    )
    return _svg(height, "Success by family, base and routed", said, parts)


def selection_chart(capabilities: Sequence[CapabilityFigures], rule: SelectionRule) -> str:
    """Coverage and contrast by capability as bars, each against its threshold line; all have both."""
    row, top = 40, 34
    height = top + row * len(capabilities) + 10
    gap, x0 = 30, _LABEL + 8
    width = (WIDTH - x0 - gap - 34) / 2
    parts = []
    for column, (title, threshold) in enumerate((("coverage", rule.rho), ("contrast", rule.delta))):
        left = x0 + column * (width + gap)
        values = [(c.mean_cov if column == 0 else c.mean_delta) or 0.0 for c in capabilities]
        low, high = min(0.0, *values), max(1.0 if max(values) > 0.5 else 0.5, threshold, *values)
        scale = width / (high - low)
        zero = left - low * scale
        parts.append(_text(left, 16, f"{title}, threshold {threshold:g}", "axis"))
        mark = zero + threshold * scale
        parts.append(f'<line class="threshold" x1="{mark:.1f}" x2="{mark:.1f}" y1="24" y2="{height - 6}"/>')
        for i, (c, value) in enumerate(zip(capabilities, values, strict=True)):
            y = top + row * i
            if column == 0:
                parts.append(_name(c.name, y + row / 2 - 3, f"{c.runs_passed} of {rule.n} runs"))
            kind = "routed" if c.selected else "muted"
            a, b = sorted((zero, zero + value * scale))
            parts.append(
                f'<rect class="{kind} bar" x="{a:.1f}" y="{y + 6}" width="{max(1.0, b - a):.1f}" height="18" rx="2"/>'
            )
            parts.append(_text(max(a, b) + 4, y + 20, f"{value:.2f}", "value"))
    said = "; ".join(f"{c.name}: coverage {two(c.mean_cov)}, contrast {two(c.mean_delta)}" for c in capabilities)
    return _svg(height, "Coverage and contrast by capability", said, parts)


def training_chart(name: str, steps: Sequence[TrainingStep]) -> str:
    """Mean reward and success rate by training step, and success on retention scenarios where it is counted apart."""
    height, x0, x1, y0, y1 = 216, 44, WIDTH - 74, 172, 14
    first, last = steps[0].step, steps[-1].step
    span = max(1, last - first)
    parts = []
    for value in (0, 0.5, 1):
        y = y0 + (y1 - y0) * value
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(x0 - 8, y + 4, f"{value:g}", "axis end"))
    for step in dict.fromkeys((first, first + span // 2, last)):
        parts.append(_text(x0 + (x1 - x0) * (step - first) / span, y0 + 20, str(step), "axis middle"))
    parts.append(_text((x0 + x1) / 2, y0 + 35, "training step", "axis middle"))
    ends = []
    for kind, key in (("base", "reward"), ("routed", "success"), ("live", "retention")):
        points = [
            (x0 + (x1 - x0) * (s.step - first) / span, y0 + (y1 - y0) * getattr(s, key))
            for s in steps
            if getattr(s, key) is not None
        ]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = " dashed" if key == "reward" else ""
        parts.append(f'<polyline class="{kind} curve{dash}" points="{path}"/>')
        parts += [
            f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points if len(points) < 40
        ]
        ends.append((points[-1][1], kind, key))
    parts += [_text(x1 + 10, y + 4, key, f"value {kind}-ink") for y, kind, key in _apart(ends, y1 + 4, y0)]
    a, b = steps[0], steps[-1]
    said = f"reward from {two(a.reward)} to {two(b.reward)}, success from {two(a.success)} to {two(b.success)}"
    if b.retention is not None:
        said += f", on retention scenarios {two(a.retention)} to {two(b.retention)}"
    return _svg(height, f"Reward and success by training step, {name}", said, parts)


def confusion_chart(router: RouterFigures) -> str:
    """Tasks by their label (rows) and by where the router sent them (columns), shaded by share of the row."""
    size = len(router.labels)
    cell = min(64.0, (WIDTH - _LABEL - 12) / size)
    x0, top = _LABEL + 8, 44
    height = int(top + min(cell, 44) * size + 10)
    tall = min(cell, 44.0)
    parts = [_text(x0, 14, "routed to", "axis")]
    for j, name in enumerate(router.labels):
        parts.append(_text(x0 + cell * (j + 0.5), top - 8, lettered(j), "axis middle", name))
    for i, (name, row) in enumerate(zip(router.labels, router.counts, strict=True)):
        parts.append(_text(_LABEL, top + tall * (i + 0.5) + 4, f"{lettered(i)}  {_short(name, 17)}", "name end", name))
        for j, count in enumerate(row):
            share = count / sum(row) if sum(row) else 0.0
            x, y = x0 + cell * j + 1, top + tall * i + 1
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" height="{tall - 2:.1f}" rx="3"'
            parts.append(f'<rect class="cell" {box}/>')
            if count:
                parts.append(f'<rect class="routed bar" style="opacity:{0.1 + SHADE * share:.2f}" {box}/>')
            parts.append(_text(x0 + cell * (j + 0.5), top + tall * (i + 0.5) + 5, str(count), "middle"))
    return _svg(height, "Where the router sent tasks", f"{percent(router.sent)} to an adapter", parts)


def share_chart(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars of (name, amount, text of the amount), largest amount filling the width."""
    row, top = 26, 6
    height = top + row * len(rows) + 4
    x0, most = _LABEL + 8, max((amount for _, amount, _ in rows), default=0) or 1
    parts = []
    for i, (name, amount, text) in enumerate(rows):
        y = top + row * i
        width = (WIDTH - x0 - 96) * amount / most
        parts.append(_text(_LABEL, y + 17, _short(name), "name end", name))
        parts.append(
            f'<rect class="routed bar" x="{x0}" y="{y + 4}" width="{max(1.0, width):.1f}" height="16" rx="2"/>'
        )
        parts.append(_text(x0 + width + 6, y + 17, text, "value"))
    return _svg(height, title, "; ".join(f"{name}: {text}" for name, _, text in rows), parts)


def lettered(place: int) -> str:
    """The letters of a column, counted from 0: A to Z, then AA, AB and so on."""
    before, last = divmod(place, 26)
    return (lettered(before - 1) if before else "") + chr(65 + last)


def heat_chart(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> str:
    """Rates by row (family) and column (method) as shaded cells with the rate in percent; a cell without a rate is
    empty. Columns are lettered; the page says which is which."""
    top, tall = 30, 30.0
    cell = min(64.0, (WIDTH - _LABEL - 12) / max(1, len(columns)))
    x0, height = _LABEL + 8, top + tall * len(rows) + 10
    parts = [_text(x0 + cell * (j + 0.5), top - 8, lettered(j), "axis middle", n) for j, n in enumerate(columns)]
    for i, (name, rates) in enumerate(rows.items()):
        parts.append(_text(_LABEL, top + tall * (i + 0.5) + 4, _short(name), "name end", name))
        for j, column in enumerate(columns):
            x, y = x0 + cell * j + 1, top + tall * i + 1
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" height="{tall - 2:.1f}" rx="3"'
            parts.append(f'<rect class="cell" {box}/>')
            rate = rates.get(column)
            if rate is not None and rate == rate:
                parts.append(f'<rect class="routed bar" style="opacity:{0.05 + SHADE * rate:.2f}" {box}/>')
                parts.append(_text(x0 + cell * (j + 0.5), top + tall * (i + 0.5) + 5, f"{100 * rate:.0f}", "middle"))
    said = "; ".join(
        f"{name}: " + ", ".join(f"{c} {percent(r)}" for c, r in rates.items() if r == r) for name, rates in rows.items()
    )
    return _svg(height, "Success by family and method", said, parts)


def curve_chart(title: str, axis: str, points: Sequence[tuple[float, float]]) -> str:
    """Success rates (second of each pair) over a number (the first, which `axis` names), joined in order."""
    height, x0, x1, y0, y1 = 216, 50, WIDTH - 62, 172, 14
    first, last = points[0][0], points[-1][0]
    parts, placed = [], []
    for value in (0, 0.25, 0.5, 0.75, 1):
        y = y0 + (y1 - y0) * value
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(x0 - 8, y + 4, f"{100 * value:.0f} %", "axis end"))
    most = min(len(points), _LABELS)
    labelled = {round(i * (len(points) - 1) / max(1, most - 1)) for i in range(most)}
    for i, (number, rate) in enumerate(points):
        x, y = x0 + (x1 - x0) * (number - first) / ((last - first) or 1), y0 + (y1 - y0) * rate
        placed.append(f"{x:.1f},{y:.1f}")
        if i in labelled:
            parts.append(_text(x, y0 + 20, f"{number:g}", "axis middle"))
        parts.append(f'<circle class="routed dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    parts.append(f'<polyline class="routed curve" points="{" ".join(placed)}"/>')
    parts.append(_text((x0 + x1) / 2, y0 + 38, axis, "axis middle"))
    return _svg(height, title, "; ".join(f"{n:g}: {percent(r)}" for n, r in points), parts)


def _svg(height: float, title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}. {escape(description)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str, full: str = "") -> str:
    tip = f"<title>{escape(full)}</title>" if full and full != text else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{tip}{escape(text)}</text>'


def _short(name: str, limit: int = 20) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _name(name: str, y: float, below: str) -> str:
    return _text(_LABEL, y, _short(name), "name end", name) + _text(_LABEL, y + 14, below, "axis end")


def _axis(x0: float, x1: float, top: float, bottom: float, values: Sequence[float]) -> str:
    parts = []
    for v in values:
        x = x0 + (x1 - x0) * v
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 15, f"{100 * v:.0f} %", "axis middle"))
    return "".join(parts)
