"""What a backup says of itself, and the checks that it must pass before anything of it is written anywhere."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from db.migrate import known_revisions
from db.schema import HEAD
from errors import StoreError
from models.adapters.addresses import known_revisions as registry_revisions

FORMAT = 1
MANIFEST, STORE, REGISTRY = "manifest.json", "trace.db", "mlflow.db"


class Member(BaseModel):
    """One file of a backup: its length in bytes and its SHA-256, as hex."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0)
    sha256: str


class Manifest(BaseModel):
    """What is in a backup. `revision` and `registry_revision` are those of the schemas of store and MLflow, `home` the
    folder that it was made of, `left_out` links, files that were written all the while, and folders that lost
    a file, `not_copied` what else lies in the home and is no part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    code_version: str
    revision: str
    registry_revision: str = ""
    home: str
    made_at: datetime
    rounds: int
    members: dict[str, Member]
    left_out: list[str] = []
    not_copied: list[str] = []

    @property
    def bytes(self) -> int:
        """What the files take when they are put back."""
        return sum(member.size for member in self.members.values())


def read_manifest(text: bytes, file: Path) -> Manifest:
    """The manifest of the backup `file`. Raises `StoreError` for one of another format, of a newer schema, or that
    names a member outside the home."""
    try:
        given: Any = json.loads(text)
        form = given["format"]
    except (ValueError, KeyError, TypeError) as problem:
        raise StoreError(
            f"{file} has a manifest that cannot be read ({problem}); take another copy of the backup"
        ) from None
    if form != FORMAT:
        raise StoreError(
            f"{file} has format {form!r}, this version reads {FORMAT}; restore it with the version that made it "
            f"({given.get('code_version', 'unknown')})"
        )
    try:
        manifest = Manifest.model_validate(given)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{file}: manifest {where}: {first['msg']}; take another copy of the backup") from None
    _check_revisions(manifest, file)
    for name in manifest.members:
        check_member(name, file)
    if STORE not in manifest.members:
        raise StoreError(f"{file} holds no {STORE}, so it is not a backup of a home; take another copy of the backup")
    return manifest


def check_member(name: str, file: Path) -> None:
    """Raise `StoreError` unless a member of a backup lies in the home that it is put into."""
    path = PurePosixPath(name)
    plain = str(path) == name and "\\" not in name and "\0" not in name
    if not plain or path.is_absolute() or ".." in path.parts or not path.parts or name == MANIFEST:
        raise StoreError(f"{file} has the member {name!r}, which lies outside a home; do not use this file")


def _check_revisions(manifest: Manifest, file: Path) -> None:
    if manifest.revision not in known_revisions():
        raise StoreError(
            f"{file} has a database of schema {manifest.revision!r}, this version knows up to {HEAD!r}; install the "
            f"version that made it ({manifest.code_version}) or a newer one"
        )
    if manifest.registry_revision and manifest.registry_revision not in registry_revisions():
        raise StoreError(
            f"{file} has a registry of schema {manifest.registry_revision!r}, which the installed MLflow does not "
            "know; install the MLflow that it was made with, or a newer one"
        )
