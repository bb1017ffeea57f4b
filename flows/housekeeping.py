"""Weekly housekeeping as a flow: what nothing needs is removed, everything around the home is looked at, and notices
that wait are sent. The run fails where something is wrong, so that Prefect's pages show it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import deployment
from pydantic import Field

from errors import StoreError
from flows.runs.missed import makes_way
from flows.runs.one_at_a_time import deaths_before
from settings import Settings, load_settings
from settings_parts import Part
from tasks.housekeeping.doctor import examine, lines
from tasks.housekeeping.findings import Level
from tasks.housekeeping.retention import forget, forgotten_text, give_up, removal_text, removals, remove
from tasks.operations.announcements import failure_announced, settings_announced, tell_last_run
from tasks.unattended.notices import Notice, deliver, notify
from tasks.unattended.prefect_pages import show
from tasks.unattended.stalls import hung_before, watched

logger = logging.getLogger("trace")


class HousekeepingParameters(Part):
    """What `trace-agent clean` and `trace-agent doctor` take."""

    older_than: int = Field(default=30, ge=1, le=36_500, description="days since what is removed was done with")
    keep: float | None = Field(default=None, ge=0, description="GB: remove, oldest first, until the home takes this")
    conversations_older_than: int | None = Field(
        default=None, ge=1, le=36_500, description="days after which users' conversations are removed; none: never"
    )
    profile: str | None = Field(default=None, description="laptop, night, bfcl, gpu-small, gpu, cluster, smoke or dry")
    home: Path | None = Field(default=None, description="folder of the embedded store, registry and reports")


@flow(name="housekeeping", log_prints=False)
def housekeeping(params: HousekeepingParameters | None = None) -> str:
    """Keep a home once. Raises `StoreError` when the doctor finds a fault: it is told, too."""
    given = params or HousekeepingParameters()
    with settings_announced(bool(deployment.id), "housekeeping", home=given.home):
        settings = load_settings(home=given.home, profile=given.profile)
    with failure_announced(settings, bool(deployment.id), "housekeeping"):
        tell_last_run(settings, "housekeeping", deaths_before(), hung_before(_hangs(settings)))
        if (way := makes_way()) is not None:
            return way  # type: ignore[no-any-return]
        with _ended_when_it_hangs(settings):
            # Chosen first, for a storage that is away is told there.
            chosen = removals(settings, given.older_than, given.keep)
            given_up = give_up(settings, given.older_than, dry_run=False)
            freed = removal_text(settings, len(chosen), remove(settings, chosen), dry_run=False)
            freed = "\n".join([*given_up, freed])
            if (days := given.conversations_older_than) is not None:
                freed += "\n" + forgotten_text(days, forget(settings, days, dry_run=False), dry_run=False)
            logger.info("%s", freed)
            deliver(settings)
            findings = examine(settings)
    faults = [f for f in findings if f.level == Level.FAULT]
    report = "\n".join(["```", *lines(findings), "```", "", freed])
    show(
        create_markdown_artifact,
        key="housekeeping",
        description="What was removed, and the doctor's lines",
        markdown=report,
    )
    if faults:
        what = "; ".join(f"{f.check}: {f.said}" for f in faults)
        text = f"{len(faults)} faults around {settings.folder.name}: {what}; 'trace-agent doctor' says what to do"
        notify(settings, Notice("unwell", settings.target, text))
        raise StoreError(text)
    return freed


def _hangs(settings: Settings) -> Path:
    """Where a run that hung leaves its stacks."""
    return settings.folder / "housekeeping"


@contextmanager
def _ended_when_it_hangs(settings: Settings) -> Iterator[None]:
    """Within, the run ends itself as a round does, when nothing moves: no night begins while it has the worker's one
    place. On a full disk it goes on without that, for it is there to free space."""
    with ExitStack() as held:
        try:
            _hangs(settings).mkdir(exist_ok=True)
            held.enter_context(watched(settings.limits.idle_minutes, _hangs(settings)))
        except OSError as problem:
            logger.warning("a housekeeping that hangs would not end itself (%s)", problem)
        yield
