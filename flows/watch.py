"""The daily watch as a flow: what is live against what it replaced, on the deployment `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import deployment
from prefect.states import Cancelled
from pydantic import Field

from errors import TargetBusy
from flows.runs.missed import makes_way
from flows.runs.one_at_a_time import alone_on, deaths_before
from settings import load_settings, writable_folder
from settings_parts import Part
from tasks.operations.announcements import failure_announced, settings_announced, tell_last_run
from tasks.operations.watch import watch_release, watch_text
from tasks.round.preflight import preflight
from tasks.unattended.notices import deliver
from tasks.unattended.prefect_pages import show
from tasks.unattended.stalls import hung_before, watched


class WatchParameters(Part):
    """What a person sets for a watch; everything else comes from the profile, `trace.toml` and the environment."""

    target: str | None = Field(default=None, description="what the release answers on, such as shop or tau2:retail")
    profile: str | None = Field(default=None, description="laptop, night, bfcl, gpu-small, gpu, cluster, smoke or dry")
    base_model: str | None = Field(default=None, description="the model that rounds train")
    home: Path | None = Field(default=None, description="folder of the embedded store, registry and reports")


@flow(name="watch", log_prints=False)
def watch(params: WatchParameters | None = None) -> str:
    """Watch the live release of a target once; what was found, in one sentence a comparison. It holds what a round of
    the target needs: one that hangs ends itself, as a round does."""
    given = params or WatchParameters()
    with settings_announced(bool(deployment.id), "watch", target=given.target, home=given.home):
        settings = load_settings(**given.model_dump())
    try:
        with failure_announced(settings, bool(deployment.id), "watch"):
            preflight(settings)
            tell_last_run(settings, "watch", deaths_before(settings.target), hung_before(settings.folder))
            if (way := makes_way()) is not None:
                return way  # type: ignore[no-any-return]
            with alone_on(settings.target), watched(settings.limits.idle_minutes, writable_folder(settings.folder)):
                found = watch_release(settings)
                deliver(settings)
    except TargetBusy as busy:
        cancelled: Any = Cancelled(message=str(busy))
        return cancelled  # type: ignore[no-any-return]
    text = watch_text(found)
    show(create_markdown_artifact, key="watch", description="The live release against what it replaced", markdown=text)
    return text
