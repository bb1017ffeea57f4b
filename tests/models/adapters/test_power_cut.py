"""What a power cut leaves: whatever was not on the disk yet may be empty, whatever was written after it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.adapters.files import adapter_digest, export_adapter
from models.local import base
from models.local.base import embedded_folder
from models.local.export import export_base
from models.objects import HomeFiles
from models.training.checkpoints import last_whole_checkpoint, weights_by_step
from tests.models.local.test_export import make_model
from tests.models.training.test_endings import kept, same, trained
from tests.models.training.test_grpo import SMALL, Source


class Disk:
    """Knows the files that were waited for; the others are empty after a cut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: set[tuple[int, int]] = set()
        real = os.fsync

        def fsync(place: int) -> None:
            real(place)
            found = os.fstat(place)
            self.there.add((found.st_ino, found.st_size))

        monkeypatch.setattr(os, "fsync", fsync)

    def cut(self, folder: Path) -> list[str]:
        lost = []
        for path in sorted(folder.rglob("*")):
            found = path.stat()
            if path.is_file() and (found.st_ino, found.st_size) not in self.there:
                path.write_bytes(b"")
                lost.append(path.relative_to(folder).as_posix())
        return lost


def test_a_training_goes_on_behind_a_power_cut(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SMALL, steps=2)
    whole = trained(tiny_model, Source(), tmp_path / "whole", settings)
    disk = Disk(monkeypatch)
    trained(tiny_model, Source(), tmp_path / "cut", settings, until=1)
    disk.cut(tmp_path / "cut")
    left = last_whole_checkpoint(tmp_path / "cut")
    assert left is not None
    assert left[0].name == "checkpoint-1"
    assert [adapter_digest(folder) for folder in weights_by_step(tmp_path / "cut", 1).values()]
    again = trained(tiny_model, Source(), tmp_path / "cut", settings)
    assert same(kept(whole, 2), kept(again, 2))
    digest = adapter_digest(export_adapter(again.weights[2], tmp_path / "final"))
    assert disk.cut(tmp_path / "final") == []
    assert adapter_digest(tmp_path / "final") == digest


def put_and_fetched(place: Path) -> Path:
    made = place / "home" / "adapter" / "inner"
    made.mkdir(parents=True)
    (made / "weights").write_bytes(b"learnt")
    HomeFiles(place / "home", (place / "share").as_uri()).put("adapter")
    HomeFiles(place / "other", (place / "share").as_uri()).fetch("adapter")
    shutil.rmtree(place / "home")
    return place


def exported(place: Path) -> Path:
    export_base(str(make_model(place / "mine")), place / "served" / "mine")
    return place / "served"


def converted(place: Path) -> Path:
    embedded_folder(str(place / "cache"))
    return place / "cache"


@pytest.mark.parametrize("made", [put_and_fetched, exported, converted])
def test_what_is_made_once_and_then_taken_as_it_is_was_on_the_disk_before_it_had_its_name(
    made: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it would be made again where it is found empty: it counts as changed, or as a model."""
    monkeypatch.setattr(base, "_convert", lambda folder: [(folder / n).write_text(n) for n in ("weights", "complete")])
    disk = Disk(monkeypatch)
    assert disk.cut(made(tmp_path)) == []
