"""bf16 is taken where it is measured to be faster, which is measured once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.local import dtypes
from models.local.dtypes import KEPT, bf16_share, fast_dtype


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A processor with AVX-512 BF16; what is put in front is what a measurement finds, and taken out by it."""
    shares: list[float] = []
    monkeypatch.setattr(dtypes, "_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(dtypes, "bf16_share", lambda: shares.pop(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dtypes._share.cache_clear()
    yield shares
    dtypes._share.cache_clear()


@pytest.mark.parametrize(("share", "kind"), [(0.5, torch.bfloat16), (0.95, torch.float32), (1.7, torch.float32)])
def test_bf16_is_taken_where_it_is_clearly_faster(
    tmp_path: Path, measured: list[float], share: float, kind: torch.dtype
) -> None:
    measured.append(share)
    assert fast_dtype(str(tmp_path)) == kind


def test_it_is_measured_once_for_a_processor_whatever_later_starts_would_find(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += [0.5, 1.7]
    assert fast_dtype(str(tmp_path)) == torch.bfloat16
    dtypes._share.cache_clear()  # another process
    assert fast_dtype(str(tmp_path)) == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == [KEPT]
    monkeypatch.setattr(dtypes, "_processor", lambda: "another")
    assert fast_dtype(str(tmp_path)) == torch.float32
    assert sorted(json.loads((tmp_path / KEPT).read_text()).values()) == [0.5, 1.7]


@pytest.mark.parametrize("text", ["not json", "[1]", '{"x": "fast"}'])
def test_a_file_that_cannot_be_read_is_said_and_made_anew(
    tmp_path: Path, measured: list[float], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / KEPT).write_text(text)
    measured.append(0.5)
    with caplog.at_level(logging.INFO, "trace.models"):
        assert fast_dtype(str(tmp_path)) == torch.bfloat16
    assert "is measured again" in caplog.text
    assert "bf16 takes 0.50 times as long as fp32" in caplog.text
    assert list(json.loads((tmp_path / KEPT).read_text()).values()) == [0.5]


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, measured: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")  # no folder can be made below it, not even by root
    measured.append(1.7)
    with caplog.at_level(logging.INFO, "trace.models"):
        assert fast_dtype(str(tmp_path / "file" / "cache")) == torch.float32
    assert "measured at every start" in caplog.text


def test_nothing_is_measured_without_instructions_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dtypes, "_instructions", lambda: "")
    monkeypatch.setattr(dtypes, "bf16_share", lambda: pytest.fail("measured"))
    assert fast_dtype(str(tmp_path)) == torch.float32
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_is_a_share_of_two_times() -> None:
    assert 0.05 < bf16_share() < 20
