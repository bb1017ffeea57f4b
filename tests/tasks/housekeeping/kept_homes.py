"""Homes with releases, a report and checkpoints, made in a second, for tests of backups, doctor and retention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from db import RoundState, open_store
from models.adapters.registry import Registry
from settings import Settings, load_settings
from tasks.round.registry import open_registry
from tests.tasks.releases.release_homes import Home

# What lies in a home and is no part of it.
KEY = "sk-never-in-a-backup"


@contextmanager
def opened(folder: Path, **given: object) -> Iterator[Home]:
    """The home of a folder, which may be new, as a new process sees it: MLflow's client keeps in the process where the
    files of a model lie."""
    from mlflow.tracking._tracking_service import utils

    utils._artifact_repos_cache.clear()
    settings = settings_of(folder, **given)
    with open_store(settings.database_url) as store:
        yield Home(store, open_registry(settings, "shop"), folder)


def settings_of(folder: Path, **given: object) -> Settings:
    return load_settings(**{"home": folder, "target": "shop", **given})


def registry_of(folder: Path) -> Registry:
    return open_registry(settings_of(folder), "shop")


def make_home(folder: Path) -> None:
    """Two releases, the second live; a run with a report; a stage that says where its page is; a checkpoint."""
    with opened(folder) as home:
        home.promoted({"refund": home.member("refund")})
        home.promoted({"refund": home.member("refund"), "exchange": home.member("exchange")})
        round_ = home.store.latest_round("shop")
        assert round_ is not None
        place = folder / round_.id
        checkpoint = place / "training" / "refund" / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete.json").write_text("[]")
        (checkpoint / "optimizer.pt").write_bytes(b"never read" * 100)
        (place / "report.html").write_text("<html>the report</html>")
        run = home.registry.start_run(f"{round_.id}-round")
        home.registry.log_report(run, "<html>the report</html>")
        home.registry.end_run(run)
        ledger = home.store.stage(round_.id, "report")
        assert ledger.claim()
        ledger.finish({"page": str(place / "report.html"), "reason": ""})
        for other in home.store.rows(type(round_), target="shop"):
            home.store.finish_round(other.id, RoundState.DONE, "promoted")
