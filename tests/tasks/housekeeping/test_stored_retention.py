"""What `trace-agent clean` removes from a home's storage, whichever home put it there; and what doctor says of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from db import AdapterRow, ReleaseState, RoundState
from errors import ConfigurationError, StoreError
from flows.cli.main import app
from models.adapters.files import adapter_digest
from models.objects import MANIFEST, HomeFiles, files_of
from settings import Settings
from tasks.housekeeping.findings import Level
from tasks.housekeeping.retention import removals, remove
from tasks.housekeeping.stored_checks import release_files
from tasks.releases.lifecycle import releases_of
from tests.storage_served import s3_served
from tests.tasks.housekeeping.kept_homes import opened, settings_of
from tests.tasks.housekeeping.test_retention import trained

WHOLE = ["checkpoint-2/adapter_model.safetensors", "weights/step-1/adapter_model.safetensors"]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_served() as address:
        yield address


@pytest.fixture
def kept(request: pytest.FixtureRequest, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trainings by what became of their adapter, put as the stage `train` puts them; settings of the home and of
    another, with nothing in it, on the same databases and storage."""
    files = f"{s3}/{tmp_path.name}" if request.param == "s3" else (tmp_path / "share").as_uri()
    for name in ("database", "tracking"):
        monkeypatch.setenv(f"TRACE_{name.upper()}", f"sqlite:///{tmp_path}/{name}.db")
    monkeypatch.setenv("TRACE_FILES", files)
    with opened(tmp_path / "home") as home:
        members = {name: home.member("refund") for name in ("live", "none", "stopped", "young")}
        home.promoted({"refund": members["live"]})
        places, settings = {}, settings_of(home.folder)
        for name, member in members.items():
            state = RoundState.INTERRUPTED if name == "stopped" else RoundState.DONE
            training = trained(home, member, state, 1 if name == "young" else 40)
            places[name] = training.relative_to(home.folder).as_posix()
            files_of(settings).put(places[name], leave_out=("final",), prune=True)
            files_of(settings).put(f"{places[name]}/final")
            files_of(settings).put(f"{training.parents[1].name}/report.html")
        (tmp_path / "other").mkdir()
        yield {"home": home, "settings": settings, "places": places, "other": settings_of(tmp_path / "other")}


def there(files: HomeFiles, place: str) -> tuple[list[str], list[str]]:
    """What is stored of a training, and of the adapter that came out of it."""
    return files.names(place), files.names(f"{place}/final")


@pytest.mark.parametrize(("kept", "which"), [("s3", "settings"), ("file", "other")], indirect=["kept"])
def test_what_nothing_needs_goes_from_the_storage_too(kept: Any, which: str, tmp_path: Path) -> None:
    settings: Settings = kept[which]
    files, places = files_of(settings), kept["places"]
    chosen = removals(settings, 7)
    # Checkpoints of two trainings, and one adapter that no release has; in the home checkpoints and weights lie apart.
    assert len([r for r in chosen if r.objects]) == 3
    assert len([r for r in chosen if not r.objects]) == (5 if which == "settings" else 0)
    assert all(r.place.startswith(f"{files.address}/") for r in chosen if r.objects)
    assert remove(settings, chosen) == sum(r.bytes for r in chosen) > 2000
    adapter = ["adapter_model.safetensors"]
    assert {name: there(files, place) for name, place in places.items()} == {
        "live": ([], adapter),
        "none": ([], []),
        "stopped": (WHOLE, adapter),  # the next run goes on with it
        "young": (WHOLE, adapter),
    }
    for place in places.values():
        assert files.names(f"{place.split('/')[0]}/report.html") == [""]
    nothing = HomeFiles(tmp_path / "new", files.address)
    assert nothing.fetch(f"{places['live']}/final").is_dir()
    assert files.sizes(places["none"]) == {}, "no content is left behind"
    assert removals(settings, 7) == []


