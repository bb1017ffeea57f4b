"""What a run in MLflow shows beside its metrics over steps: parameters, datasets, tables, pages, traces, and figures on
the model version that came of it. Each may be logged again and changes nothing the second time.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.contract import content_hash
from models.adapters.datasets import dataset_of
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import Registry
from models.adapters.traces import PlayedTrace, spans_of

if TYPE_CHECKING:
    import pandas as pd

# Where MLflow looks for the tables of a run.
TABLES_TAG = "mlflow.loggedArtifacts"
# Traces that are linked to a run in one call, the most that MLflow takes.
_LINKED = 100
# The longest name of a metric that MLflow takes, and the parts of a path that it refuses in one.
_LONGEST = 250
_PARTS = {"": "_", ".": "_.", "..": "_.."}


@dataclass
class RunLog:
    """Logs into one run of a registry."""

    registry: Registry
    run: str

    @cached_property
    def _known(self) -> Any:
        """What the run held when it was first asked for."""
        return self.registry.client.get_run(self.run)

    def params(self, params: Mapping[str, object]) -> None:
        """Parameters that are not there yet; one that is there stays as it is."""
        from mlflow.entities import Param

        fresh = [Param(key, str(value)) for key, value in params.items() if key not in self._known.data.params]
        if fresh:
            self.registry.client.log_batch(self.run, params=fresh)

    def metrics(self, metrics: Mapping[str, float], adapter: RegisteredAdapter | None = None) -> None:
        """Metrics without steps that are not there yet; of the `adapter`'s logged model too."""
        from mlflow.entities import Metric

        now, model = int(time.time() * 1000), adapter.model_id if adapter else None
        keys = metric_keys(metrics)
        fresh = [
            Metric(keys[name], float(value), now, 0, model_id=model)
            for name, value in metrics.items()
            if keys[name] not in self._known.data.metrics
        ]
        if fresh:
            self.registry.client.log_batch(self.run, metrics=fresh)

    def dataset(self, frame: pd.DataFrame, name: str, context: str) -> None:
        """The tasks or scenarios that the run used, as an input of it (hashed, not stored: the database has them)."""
        from mlflow.entities import DatasetInput, InputTag

        if any(given.dataset.name == name for given in self._known.inputs.dataset_inputs):
            return
        entity = dataset_of(frame, name)._to_mlflow_entity()
        given = DatasetInput(entity, [InputTag("mlflow.data.context", context)])
        self.registry.client.log_inputs(self.run, [given])

    def table(self, frame: pd.DataFrame, file: str) -> None:
        """An evaluation table, which MLflow shows and compares over runs; `file` ends in .json."""
        if file not in self._known.data.tags.get(TABLES_TAG, ""):
            self.registry.client.log_table(self.run, frame, file)

    def text(self, text: str, file: str) -> None:
        """A file with this text."""
        self.registry.client.log_text(self.run, text, file)

    def folder(self, folder: Path, place: str) -> None:
        """All files of a folder, at `place` among the run's artifacts."""
        self.registry.client.log_artifacts(self.run, str(folder), place)

    def traces(self, traces: Sequence[PlayedTrace]) -> None:
        """Episodes as traces of the run: one call for all, because a call for each takes ten times as long."""
        if not traces:
            return
        _ = self.registry.client  # importing mlflow through it keeps mlflow quiet
        from mlflow.tracing.client import TracingClient

        with self.registry.as_global_uri():
            spans = [span for trace in traces for span in spans_of(trace)]
            TracingClient(self.registry.tracking_uri).log_spans(self.registry.experiment_id, spans)
            ids = [trace.id for trace in traces]
            for start in range(0, len(ids), _LINKED):
                self.registry.client.link_traces_to_run(ids[start : start + _LINKED], self.run)


def put_on_version(
    registry: Registry, adapter: RegisteredAdapter, tags: Mapping[str, object], description: str = ""
) -> None:
    """Write tags, and the description in Markdown, on a model version, where people look for them."""
    for key, value in tags.items():
        registry.client.set_model_version_tag(adapter.name, adapter.version, key, str(value))
    if description:
        registry.client.update_model_version(adapter.name, adapter.version, description)


def describe_capability(registry: Registry, adapter: RegisteredAdapter, description: str) -> None:
    """What the adapter's registered model is for, in words."""
    registry.client.update_registered_model(adapter.name, description)


def metric_keys(names: Collection[str]) -> dict[str, str]:
    """A key for each of the metrics' names. Where several names come to the same key, each of them is told apart by a
    hash of its own, or MLflow would keep the figure of one alone."""
    keys = {name: metric_key(name) for name in names}
    sharing = Counter(keys.values())
    return {n: k if sharing[k] == 1 else metric_key(f"{k[:240]}-{content_hash(n, 8)}") for n, k in keys.items()}


def metric_key(name: str) -> str:
    """A name as MLflow takes it for a metric: without the characters that it refuses and, since it takes a name for a
    path, with no part that is empty, `.` or `..`, as in a family that is called `/orders/refund`."""
    key = "/".join(_PARTS.get(part, part) for part in re.sub(r"[^\w\-./ :]", "_", name).split("/"))
    return key if len(key) <= _LONGEST else re.sub(r"[./]$", "_", key[:_LONGEST])


def as_tag(figures: Mapping[str, float]) -> str:
    """Figures by name as one tag."""
    return json.dumps({name: round(value, 4) for name, value in figures.items()})
