"""The registry of what was learnt: MLflow, one experiment a target, one registered model a capability, one version an
adapter.

A version `trace-<target>-<capability>` holds exactly the two files of an adapter, is tagged with the SHA-256 of them
and with what it was trained on and by, and is served only after its bytes were checked against that tag. Aliases:
`challenger` is the latest version that was registered, `champion` that of the live release, which `releases.py` beside
this file keeps so. Nothing is ever unpickled.
Importing this module does not import mlflow (two seconds); the first use does.

Where the truth is: the database knows what happened; a crash here is mended by calling the same function again.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from errors import AdapterError, ConfigurationError, StoreError
from models.adapters.datasets import dataset_of
from models.adapters.files import (
    ADAPTER_FILES,
    AdapterRecord,
    RegisteredAdapter,
    adapter_digest,
    check_location,
    check_names,
    checked_key,
    checked_name,
    flush,
    verify,
)
from models.adapters.tracking import make_database

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

CHAMPION, CHALLENGER = "champion", "challenger"
# What MLflow can keep its registry in: a server, or a database by SQLAlchemy's name (a driver may follow a plus).
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
RUN_KEY_TAG = "trace.key"
PARENT_TAG = "mlflow.parentRunId"
_BATCH = 1000  # the most metrics that MLflow takes in one call
_PAGE = 1000  # the most registered models that it gives in one answer
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # mlflow takes only the literal "true"
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


class Registry:
    """MLflow for one target. `tracking_uri` is a server's http(s) URL or `sqlite:////absolute/path`; with sqlite
    `artifact_root` (an absolute folder) holds the files, and nothing outside it is ever read. With `storage`,
    the address of an object storage, new experiments keep theirs there, and both are read. Raises ConfigurationError
    for relative paths."""

    def __init__(self, tracking_uri: str, target: str, artifact_root: Path | None = None, storage: str = "") -> None:
        scheme = urlparse(tracking_uri).scheme
        if scheme == "sqlite" and not tracking_uri.startswith("sqlite:////"):
            raise ConfigurationError(
                f"{tracking_uri!r} is relative to the working folder; write sqlite:////absolute/path.db"
            )
        if scheme in ("", "file"):
            raise ConfigurationError(
                f"{tracking_uri!r} is a file store, which MLflow no longer supports; use sqlite:////absolute/path.db"
            )
        if scheme.partition("+")[0] not in SCHEMES:
            raise ConfigurationError(
                f"tracking = {without_password(tracking_uri)!r} has the unknown scheme {scheme!r}; give the "
                "http(s) address of an MLflow server, or sqlite:////absolute/path.db"
            )
        self.remote = scheme in ("http", "https")
        if not self.remote and (artifact_root is None or not artifact_root.is_absolute()):
            raise ConfigurationError(
                f"artifact_root must be an absolute folder beside {tracking_uri!r}, got {artifact_root}"
            )
        self.tracking_uri = tracking_uri
        self.target = checked_name(target, "target")
        self.storage = "" if self.remote else storage
        self.artifact_root = None if artifact_root is None else artifact_root.resolve()

    def start_run(
        self,
        key: str,
        tags: Mapping[str, str] | None = None,
        name: str = "",
        parent: str = "",
        began: int | None = None,
    ) -> str:
        """The run of `key` (such as `r3/set_address/train`), begun or resumed, as MLflow's run id. It is called `name`
        (the key if there is none) and nested under the run `parent`; `began` is in milliseconds since 1970."""
        found = self.client.search_runs(
            [self.experiment_id], f"tags.`{RUN_KEY_TAG}` = '{checked_key(key)}'", max_results=1
        )
        if found:
            run_id = str(found[0].info.run_id)
            self.client.update_run(run_id, status="RUNNING")
        else:
            own = {RUN_KEY_TAG: key} | ({PARENT_TAG: parent} if parent else {})
            run = self.client.create_run(self.experiment_id, began, own | dict(tags or {}), run_name=name or key)
            run_id = str(run.info.run_id)
        return run_id

    def end_run(self, run_id: str, failed: bool = False, stopped: bool = False, ended: int | None = None) -> None:
        """End a run, at `ended` milliseconds since 1970 (now). `stopped`: it may be gone on with."""
        status = "FAILED" if failed else "KILLED" if stopped else "FINISHED"
        self.client.set_terminated(run_id, status, ended)

    def log_steps(self, run_id: str, steps: Mapping[int, Mapping[str, float]]) -> int:
        """Stores metrics by step and returns how many were new. A (metric, step) that is there already is left as it
        is, so a resumed training may send all its steps again."""
        from mlflow.entities import Metric

        names = {name for metrics in steps.values() for name in metrics}
        known = {name: {m.step for m in self.client.get_metric_history(run_id, name)} for name in names}
        now = int(time.time() * 1000)
        fresh = [
            Metric(name, float(value), now, step)
            for step, metrics in sorted(steps.items())
            for name, value in metrics.items()
            if step not in known[name]
        ]
        for start in range(0, len(fresh), _BATCH):
            self.client.log_batch(run_id, metrics=fresh[start : start + _BATCH])
        return len(fresh)

    def log_report(self, run_id: str, html: str, name: str = "report.html") -> None:
        """Stores the report page as an artifact of the round's run."""
        self.client.log_text(run_id, html, name)

    def register(self, record: AdapterRecord, folder: Path, run_id: str) -> RegisteredAdapter:
        """Registers an adapter folder as the next version of its capability, and as `challenger`.

        Idempotent by the SHA-256 of the files: the same bytes give the version that exists, and what a crash left half
        done (files logged but no version, a version but no alias) is completed. Raises AdapterError for anything but
        the two files."""
        digest = adapter_digest(folder)
        name = self.model_name(record.capability)
        known = self._version_by_hash(name, digest)
        if known is None:
            model_id = self._ready_model(record, digest) or self._log_model(record, folder, run_id, digest)
            known = self._create_version(name, record, model_id, run_id, digest)
        self.client.set_registered_model_alias(name, CHALLENGER, known.version)
        return self.adapter_of(record.capability, known)

    def log_evaluation(
        self, adapter: RegisteredAdapter, frame: pd.DataFrame, dataset: str, metrics: Mapping[str, float]
    ) -> None:
        """Puts figures on the adapter's logged model, with the pandas frame they come from as the run's dataset input
        (its content is hashed, not stored: the database has it)."""
        from mlflow.entities import DatasetInput, InputTag

        source = dataset_of(frame, dataset)
        entity = source._to_mlflow_entity()
        self.client.log_inputs(adapter.run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "eval")])])
        for key, value in metrics.items():
            self.client.log_metric(
                adapter.run_id,
                key,
                float(value),
                dataset_name=source.name,
                dataset_digest=source.digest,
                model_id=adapter.model_id,
            )

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        """All versions of a capability, oldest first."""
        found = self.client.search_model_versions(f"name = '{self.model_name(capability)}'", max_results=10_000)
        return [self.adapter_of(capability, version) for version in sorted(found, key=lambda v: int(v.version))]

    def by_alias(self, capability: str, alias: str) -> RegisteredAdapter | None:
        """The version that an alias names, or None."""
        from mlflow.exceptions import MlflowException

        try:
            version = self.client.get_model_version_by_alias(self.model_name(capability), alias)
        except MlflowException as error:
            if error.error_code in (
                "RESOURCE_DOES_NOT_EXIST",
                "INVALID_PARAMETER_VALUE",
            ):  # no such model; no such alias
                return None
            raise
        return self.adapter_of(capability, version)

    def champion(self, capability: str) -> RegisteredAdapter | None:
        """The version that is served, or None when the base model answers."""
        return self.by_alias(capability, CHAMPION)

    def champions(self) -> dict[str, RegisteredAdapter]:
        """Champion by capability, over all capabilities of the target."""
        models = [model for model in self.models() if model.tags.get("target") == self.target]
        names = [model.name.removeprefix(f"trace-{self.target}-") for model in models]
        found = {name: self.champion(name) for name in sorted(names)}
        return {name: adapter for name, adapter in found.items() if adapter is not None}

    def models(self) -> Iterator[RegisteredModel]:
        """The registered models whose names begin as the target's do; so may those of another target, which its tag
        tells apart."""
        page: str | None = None
        while page != "":
            found = self.client.search_registered_models(
                f"name LIKE 'trace-{self.target}-%'", max_results=_PAGE, page_token=page
            )
            yield from found
            page = found.token or ""

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        """The adapter's folder `destination/<served_name>`, fetched when needed and verified always.

        Raises AdapterError when the source lies outside the artifact root, holds anything but the two files, or its
        bytes are not those that were registered. A folder appears whole (by rename) or not at all."""
        from mlflow.artifacts import download_artifacts

        folder = destination / adapter.served_name
        if not folder.exists():
            location = str(self.client.get_logged_model(adapter.model_id).artifact_location)
            check_location(location, adapter, None if self.remote else self.artifact_root, self.storage)
            check_names((item.path for item in self.client.list_logged_model_artifacts(adapter.model_id)), location)
            destination.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=destination, prefix=".fetch-") as scratch:
                for file in ADAPTER_FILES:
                    download_artifacts(
                        artifact_uri=f"{location.rstrip('/')}/{file}", dst_path=scratch, tracking_uri=self.tracking_uri
                    )
                verify(Path(scratch), adapter)
                flush(Path(scratch))
                Path(scratch).chmod(0o755)
                try:
                    os.rename(scratch, folder)
                except OSError:
                    if not folder.is_dir():  # else another process was faster and has fetched the same
                        raise
                Path(scratch).mkdir(exist_ok=True)  # for the context manager to remove
        verify(folder, adapter)
        return folder

    def link(self, adapter: RegisteredAdapter) -> str:
        """Where the version is seen in MLflow's UI; a `models:` address when there is no server."""
        if self.remote:
            return f"{self.shown_uri.rstrip('/')}/#/models/{adapter.name}/versions/{adapter.version}"
        return f"models:/{adapter.name}/{adapter.version}"

    def run_link(self, run_id: str) -> str:
        """Where a run is seen in MLflow's UI; "" when there is no server."""
        where = f"#/experiments/{self.experiment_id}/runs/{run_id}"
        return f"{self.shown_uri.rstrip('/')}/{where}" if self.remote else ""

    def model_name(self, capability: str) -> str:
        return f"trace-{self.target}-{checked_name(capability, 'capability')}"

    @property
    def shown_uri(self) -> str:
        """Where MLflow is, without a password."""
        return without_password(self.tracking_uri)

    @cached_property
    def experiment_id(self) -> str:
        """The target's experiment `trace-<target>`, created on first use with its files under the artifact root."""
        from mlflow.exceptions import MlflowException

        client, name = self.client, f"trace-{self.target}"
        found = client.get_experiment_by_name(name)
        if found is None:
            location = (
                None if self.remote or self.artifact_root is None else (self.artifact_root / self.target).as_uri()
            )
            location = f"{self.storage}/{self.target}" if self.storage else location
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)  # another process was faster
        if found is None or found.lifecycle_stage != "active":
            raise StoreError(
                f"experiment {name!r} is deleted in {self.shown_uri}; restore it (mlflow experiments restore)"
            )
        return str(found.experiment_id)

    @cached_property
    def client(self) -> MlflowClient:
        """MLflow's own client, made on first use."""
        os.environ.update(_ENVIRONMENT)  # read by mlflow when it is imported
        from mlflow import MlflowClient

        make_database(self.tracking_uri)
        return MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)

    @contextmanager
    def as_global_uri(self) -> Iterator[None]:
        """MLflow's SQL registry looks a `models:/<id>` source up in the process-wide tracking URI, whatever its client
        says."""
        import mlflow

        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(self.tracking_uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)

    def _ready_model(self, record: AdapterRecord, digest: str) -> str | None:
        """A logged model with these bytes that a crash left without a version."""
        found = self.client.search_logged_models([self.experiment_id], f"tags.sha256 = '{digest}'")
        ready = [m for m in found if str(m.status) == "READY" and m.tags.get("capability") == record.capability]
        return str(ready[0].model_id) if ready else None

    def _log_model(self, record: AdapterRecord, folder: Path, run_id: str, digest: str) -> str:
        from mlflow.exceptions import MlflowException

        client = self.client
        model = client.create_logged_model(
            self.experiment_id,
            name=f"{record.capability}-lora",
            source_run_id=run_id,
            tags=self._tags(record, digest),
            params={key: str(value) for key, value in record.params.items()},
            model_type="lora-adapter",
        )
        try:
            client.log_model_artifacts(model.model_id, str(folder))
        except (MlflowException, OSError):
            client.finalize_logged_model(model.model_id, "FAILED")
            raise
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _create_version(
        self, name: str, record: AdapterRecord, model_id: str, run_id: str, digest: str
    ) -> ModelVersion:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name, tags={"target": self.target, "capability": record.capability})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = self._tags(record, digest) | {"gate": "pending", "model_id": model_id}
        with self.as_global_uri():
            version = self.client.create_model_version(
                name, source=f"models:/{model_id}", run_id=run_id, tags=tags, model_id=model_id
            )
        # What mlflow's own register_model writes, so that the UI shows the version beside the logged model.
        link = json.dumps([{"name": name, "version": version.version}])
        self.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})
        return version

    def _tags(self, record: AdapterRecord, digest: str) -> dict[str, str]:
        own = {
            "sha256": digest,
            "capability": record.capability,
            "target": self.target,
            "base": record.base,
            "base_revision": record.base_revision,
            "round": record.round,
        }
        return dict(record.tags) | own

    def _version_by_hash(self, name: str, digest: str) -> ModelVersion | None:
        found = self.client.search_model_versions(f"name = '{name}' AND tags.sha256 = '{digest}'")
        return min(found, key=lambda v: int(v.version)) if found else None

    def adapter_of(self, capability: str, version: ModelVersion) -> RegisteredAdapter:
        """MLflow's version as an adapter of ours. Raises AdapterError when this project did not register it."""
        tags, source = dict(version.tags), str(version.source or "")
        # version.model_id is None on the SQLite store, so the id comes from the source, which must have this form.
        match = re.fullmatch(r"models:/(m-[0-9a-f]{32})", source)
        if match is None or "sha256" not in tags:
            raise AdapterError(
                f"version {version.version} of {version.name} has source {source!r} and tags {sorted(tags)}: "
                "not registered by this project; register the adapter folder again"
            )
        return RegisteredAdapter(
            name=str(version.name),
            version=str(version.version),
            capability=capability,
            sha256=tags["sha256"],
            model_id=match.group(1),
            run_id=str(version.run_id or ""),
            tags=tags,
        )


def without_password(text: str) -> str:
    """A text without the users (whose names may hold an @) and passwords (a database's a slash) of its addresses."""
    text = re.sub(r"(?<!http:)(?<!https:)//\S*@|//[^/\s]*@", "//", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1", text)
