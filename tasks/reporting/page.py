"""The report of a round as one self-contained HTML page: no script, no font, no image, no request to anywhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from tasks.measuring.gate_plan import p_phrase, p_text
from tasks.reporting import charts
from tasks.reporting.figures import RoundFigures, duration, percent, release_name, two
from tasks.reporting.headline import headline, tone, unsaid, why_nothing
from tasks.reporting.history import lineages

TEMPLATES = Path(__file__).parent


def render(figures: RoundFigures, episodes: str = "") -> str:
    """The page as text (UTF-8 when written). Every part that the round never reached is replaced by the reason.
    `episodes` is the address, relative to the page, of the round's episodes ("": none were written)."""
    chosen = [c for c in figures.capabilities if c.selected]
    ranked = sorted(
        figures.capabilities,
        key=lambda c: (not c.selected, c.mean_delta is None, -(c.mean_delta or 0.0), -(c.mean_cov or 0.0), c.name),
    )
    by_rule = [c for c in ranked if c.mean_delta is not None]
    seconds = [(name, value) for name, value in figures.seconds.items() if name != "total"]
    tokens = [(name, float(value)) for name, value in figures.tokens.items() if name != "total"]
    plots = {
        "history": charts.history_chart(figures.history, lineages(figures.history)) if figures.history else "",
        "families": charts.family_chart(figures.families) if figures.families else "",
        "selection": charts.selection_chart(by_rule, figures.selection) if by_rule else "",
        "router": charts.confusion_chart(figures.router) if figures.router and figures.router.labels else "",
        "seconds": charts.share_chart("Time by stage", [(n, v, duration(v)) for n, v in seconds]) if seconds else "",
        "tokens": charts.share_chart("Sampled tokens", [(n, v, f"{v:,.0f}") for n, v in tokens]) if tokens else "",
    }
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            f=figures,
            episodes=episodes,
            headline=headline(figures),
            nothing=why_nothing(figures),
            unsaid=unsaid(figures),
            tone=tone(figures),
            history=list(zip(figures.history, lineages(figures.history), strict=True)),
            dollars=any(row.dollars for row in figures.history),
            ranked=ranked,
            chosen=chosen,
            plots={name: Markup(svg) for name, svg in plots.items()},
            training={c.name: Markup(charts.training_chart(c.name, c.steps)) for c in chosen if c.steps},
            seconds=seconds,
            tokens=tokens,
        )
    )


@cache
def environment() -> jinja2.Environment:
    """The templates of this folder, escaped, with the filters that say figures in words."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent, duration=duration, p=p_text, p_phrase=p_phrase, two=two, release_name=release_name
    )
    return environment
