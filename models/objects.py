"""The files of a home in object storage, under the same paths as in the home (the setting `files`).

The home stays the working folder. What others need is put into the storage before the database says that it is done,
and fetched from there where the home lacks it. The backend of fsspec for its scheme (`STORAGES`) has to be installed;
keys are read from the environment by the backend, and nothing here logs one.

A file or a folder `PATH` of the home is, below the address: `PATH/<SHA-256>` for every content, and
`PATH/manifest.json`, written last, which says which file has which. So a half upload is never taken for whole, the same
content goes up once, and whatever comes back is compared with its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from errors import ConfigurationError, StoreError, TraceError
from settings import Settings

MANIFEST = "manifest.json"
# Schemes of what keeps a file whole, for other machines too. Fsspec has more: memory, archives, servers without rename.
STORAGES = ("s3", "file", "gs", "gcs", "abfs", "abfss", "az")
# What waiting does not mend; everything else that a storage says may pass.
_LASTING = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)
_LASTING_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "InvalidRegionError")
# botocore repeats on its own, too: together with s3fs's five attempts a storage that is away would take minutes.
_S3 = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}


@dataclass(frozen=True)
class HomeFiles:
    """The folder of a home, and the address that its files are put to; with "" nothing is put or fetched.

    Raises `ConfigurationError` for an address that nothing here can reach. All paths are relative to the home. Whatever
    asks the storage raises `StoreError`, `transient` where the same may work later.
    """

    home: Path
    address: str = ""

    def __post_init__(self) -> None:
        if self.address:
            check_address(self.address)

    def put(self, relative: str, leave_out: Collection[str] = (), prune: bool = False) -> None:
        """Store a file or a folder of the home whole, without its hidden files and the folders `leave_out` in it.

        Doing it again costs one small read. Of two processes that put the same path the later manifest counts, and both
        are whole; with `prune` contents that only the last manifest named are removed, so nobody else may put it.
        """
        if not self.address:
            return
        found = _files(self.home / relative, leave_out)
        if not found:
            raise StoreError(f"{self.home / relative} is gone or empty, and should be put to {self.address}")
        with self._asking(f"putting {relative}"):
            before = self._manifest(relative) or {}
            named = {name: _digest(path) for name, path in found.items()}
            if named == before:
                return
            stored = set(before.values())
            for name, digest in named.items():
                if digest not in stored:
                    self._upload(found[name], f"{relative}/{digest}")
                    stored.add(digest)
            self._write(json.dumps({"files": named}, sort_keys=True).encode(), f"{relative}/{MANIFEST}")
            if prune:
                for digest in sorted(stored - set(named.values())):
                    self._system.rm_file(self._key(f"{relative}/{digest}"))

    def fetch(self, relative: str, replace: bool = False) -> Path:
        """Where a file or folder lies in the home: brought there when the home lacks it, or always with `replace`.

        It appears whole or not at all. Where the storage has none either nothing is there afterwards. Raises
        `StoreError` for contents that are not those of the manifest.
        """
        place = self.home / relative
        if not self.address or (place.exists() and not replace):
            return place
        with self._asking(f"fetching {relative}"):
            named = self._manifest(relative)
            if named is None:
                return place
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f".fetch-{uuid.uuid4().hex}")
            try:
                for name, digest in named.items():
                    self._download(f"{relative}/{digest}", part / name if name else part, digest)
                if replace and place.is_dir():
                    shutil.rmtree(place)
                _appear(part, place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
                part.unlink(missing_ok=True)
        return place

    def names(self, relative: str) -> list[str]:
        """The names of the files of a stored folder, in order; none where it is not stored."""
        if not self.address:
            return []
        with self._asking(f"reading {relative}"):
            return sorted(self._manifest(relative) or ())

    def verify(self, relative: str) -> None:
        """Read a stored file or folder whole and compare its digests. Raises `StoreError` for what is missing there or
        was changed, whatever the home has."""
        if not self.address:
            return
        with self._asking(f"reading {relative}"):
            named = self._manifest(relative)
            if named is None:
                raise StoreError(f"{self.address}/{relative} is not there; put it again from a home that has it")
            for digest in sorted(set(named.values())):
                try:
                    with self._system.open(self._key(f"{relative}/{digest}"), "rb") as file:
                        found = hashlib.file_digest(file, "sha256").hexdigest()
                except FileNotFoundError as problem:
                    raise _missing(f"{self.address}/{relative}/{digest}") from problem
                if found != digest:
                    raise _changed(f"{self.address}/{relative}/{digest}", found, digest)

    def sizes(self, relative: str) -> dict[str, int]:
        """Bytes of every object below a path, manifests among them, by its path below the address; halves of uploads
        are there, too."""
        if not self.address:
            return {}
        with self._asking(f"listing {relative}"):
            root = self._key("")
            found = self._system.find(self._key(relative), detail=True)
            return {key.removeprefix(root): int(entry["size"]) for key, entry in sorted(found.items())}

    def remove(self, objects: Collection[str]) -> None:
        """Remove objects, as `sizes` names them: manifests first, so that nothing half is ever taken for whole."""
        first = [name for name in objects if PurePosixPath(name).name == MANIFEST]
        for part in (first, sorted(set(objects) - set(first))):
            if part:
                with self._asking(f"removing {part[0]}"):
                    self._system.rm([self._key(name) for name in part])

    def check(self) -> None:
        """Prove that the storage can be written and read. Raises `ConfigurationError` where it never will, `StoreError`
        where it does not answer now."""
        if not self.address:
            return
        key = f".probe-{uuid.uuid4().hex}"
        try:
            with self._asking("writing a probe"):
                self._write(b"probe", key)
                self._system.cat_file(self._key(key))
                self._system.rm_file(self._key(key))
        except StoreError as problem:
            if problem.transient:
                raise
            raise ConfigurationError(
                f"files = {self.address!r} cannot be used: {problem.__cause__ or problem}; name a bucket that exists, "
                "and give keys that may read, write and delete in it (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            ) from problem

    @cached_property
    def _system(self) -> Any:
        import fsspec

        scheme = urlsplit(self.address).scheme
        options: dict[str, Any] = {"config_kwargs": _S3} if scheme == "s3" else {}
        return fsspec.filesystem(scheme, use_listings_cache=False, **options)

    def _key(self, relative: str) -> str:
        root: str = self._system._strip_protocol(self.address)
        return f"{root.rstrip('/')}/{relative}"

    def _manifest(self, relative: str) -> dict[str, str] | None:
        """SHA-256 by name ("" for a file that was put by itself); None where nothing whole is stored."""
        try:
            text = self._system.cat_file(self._key(f"{relative}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        try:
            return _checked_names(json.loads(text)["files"])
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise StoreError(
                f"{self.address}/{relative}/{MANIFEST} is no manifest ({problem}); remove it there, then run what made "
                f"{relative} again in a home that has it"
            ) from problem

    def _upload(self, path: Path, relative: str) -> None:
        with self._whole(relative) as key:
            self._system.put_file(str(path), key)

    def _write(self, content: bytes, relative: str) -> None:
        with self._whole(relative) as key:
            self._system.pipe_file(key, content)

    @contextmanager
    def _whole(self, relative: str) -> Iterator[str]:
        """The key to write to. An object of a storage is there whole or not at all; a file of a disk is by rename."""
        key = self._key(relative)
        if "file" not in self._system.protocol:
            yield key
            return
        part = Path(key).with_name(f".put-{uuid.uuid4().hex}")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield str(part)
            _flush(part)
            part.replace(key)
        finally:
            part.unlink(missing_ok=True)

    def _download(self, relative: str, path: Path, digest: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._system.get_file(self._key(relative), str(path))
        except FileNotFoundError as problem:
            # Its manifest may have been replaced since it was read, which the next attempt will see.
            missing = _missing(f"{self.address}/{relative}")
            missing.transient = True
            raise missing from problem
        if (found := _digest(path)) != digest:
            raise _changed(f"{self.address}/{relative}", found, digest)
        _flush(path)  # what is in its place is not fetched again, also where a power cut has left it empty

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Within, the storage is asked: whatever its backend raises is one `StoreError` that says `what` failed."""
        try:
            yield
        except TraceError:
            raise
        except Exception as problem:
            first = (str(problem).splitlines() or [""])[0][:200]
            failed = StoreError(
                f"{self.address} failed while {what} ({type(problem).__name__}: {first}); see that it answers and that "
                "its keys are in the environment, then the same command goes on"
            )
            failed.transient = not isinstance(problem, _LASTING) and type(problem).__name__ not in _LASTING_NAMES
            raise failed from problem


