"""Releases in MLflow, for people and programs that look there: the alias `champion` of each capability's model, and a
registered model `trace-<target>-release` with one version a release and the alias `live`.

The database is the truth (`tasks/releases/lifecycle.py`); these are the single steps that bring MLflow to it. Each may
be done again and changes nothing the second time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import AdapterError, StoreError
from models.adapters.failures import may_pass, of_mlflow
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import CHAMPION, Registry, without_password

LIVE = "live"
RELEASE_TAG = "release"


@dataclass(frozen=True)
class Aliases:
    """What MLflow says at present: the versions that have the alias `champion`, by registered model, and the id of the
    release that has the alias `live`."""

    champions: Mapping[str, str]
    live: str | None


@contextmanager
def answering(registry: Registry, what: str) -> Iterator[None]:
    """Raises StoreError, without any password, when MLflow does not answer or fails, or its database does not open;
    `what` it was to be told. It is transient where a wait may help (`failures.may_pass`)."""
    try:
        _ = registry.client  # importing mlflow through it keeps mlflow quiet
        yield
    except Exception as problem:
        if not of_mlflow(problem):
            raise
        passes, said = may_pass(problem), without_password(str(problem).partition("\n")[0].rstrip("."))
        do = "bring MLflow back" if passes else "mend MLflow ('trace-agent doctor' looks at it)"
        failed = StoreError(
            f"MLflow at {registry.shown_uri} cannot be told {what}: {said}; the database knows it: {do}, then run any "
            "command"
        )
        failed.transient = passes
        raise failed from None


def release_model(registry: Registry) -> str:
    """The registered model whose versions are the target's releases."""
    return f"trace-{registry.target}-release"


def read_aliases(registry: Registry) -> Aliases:
    """All aliases of the target's models."""
    champions, live = {}, None
    for model in registry.models():
        if model.name == release_model(registry) and LIVE in model.aliases:
            version = registry.client.get_model_version(model.name, str(model.aliases[LIVE]))
            live = version.tags.get(RELEASE_TAG, "")
        elif model.tags.get("target") == registry.target and CHAMPION in model.aliases:
            champions[model.name] = str(model.aliases[CHAMPION])
    return Aliases(champions, live)


def set_champion(registry: Registry, model: str, version: str) -> None:
    """Put the alias `champion` of a registered model on a version. Raises AdapterError when there is none."""
    _refusing(registry, model, version, lambda: registry.client.set_registered_model_alias(model, CHAMPION, version))


def drop_champion(registry: Registry, model: str) -> None:
    """Take the alias `champion` from a registered model."""
    registry.client.delete_registered_model_alias(model, CHAMPION)


def put_release(registry: Registry, release: str, tags: Mapping[str, str], document: Mapping[str, Any]) -> str:
    """The version of a release (its id), made when it is not there: `tags` on the version, `document` as its file
    `release.json`. Returns the version's number."""
    from mlflow.exceptions import MlflowException

    client, name = registry.client, release_model(registry)
    known = client.search_model_versions(f"name = '{name}' AND tags.`{RELEASE_TAG}` = '{release}'")
    if known:
        return str(min(int(version.version) for version in known))
    model_id = _document_of(registry, release, document)
    try:
        # No tag `target`: that marks the models of capabilities.
        client.create_registered_model(name, tags={"releases_of": registry.target})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    with registry.as_global_uri():
        made = client.create_model_version(
            name, source=f"models:/{model_id}", tags={**tags, RELEASE_TAG: release}, model_id=model_id
        )
    return str(made.version)


def set_live(registry: Registry, version: str | None) -> None:
    """Put the alias `live` on a version of the release model; None takes it away."""
    name = release_model(registry)
    if version is None:
        registry.client.delete_registered_model_alias(name, LIVE)
    else:
        registry.client.set_registered_model_alias(name, LIVE, version)


def registered_version(registry: Registry, capability: str, version: str) -> RegisteredAdapter:
    """One version of a capability. Raises AdapterError when the registry has none."""
    model = registry.model_name(capability)
    found = _refusing(registry, model, version, lambda: registry.client.get_model_version(model, version))
    return registry.adapter_of(capability, found)


def _refusing(registry: Registry, model: str, version: str, step: Any) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return step()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise AdapterError(
            f"{model} has no version {version} in {registry.shown_uri}, though a release names it: it was deleted "
            "there; restore MLflow's database, or go back with 'trace-agent rollback'"
        ) from error


def _document_of(registry: Registry, release: str, document: Mapping[str, Any]) -> str:
    """The logged model that holds the release's document; what a crash left half done is not used."""
    client = registry.client
    found = client.search_logged_models([registry.experiment_id], f"tags.`{RELEASE_TAG}` = '{release}'")
    ready = [model for model in found if str(model.status) == "READY"]
    if ready:
        return str(ready[0].model_id)
    made = client.create_logged_model(
        registry.experiment_id, name="release", tags={RELEASE_TAG: release}, model_type="release"
    )
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "release.json").write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")
        client.log_model_artifacts(made.model_id, place)
    client.finalize_logged_model(made.model_id, "READY")
    return str(made.model_id)
