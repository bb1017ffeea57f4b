"""`benchmarks/gpu.py` runs without a GPU, so that the nine minutes on one are not spent on finding that it does not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import gpu


@pytest.mark.parametrize("what", ["train", "sample"])
def test_it_prints_its_figures(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--tokens", "64", "--rows", "2", "--steps", "1", "--turns", "2", "--length", "4", "--adapters", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu", what, "tiny", *few])
    gpu.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    figure: Any = {"train": '"step_seconds"', "sample": '"tokens_per_second"'}[what]
    assert len(lines) == (1 if what == "train" else 2)
    assert all(figure in line for line in lines)