def files_of(settings: Settings) -> HomeFiles:
    """The files of the settings' home. Raises `ConfigurationError` for an address that nothing here can reach."""
    return HomeFiles(settings.folder, settings.files.rstrip("/"))


def check_address(address: str) -> None:
    """Raise `ConfigurationError` for what is no address of a folder, has a secret in it, or needs another package."""
    import fsspec

    parts = urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            f"files is an address of {parts.scheme or 'nothing'} with a user, a password or options in it (not shown); "
            "give scheme://bucket/prefix alone: keys come from the environment"
        )
    if not parts.scheme or not (parts.netloc or parts.scheme == "file"):
        raise ConfigurationError(f"files = {address!r} is no address; write s3://BUCKET/PREFIX or file:///FOLDER")
    if parts.scheme not in STORAGES:
        raise ConfigurationError(
            f"files = {address!r}: {parts.scheme!r} is no storage for a home; write s3://BUCKET/PREFIX or "
            "file:///FOLDER (or gs://, abfs:// with their backends of fsspec)"
        )
    if parts.scheme == "file" and (parts.netloc or len(parts.path) < 2):
        raise ConfigurationError(f"files = {address!r} is no absolute folder; write file:///FOLDER, three slashes")
    try:
        fsspec.get_filesystem_class(parts.scheme)
    except (ValueError, ImportError) as problem:
        raise ConfigurationError(
            f"files = {address!r} needs a backend of fsspec for {parts.scheme!r} that is not installed ({problem}); "
            "for S3: pip install -c constraints.txt -e '.[objects]' in the checkout"
        ) from None


