"""The last stage: all figures of a round from the store, as JSON, as a page, and in MLflow."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact

from tasks.reporting.collect import figures_of
from tasks.reporting.figures import (
    RoundFigures,
    headline,
)
from tasks.reporting.page import render
from tasks.round.context import current
from tasks.round.retries import RETRIES

FILE = "report.html"


@task(name="report", task_run_name="write the report", **RETRIES)
def report(round_id: str, stopped: str = "") -> dict[str, Any]:
    """Write `report.html` and `figures.json` into the round's folder, log both to MLflow; returns the page's path."""
    context = current(round_id)
    figures = figures_of(context, stopped)
    page = context.folder / FILE
    html = render(figures)
    page.write_text(html, encoding="utf-8")
    (context.folder / "figures.json").write_text(figures.model_dump_json(indent=1), encoding="utf-8")
    run = context.registry.start_run(f"{round_id}-round", {"round": round_id, "kind": "round"})
    context.registry.log_report(run, html)
    context.registry.log_steps(run, {0: round_metrics(figures)})
    context.registry.end_run(run)
    create_markdown_artifact(
        key="round",
        description=f"What the round on {context.round.target} came to",
        markdown=f"{headline(figures)}\n\nReport: `{page.name}` of round `{round_id}`",
    )
    return {"page": str(page)}


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
