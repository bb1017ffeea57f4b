"""The last stage, `trace-agent stage report`: all figures of a round from the store, as JSON, as a page, and in
MLflow."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.reporting.collect import figures_of
from tasks.reporting.figures import (
    RoundFigures,
    headline,
)
from tasks.reporting.nothing_trained import nothing_trained
from tasks.reporting.page import render
from tasks.round.adapters import registered
from tasks.round.context import Context
from tasks.round.results import ReportResult
from tasks.round.stage import stage

FILE = "report.html"


@stage("report", title="write the report")
def report(context: Context) -> ReportResult:
    """Write `report.html` and `figures.json` into the round's folder, and log both to MLflow."""
    target, settings = context.target, context.settings
    reason = "" if registered(context.stored) else nothing_trained(context.stored, target, settings.asks_a_model)
    figures = figures_of(context.stored, settings, target, context.base.identity, reason)
    page = context.folder / FILE
    html = render(figures)
    page.write_text(html, encoding="utf-8")
    (context.folder / "figures.json").write_text(figures.model_dump_json(indent=1), encoding="utf-8")
    run = context.registry.start_run(f"{context.round.id}-round", {"round": context.round.id, "kind": "round"})
    context.registry.log_report(run, html)
    context.registry.log_steps(run, {0: round_metrics(figures)})
    context.registry.end_run(run)
    create_markdown_artifact(
        key="round",
        description=f"How the round on {context.round.target} ended",
        markdown=f"{headline(figures)}\n\nReport: `{page.name}` of round `{context.round.id}`",
    )
    return ReportResult(page=str(page), reason=reason)


def round_metrics(figures: RoundFigures) -> dict[str, float]:
    """The round's headline figures as MLflow metrics."""
    metrics = {f"seconds/{k}".replace(":", "/"): v for k, v in figures.seconds.items()}
    for name in ("base", "routed", "noop"):
        rate = getattr(figures, name)
        if rate is not None:
            metrics[f"test/{name}"] = rate.success
    if figures.difference:
        metrics |= {"test/points": figures.difference.points, "test/p": figures.difference.p}
    return metrics
