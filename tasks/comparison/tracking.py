"""A comparison in MLflow: one run for each method and seed, in the target's experiment."""

from __future__ import annotations

from environments.contract import content_hash
from models.adapters.registry import Registry
from models.adapters.runs import metric_keys
from tasks.comparison.results import SeedResult


def log_method(registry: Registry, result: SeedResult, name: str) -> None:
    """Log a method of a seed. Done again it changes nothing; other outcomes, or other data, are another run."""
    figures = result.methods[name]
    found = content_hash([result.data_hash, figures.outcomes], 8)
    tags = {
        "kind": "method",
        "method": name,
        "seed": str(result.seed),
        "budget": str(result.budget),
        "data_hash": result.data_hash,
        "commit": figures.commit or result.commit,
    }
    run = registry.start_run(
        f"compare/{result.settings}/{result.budget}/seed-{result.seed}/{name.replace('+', '-')}/{found}", tags
    )
    registry.log_steps(run, {0: metrics_of(result, name)})
    registry.log_report(run, figures.model_dump_json(indent=1), f"{name}.json")
    registry.end_run(run)


def metrics_of(result: SeedResult, name: str) -> dict[str, float]:
    """A method's figures as MLflow metrics: success in [0, 1], as a mean over tasks, whole and by family.
    Families that need several services are called by all of them, with a plus between, which MLflow refuses."""
    figures = result.methods[name]
    rates = {
        t: sum(known) / len(known) for t, x in figures.outcomes.items() if (known := [v for v in x if v is not None])
    }
    metrics = {
        "episodes": float(figures.episodes),
        "prompt_tokens": float(figures.prompt_tokens),
        "sampled_tokens": float(figures.sampled_tokens),
        "seconds": figures.seconds,
        "dollars": figures.dollars,
    }
    played = {"test/success": list(rates.values())}
    for task, rate in rates.items():
        played.setdefault(f"test/success/{result.families[task]}", []).append(rate)
    keys = metric_keys(played)
    return metrics | {keys[name]: sum(x) / len(x) for name, x in played.items() if x}
