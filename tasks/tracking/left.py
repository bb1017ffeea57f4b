"""Runs that MLflow shows as running though the process that worked on them is gone."""

from __future__ import annotations

from collections.abc import Mapping

from db import RoundState
from models.adapters.registry import Registry

# MLflow's page of a search; a round has a run for itself, and one for each part of it.
MOST_RUNS = 1000
# What a run is then. One that may be gone on with is set running by whoever goes on with it (`Registry.start_run`).
STATUS: Mapping[RoundState, str] = {RoundState.DONE: "FINISHED", RoundState.FAILED: "FAILED"}


def end_runs(registry: Registry, round_id: str, state: RoundState, ended: int | None = None) -> list[str]:
    """End the runs of a round, and of its parts, that are still shown as running, at `ended` milliseconds since 1970
    (now); their ids. `state` is how the round ended: any but done and failed may be gone on with, and is KILLED."""
    wanted = f"tags.round = '{round_id}' and attributes.status = 'RUNNING'"
    found = [
        str(run.info.run_id)
        for run in registry.client.search_runs([registry.experiment_id], wanted, max_results=MOST_RUNS)
    ]
    for run in found:
        registry.client.set_terminated(run, STATUS.get(state, "KILLED"), ended)
    return found
