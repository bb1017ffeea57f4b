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
    RouterFigures,
    SelectionRule,
    TrainingStep,
    percent,
)

WIDTH = 560
_LABEL = 168  # room for names on the left


def family_chart(families: Mapping[str, FamilyFigures]) -> str:
    """Base and routed success by family, with intervals, as dots on a common 0-100 % axis."""
    row, top = 46, 30
    height = top + row * len(families) + 24
    x0, x1 = _LABEL + 8, WIDTH - 46
    parts = [_axis(x0, x1, top - 6, height - 20, [0, 0.25, 0.5, 0.75, 1])]
    for i, (name, f) in enumerate(families.items()):
        y = top + row * i + row / 2
        parts.append(_name(name, y, f"n = {f.n}"))
        for kind, rate, interval, dy in (
            ("base", f.base, f.base_interval, -8),
            ("routed", f.routed, f.routed_interval, 8),
        ):
            if interval is not None:
                a, b = (x0 + (x1 - x0) * v for v in interval)
                parts.append(
                    f'<line class="{kind} whisker" x1="{a:.1f}" x2="{b:.1f}" y1="{y + dy:g}" y2="{y + dy:g}"/>'
                )
            cx = x0 + (x1 - x0) * rate
            parts.append(f'<circle class="{kind} dot" cx="{cx:.1f}" cy="{y + dy:g}" r="5"/>')
            parts.append(_text(x1 + 8, y + dy + 4, f"{100 * rate:.0f} %", f"value {kind}-ink"))
    said = "; ".join(f"{n}: base {percent(f.base)}, routed {percent(f.routed)}" for n, f in families.items())
    return _svg(height, "Success by family, base and routed", said, parts)


def selection_chart(capabilities: Sequence[CapabilityFigures], rule: SelectionRule) -> str:
    """Coverage and contrast by capability as bars, each against its threshold line."""
    row, top = 40, 34
    height = top + row * len(capabilities) + 10
    gap, x0 = 30, _LABEL + 8
    width = (WIDTH - x0 - gap - 34) / 2
    parts = []
    for column, (title, threshold) in enumerate((("coverage", rule.rho), ("contrast", rule.delta))):
        left = x0 + column * (width + gap)
        values = [c.mean_cov if column == 0 else c.mean_delta for c in capabilities]
        low, high = min(0.0, *values), max(1.0 if max(values) > 0.5 else 0.5, *values)
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
    said = "; ".join(f"{c.name}: coverage {c.mean_cov:.2f}, contrast {c.mean_delta:.2f}" for c in capabilities)
    return _svg(height, "Coverage and contrast by capability", said, parts)


def training_chart(name: str, steps: Sequence[TrainingStep]) -> str:
    """Mean reward and success rate by training step."""
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
    for kind, key in (("base", "reward"), ("routed", "success")):
        points = [(x0 + (x1 - x0) * (s.step - first) / span, y0 + (y1 - y0) * getattr(s, key)) for s in steps]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = " dashed" if key == "reward" else ""
        parts.append(f'<polyline class="{kind} curve{dash}" points="{path}"/>')
        parts += [
            f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points if len(points) < 40
        ]
        ends.append((points[-1][1], kind, key))
    ends.sort()
    if ends[1][0] - ends[0][0] < 16:  # keep the two names apart
        middle = min(max((ends[0][0] + ends[1][0]) / 2, y1 + 8), y0 - 8)
        ends = [(middle - 8, *ends[0][1:]), (middle + 8, *ends[1][1:])]
    parts += [_text(x1 + 10, y + 4, key, f"value {kind}-ink") for y, kind, key in ends]
    a, b = steps[0], steps[-1]
    said = f"reward from {a.reward:.2f} to {b.reward:.2f}, success from {a.success:.2f} to {b.success:.2f}"
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
        parts.append(_text(x0 + cell * (j + 0.5), top - 8, chr(65 + j), "axis middle", name))
    for i, (name, row) in enumerate(zip(router.labels, router.counts, strict=True)):
        parts.append(_text(_LABEL, top + tall * (i + 0.5) + 4, f"{chr(65 + i)}  {_short(name, 17)}", "name end", name))
        for j, count in enumerate(row):
            share = count / sum(row) if sum(row) else 0.0
            kind = "routed" if i == j else "wrong"
            x, y = x0 + cell * j + 1, top + tall * i + 1
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" height="{tall - 2:.1f}" rx="3"'
            parts.append(f'<rect class="cell" {box}/>')
            if count:
                parts.append(f'<rect class="{kind} bar" style="opacity:{0.15 + 0.6 * share:.2f}" {box}/>')
            parts.append(_text(x0 + cell * (j + 0.5), top + tall * (i + 0.5) + 5, str(count), "middle"))
    return _svg(height, "Router confusion matrix", f"accuracy {percent(router.accuracy)}", parts)


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