@pytest.mark.parametrize("kept", ["file"], indirect=True)
def test_a_dry_run_says_it_a_refusal_keeps_the_home_and_halves_of_uploads_go(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, place = kept["settings"], kept["places"]["none"]
    before = {p: there(files_of(settings), p) for p in kept["places"].values()}
    given = ["clean", "--older-than", "7", "--home", str(settings.folder), "--dry-run"]
    said = CliRunner().invoke(app, given, catch_exceptions=False).output
    assert f"{settings.files}/{place}/final  (round 2, in the storage: trained copy" in said
    assert f"{settings.files}/{place}  (round 2, in the storage: checkpoints and weights)" in said
    assert "8 entries, " in said
    assert {p: there(files_of(settings), p) for p in kept["places"].values()} == before
    assert removals(settings, 7, keep_gb=1) == []
    assert [bool(r.objects) for r in removals(settings, 7, keep_gb=0)].count(True) == 3

    here, chosen = sorted(settings.folder.rglob("*")), removals(settings, 7)
    with monkeypatch.context() as patch:
        patch.setattr(HomeFiles, "remove", refusing)
        with pytest.raises(StoreError, match="denied"):
            remove(settings, chosen)
    assert sorted(settings.folder.rglob("*")) == here

    files = files_of(settings)
    files.remove([name for name in files.sizes(place) if name.endswith(MANIFEST)])
    assert files.sizes(place)
    remove(settings, removals(settings, 7))
    assert files.sizes(place) == {}


@pytest.mark.parametrize("kept", ["s3"], indirect=True)
def test_a_storage_that_is_away_is_said_before_anything_is_removed(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kept["settings"]
    before = sorted(settings.folder.rglob("*"))

    def cleaned() -> BaseException | None:
        run = CliRunner().invoke(app, ["clean", "--older-than", "7", "--home", str(settings.folder)])
        assert run.output == ""
        assert sorted(settings.folder.rglob("*")) == before
        return run.exception

    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        patch.setattr("s3fs.S3FileSystem.cachable", False)  # the clients there are know the server
        away = cleaned()
    assert isinstance(away, StoreError)
    assert str(away).startswith(f"{settings.files} failed while writing a probe")
    monkeypatch.setenv("TRACE_FILES", "s3://nobodys/x")
    nowhere = cleaned()
    assert isinstance(nowhere, ConfigurationError)
    assert "name a bucket that exists" in str(nowhere)


def refusing(*_: Any) -> None:
    raise StoreError("denied")


@pytest.mark.parametrize("kept", ["s3"], indirect=True)
def test_doctor_says_what_is_missing_or_changed_in_the_storage(kept: Any) -> None:
    home, settings = kept["home"], kept["settings"]
    files, place = files_of(settings), f"{kept['places']['live']}/final"
    (row,) = (a for a in home.store.rows(AdapterRow) if a.path == place)
    made = next(folder for folder in home.folder.glob("refund-*") if adapter_digest(folder) == row.sha256)
    shutil.copytree(made, settings.folder / place, dirs_exist_ok=True)
    files.put(place)
    live = [r for r in releases_of(home.store, "shop") if r.state == ReleaseState.LIVE]

    def said() -> list[str]:
        found = release_files(settings, home.store, home.registry, live)
        return [f"{f.said} -> {f.do}" for f in found if f.level == Level.FAULT]

    assert said() == []
    contents = [name for name in files.sizes(place) if not name.endswith(MANIFEST)]
    system = fsspec.filesystem(files.address.partition(":")[0], use_listings_cache=False)
    for content in contents:
        system.pipe_file(f"{files.address}/{content}", b"other")
    (changed,) = said()
    assert "release 1 (live)" in changed
    assert f"{files.address}/{place}/" in changed
    assert "has SHA-256" in changed
    files.remove(contents)
    assert "is gone, and a manifest names it -> put its folder again" in said()[0]
    files.remove(files.sizes(place))
    assert f"{files.address}/{place} is not there -> put it again from a home that has it" in said()[0]