def _missing(address: str) -> StoreError:
    return StoreError(f"{address} is gone, and a manifest names it; put its folder again")


def _changed(address: str, found: str, digest: str) -> StoreError:
    return StoreError(
        f"{address} has SHA-256 {found[:16]}..., stored was {digest[:16]}...: it was changed there and is not used. "
        "Remove its folder there and put it again from a home or a backup that has it"
    )


def _files(place: Path, leave_out: Collection[str]) -> dict[str, Path]:
    """The plain files of a folder by their names in it, or a file itself as ""."""
    if place.is_file():
        return {"": place}
    found = {}
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not path.is_symlink() and not hidden and inside.parts[0] not in leave_out:
            found[inside.as_posix()] = path
    return found


def _checked_names(named: Mapping[str, str]) -> dict[str, str]:
    """The manifest's names, none of which leads out of its folder. Raises `ValueError`."""
    for name, digest in named.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"it names {name!r} with {digest!r}")
    if not named or ("" in named and len(named) > 1):
        raise ValueError(f"it names {sorted(named)}")
    return dict(named)


def _appear(part: Path, place: Path) -> None:
    """Give what was fetched its name; another process that was faster has fetched the same."""
    try:
        os.rename(part, place)
    except OSError:
        if not place.is_dir():
            raise


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
