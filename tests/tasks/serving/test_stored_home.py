"""A home whose folder is lost: another one on the same database and registry has its files from the storage, and
answers with the same adapters."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from db import open_store
from environments.targets.shop.target import target
from errors import ConfigurationError
from models.objects import files_of
from settings import Settings, load_settings
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.findings import Level
from tasks.housekeeping.service_checks import storage
from tasks.housekeeping.stored_checks import stored_findings
from tasks.reporting.headline import why_nothing
from tasks.reporting.lookup import figures_by_key
from tasks.round.registry import open_registry
from tests.storage_served import s3_served
from tests.tasks.serving.test_restored_home import answers
from tests.tasks.serving.test_serving import Home


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_served() as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def home(
    request: pytest.FixtureRequest, s3: str, settings_folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Home:
    """A home with its databases elsewhere, its router in the storage, and MLflow's files, too."""
    files = f"{s3}/kept" if request.param == "s3" else (settings_folder / "share").as_uri()
    for name in ("database", "tracking"):
        monkeypatch.setenv(f"TRACE_{name.upper()}", f"sqlite:///{settings_folder}/{name}.db")
    monkeypatch.setenv("TRACE_FILES", files)
    made = Home(settings_folder, tiny_tokenizer)
    made.registry = open_registry(made.settings, "shop")
    files_of(made.settings).put(made.router_path)
    return made


def lose(home: Home) -> Settings:
    """Remove the home's folder; the settings of another, with nothing in it."""
    from mlflow.tracking._tracking_service import utils

    shutil.rmtree(home.folder)
    utils._artifact_repos_cache.clear()  # another process does not know where the files of a model lie
    return load_settings(
        home=home.folder.parent / "else" / "where", base_model=home.settings.base_model, dtype="float32"
    )


def told(home: Home) -> str:
    """All that MLflow's database says."""
    place = Path(home.settings.tracking.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(place)) as opened:
        return "\n".join(opened.iterdump())


def test_another_home_answers_with_the_same_adapters(home: Home) -> None:
    home.promote(home.register("refund_payment", 1), home.register("exchange_item", 2))
    before = answers(home.settings)
    assert before[1].startswith("refund_payment@v1-")
    there = lose(home)
    assert answers(there) == before
    assert (there.folder / home.router_path).is_dir()
    assert [f.said for f in stored_findings(there, True) if f.level != Level.OK] == []
    assert str(home.folder) not in told(home), "no registry knows where the home was"


def test_the_figures_of_a_round_are_found_by_another_home(settings_folder: Path) -> None:
    files = (settings_folder / "share").as_uri()
    there = {"database": f"sqlite:///{settings_folder}/trace.db", "files": files}
    one, other = (load_settings(home=settings_folder / name, **there) for name in ("one", "other"))
    with open_store(one.database_url) as store:
        row = store.start_round("shop", target().data_hash, 0, "laptop", one.identity())
        figures = figures_by_key(one, store)
        assert why_nothing(figures) == "The round is not over: its figures come with its report."
        figures = figures.model_copy(update={"stopped": "as the report said"})
        (one.folder / row.id).mkdir(parents=True)
        (one.folder / row.id / "figures.json").write_text(figures.model_dump_json())
        files_of(one).put(f"{row.id}/figures.json")
        shutil.rmtree(one.folder)
        assert figures_by_key(other, store) == figures


def test_doctor_looks_at_the_storage_and_backup_refuses_such_a_home(settings_folder: Path) -> None:
    (settings_folder / "file").touch()
    share, wrong = (load_settings(files=(settings_folder / name).as_uri()) for name in ("share", "file"))
    assert storage(share).level == Level.OK
    assert storage(wrong).level == Level.FAULT
    assert "cannot be used" in storage(wrong).said
    with pytest.raises(ConfigurationError, match=r"puts its files in 'file:///.*/share'"):
        make_backup(share, settings_folder / "home.zip", "1")
