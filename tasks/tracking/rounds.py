"""A round in MLflow: its report and figures in a run of its own, and the same figures, by round, in the one run of the
target's history, which MLflow draws as a chart over rounds."""

from __future__ import annotations

from pathlib import Path

from db import RoundState
from models.adapters.registry import Registry
from models.adapters.runs import RunLog
from tasks.reporting.figures import RoundFigures
from tasks.reporting.headline import headline
from tasks.reporting.history import lineages
from tasks.round.registry import round_key, run_name

# A run's description, as MLflow shows it.
NOTE = "mlflow.note.content"
# What the history says of a round that ended for good before it was tested.
ENDED = (RoundState.FAILED, RoundState.CANCELLED)
WHERE = "Artifacts: `report.html`, and `episodes/index.html`: its episodes, and the way from failure to release."


def log_round(registry: Registry, figures: RoundFigures, html: str, pages: Path | None = None) -> str:
    """Log a round that is done, with its report and the folder of its episodes' `pages`; returns its run. Done again
    it changes nothing: what is logged already for a step stays as it is."""
    metrics = round_metrics(figures)
    tags = {"round": figures.round, "kind": "round", "number": str(figures.number or ""), "target": figures.target}
    own = registry.start_run(round_key(figures.round), tags, run_name(figures.target, figures.number))
    registry.log_report(own, html)
    if pages is not None:
        RunLog(registry, own).folder(pages, pages.name)
    registry.log_steps(own, {0: metrics})
    registry.client.set_tag(own, NOTE, f"{headline(figures)}\n\n{WHERE}")
    registry.end_run(own)
    steps = history_metrics(figures)
    if figures.number is not None:
        steps[figures.number] = steps.get(figures.number, {}) | metrics
    run = registry.start_run(f"{registry.target}-history", {"kind": "history"}, f"{figures.target}: all nights")
    registry.log_steps(run, steps)
    registry.end_run(run)
    return own


def round_metrics(figures: RoundFigures) -> dict[str, float]:
    """The round's headline figures as MLflow metrics: rates in [0, 1], differences in points, seconds by stage."""
    metrics = {f"seconds/{k}".replace(":", "/"): v for k, v in figures.seconds.items()}
    for name in ("base", "live", "routed", "noop"):
        rate = getattr(figures, name)
        if rate is not None:
            metrics |= {f"test/{name}": rate.success, f"test/{name}_low": rate.low, f"test/{name}_high": rate.high}
    for name, difference in (("", figures.difference), ("gain_", figures.gain)):
        if difference:
            metrics |= {f"test/{name}points": difference.points, f"test/{name}p": difference.p}
    if figures.after is not None:
        metrics["release"] = float(figures.after)
    return metrics


def history_metrics(figures: RoundFigures) -> dict[int, dict[str, float]]:
    """What the store knows of every round so far, by number: so a registry that lost rounds has them again. `lineage`
    grows where the target's data changed: across it figures do not compare."""
    found: dict[int, dict[str, float]] = {}
    for row, lineage in zip(figures.history, lineages(figures.history), strict=True):
        if row.round is None:
            continue
        metrics = {"lineage": float(lineage)}
        for name, rate in (("base", row.base), ("routed", row.test)):
            if rate is not None:
                metrics |= {f"test/{name}": rate.success, f"test/{name}_low": rate.low, f"test/{name}_high": rate.high}
        if row.after is not None:
            metrics["release"] = float(row.after)
        # What is logged for a step stays, and a round that goes on takes longer.
        if row.seconds is not None and (row.test is not None or row.verdict in ENDED):
            metrics["seconds/total"] = row.seconds
        found[row.round] = metrics
    return found
