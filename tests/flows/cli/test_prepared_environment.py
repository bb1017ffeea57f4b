"""What the command line sets for libraries before they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flows.cli.main import SPINS, prepare

ROOT = Path(__file__).parents[3]


def test_threads_wait_briefly_unless_the_user_says_how() -> None:
    plain: dict[str, str] = {}
    prepare(plain)
    assert (plain["GOMP_SPINCOUNT"], plain["DO_NOT_TRACK"]) == (SPINS, "true")
    given = {"GOMP_SPINCOUNT": "0"}
    prepare(given)
    assert given["GOMP_SPINCOUNT"] == "0"
    active = {"OMP_WAIT_POLICY": "active"}
    prepare(active)
    assert "GOMP_SPINCOUNT" not in active


def test_a_worker_of_the_image_waits_as_briefly() -> None:
    """Its runs do not begin with the command line."""
    image = ROOT / "docker" / "Dockerfile"
    assert f"GOMP_SPINCOUNT={SPINS}\n" in image.read_text()


def test_nothing_that_reads_it_is_imported_by_then() -> None:
    """libgomp reads it once, when torch is imported."""
    said = "import sys, flows.cli.main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True).stdout
    assert found.split() == ["False", "False"]


def test_a_benchmark_that_is_run_as_a_module_waits_as_briefly() -> None:
    """Its folder is imported before it, and so before torch."""
    said = "import os, sys, benchmarks; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for given, waits in (({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        run = [sys.executable, "-c", said]
        done = subprocess.run(run, check=True, capture_output=True, text=True, env={**plain, **given}, cwd=ROOT)
        assert done.stdout.split() == [waits, "False"]
