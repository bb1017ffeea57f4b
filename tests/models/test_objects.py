"""A home's files in a storage, on a real S3 server and in a folder: whole or not at all, and never what was changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from errors import ConfigurationError, StoreError
from models.objects import MANIFEST, HomeFiles
from tests.storage_served import s3_served


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_served() as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def address(request: pytest.FixtureRequest, s3: str, tmp_path: Path) -> str:
    """Of a storage with nothing in it."""
    return f"{s3}/{tmp_path.name}" if request.param == "s3" else (tmp_path / "share").as_uri()


def written(home: Path, **content: str) -> Path:
    """A folder `round/made` in a home with these files ("__" in a name begins a folder)."""
    for name, text in content.items():
        path = home / "round" / "made" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home / "round" / "made"


def read(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def stored(address: str) -> dict[str, bytes]:
    """Every object by its last two names."""
    system = fsspec.filesystem(address.partition(":")[0], use_listings_cache=False)
    return {"/".join(key.split("/")[-2:]): system.cat_file(key) for key in system.find(address)}


def test_another_home_has_what_one_put(address: str, tmp_path: Path) -> None:
    ours, theirs = HomeFiles(tmp_path / "a", address), HomeFiles(tmp_path / "b", address)
    written(ours.home, one="1", inner__two="2", same="1", final__left="out")
    (ours.home / "round" / "made" / ".part").write_text("half")
    ours.put("round/made", leave_out=("final",))
    ours.put("round/made/inner/two")
    there = stored(address)
    assert len(there) == 5, "two contents and a manifest, and those of the file that was put by itself"
    assert read(theirs.fetch("round/made")) == {"one": "1", "inner/two": "2", "same": "1"}
    assert sorted(os.listdir(theirs.home / "round")) == ["made"], "nothing is left of the way there"
    assert HomeFiles(tmp_path / "c", address).fetch("round/made/inner/two").read_text() == "2"
    assert not theirs.fetch("round/never").exists()
    assert theirs.names("round/made") == ["inner/two", "one", "same"]


def test_what_the_home_has_is_not_fetched_and_what_is_put_again_is_replaced(address: str, tmp_path: Path) -> None:
    ours, theirs = HomeFiles(tmp_path / "a", address), HomeFiles(tmp_path / "b", address)
    written(ours.home, kept="1", old="2")
    ours.put("round/made", prune=True)
    theirs.fetch("round/made")
    first = stored(address)
    (ours.home / "round" / "made" / "old").unlink()
    written(ours.home, new="3")
    ours.put("round/made", prune=True)
    assert len(stored(address)) == 3, "what no manifest names any more is gone"
    assert stored(address).keys() & first.keys() == {k for k in first if k.endswith(MANIFEST) or first[k] == b"1"}
    assert read(theirs.fetch("round/made")) == {"kept": "1", "old": "2"}
    assert read(theirs.fetch("round/made", replace=True)) == {"kept": "1", "new": "3"}


def test_half_an_upload_is_not_there_and_is_gone_on_with(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = HomeFiles(tmp_path / "a", address), HomeFiles(tmp_path / "b", address)
    written(ours.home, one="1", two="2")
    monkeypatch.setattr(HomeFiles, "_write", dying)
    with pytest.raises(StoreError, match="putting round/made") as failed:
        ours.put("round/made")
    assert failed.value.transient
    assert not theirs.fetch("round/made").exists()
    monkeypatch.undo()
    ours.put("round/made")
    assert read(theirs.fetch("round/made")) == {"one": "1", "two": "2"}


def dying(*_: Any) -> None:
    raise TimeoutError("away")


def test_what_was_changed_there_is_refused(address: str, tmp_path: Path) -> None:
    ours, theirs = HomeFiles(tmp_path / "a", address), HomeFiles(tmp_path / "b", address)
    written(ours.home, one="1")
    ours.put("round/made")
    system = fsspec.filesystem(address.partition(":")[0], use_listings_cache=False)
    manifest, content = sorted(system.find(address), key=lambda key: not key.endswith(MANIFEST))
    system.pipe_file(content, b"other")
    with pytest.raises(StoreError, match=r"SHA-256 .* put it again from a home") as refused:
        theirs.fetch("round/made")
    assert not refused.value.transient
    assert list(theirs.home.rglob("*")) == [theirs.home / "round"]
    system.rm_file(content)
    with pytest.raises(StoreError, match="is gone, and a manifest names it"):
        theirs.fetch("round/made")
    for wrong in ('{"files": {"../out": "%s"}}' % ("0" * 64), '{"files": {"in": "../x"}}', "{", '{"files": {}}'):
        system.pipe_file(manifest, wrong.encode())
        with pytest.raises(StoreError, match="is no manifest"):
            theirs.fetch("round/made")


def test_several_fetch_at_once(address: str, tmp_path: Path) -> None:
    ours, theirs = HomeFiles(tmp_path / "a", address), HomeFiles(tmp_path / "b", address)
    written(ours.home, **{f"file{n}": "x" * n for n in range(4)})
    ours.put("round/made")
    found: list[dict[str, str]] = []
    several = [threading.Thread(target=lambda: found.append(read(theirs.fetch("round/made")))) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert found == [{f"file{n}": "x" * n for n in range(4)}] * 4
    assert sorted(os.listdir(theirs.home / "round")) == ["made"]


def test_without_an_address_nothing_happens(tmp_path: Path) -> None:
    files = HomeFiles(tmp_path)
    files.put("nowhere")
    files.check()
    assert files.fetch("nowhere") == tmp_path / "nowhere"
    assert files.names("nowhere") == []


def test_a_storage_that_works_is_left_as_it_was(address: str, tmp_path: Path) -> None:
    HomeFiles(tmp_path, address).check()
    assert stored(address) == {}


def test_a_bucket_that_does_not_exist_is_refused_before_the_start(s3: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://nobodys/x.*cannot be used.*name a bucket that exists"):
        HomeFiles(tmp_path, "s3://nobodys/x").check()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        HomeFiles(tmp_path, (tmp_path / "file" / "in").as_uri()).check()


def test_a_storage_that_is_away_may_come_back(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setattr("s3fs.S3FileSystem.cachable", False)  # the clients there are know the server
    with pytest.raises(StoreError, match="s3://homes failed while writing a probe") as away:
        HomeFiles(tmp_path, s3).check()
    assert away.value.transient
    assert "kept-to-itself" not in str(away.value)


# FTP would say what is wrong after a traceback of its backend's, and what is put in memory is gone with the process.
NO_STORAGE = ("ftp", "http", "memory", "zip", "nothing")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://someone:secret@bucket/prefix", "a user, a password or options"),
        ("s3://bucket/prefix?secret=secret", "a user, a password or options"),
        ("/mnt/share", "'/mnt/share' is no address; write s3"),
        ("s3:///prefix", "is no address; write s3"),
        ("file://mnt/share", "no absolute folder; write file:///FOLDER"),
        *((f"{scheme}://somewhere/x", f"'{scheme}' is no storage for a home; write s3") for scheme in NO_STORAGE),
        ("gs://bucket/prefix", "a backend of fsspec for 'gs' that is not installed"),
    ],
)
def test_an_address_that_cannot_work_is_refused(address: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        HomeFiles(tmp_path, address)
    assert "secret" not in str(refused.value)
