"""The last stage, `trace-agent stage report`: all figures of a round from the store, as JSON, as a page, and in
MLflow."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.episodes.lineage import as_table, lineages_of
from tasks.episodes.pages import INDEX, write_report
from tasks.episodes.secrets import hiding, without_secrets
from tasks.episodes.traces import log_traces
from tasks.reporting.collect import figures_of
from tasks.reporting.figures import RoundFigures
from tasks.reporting.headline import headline
from tasks.reporting.lookup import EPISODES, FIGURES, REPORT
from tasks.reporting.nothing_trained import how_it_ended
from tasks.round.context import Context
from tasks.round.results import ReportResult
from tasks.round.stage import stage
from tasks.round.stored import StoredRound
from tasks.tracking.parts import log_parts
from tasks.tracking.rounds import log_round
from tasks.tracking.versions import describe_versions
from tasks.unattended.prefect_pages import show


@stage("report", title="write the report")
def report(context: Context) -> ReportResult:
    """Write `report.html`, the pages of its episodes and `figures.json` into the round's folder, and log to MLflow:
    in the round's run, and figures in the one of the target's history, too."""
    target, settings = context.target, context.settings
    ended = how_it_ended(context.stored, target, settings.asks_a_model, settings.selection.rho)
    hide = hiding(settings)
    figures = without_secrets(figures_of(context.stored, settings, target, context.base.identity, ended), hide)
    html = write_report(settings, context.store, figures)
    # Other commands read the file: it is whole, or as it was.
    part = context.folder / ".figures.json"
    part.write_text(figures.model_dump_json(indent=1), encoding="utf-8")
    part.replace(context.folder / FIGURES)
    for name in (REPORT, EPISODES, FIGURES):
        context.files.put(f"{context.round.id}/{name}")
    _ = context.run  # before anything is logged: another home's run of the same round is set aside by it
    run = log_round(context.registry, figures, html, context.folder / EPISODES)
    log_parts(context.registry, context.stored, run)
    describe_versions(context.registry, context.stored, figures)
    log_traces(context.registry, context.stored, figures, hide, settings.traces)
    show(
        create_markdown_artifact,
        key="round",
        description=f"How the round on {context.round.target} ended",
        markdown=prefect_summary(context.stored, figures, context.registry.run_link(run)),
    )
    return ReportResult(page=f"{context.round.id}/{REPORT}", reason=ended.reason)


def prefect_summary(stored: StoredRound, figures: RoundFigures, link: str = "") -> str:
    """How the round ended, the way of each capability from failure to release, and where the pages are, in Markdown.
    `link` is the round's run in MLflow ("": there is no server)."""
    run = f"[MLflow's run of it]({link})" if link else "MLflow's run of it"
    where = f"`{REPORT}` and `{EPISODES}/{INDEX}` in the folder of round `{stored.round.id}`, and in {run}"
    parts = (
        headline(figures),
        as_table(lineages_of(stored, figures, {})),
        f"Report, and episodes side by side: {where}.",
    )
    return "\n\n".join(part for part in parts if part)
