"""A round in MLflow: its report and figures in a run of its own, and the same figures, by round, in the one run of the
target's history, which MLflow draws as a chart over rounds."""

from __future__ import annotations

from models.adapters.registry import Registry
from tasks.reporting.figures import RoundFigures, lineages


def log_round(registry: Registry, figures: RoundFigures, html: str) -> None:
    """Log a round that is done. Done again it changes nothing: what is logged already for a step stays as it is."""
    metrics = round_metrics(figures)
    run = registry.start_run(f"{figures.round}-round", {"round": figures.round, "kind": "round"})
    registry.log_report(run, html)
    registry.log_steps(run, {0: metrics})
    registry.end_run(run)
    steps = history_metrics(figures)
    if figures.number is not None:
        steps[figures.number] = steps.get(figures.number, {}) | metrics
    run = registry.start_run(f"{registry.target}-history", {"kind": "history"})
    registry.log_steps(run, steps)
    registry.end_run(run)


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
        if row.seconds is not None:
            metrics["seconds/total"] = row.seconds
        found[row.round] = metrics
    return found
