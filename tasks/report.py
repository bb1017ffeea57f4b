"""The last stage, `trace-agent stage report`: all figures of a round from the store, as JSON, as a page, and in
MLflow."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.reporting.collect import figures_of
from tasks.reporting.headline import headline
from tasks.reporting.nothing_trained import how_it_ended
from tasks.reporting.page import render
from tasks.reporting.tracking import log_round
from tasks.round.context import Context
from tasks.round.results import ReportResult
from tasks.round.stage import stage

FILE = "report.html"


@stage("report", title="write the report")
def report(context: Context) -> ReportResult:
    """Write `report.html` and `figures.json` into the round's folder, and log both to MLflow: in the round's run, and
    in the one of the target's history."""
    target, settings = context.target, context.settings
    ended = how_it_ended(context.stored, target, settings.asks_a_model, settings.selection.rho)
    figures = figures_of(context.stored, settings, target, context.base.identity, ended)
    page = context.folder / FILE
    html = render(figures)
    page.write_text(html, encoding="utf-8")
    (context.folder / "figures.json").write_text(figures.model_dump_json(indent=1), encoding="utf-8")
    log_round(context.registry, figures, html)
    create_markdown_artifact(
        key="round",
        description=f"How the round on {context.round.target} ended",
        markdown=f"{headline(figures)}\n\nReport: `{page.name}` of round `{context.round.id}`",
    )
    return ReportResult(page=str(page), reason=ended.reason)
