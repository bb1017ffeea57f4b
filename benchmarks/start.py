"""What a command costs besides its work: the start and the end of the process.

    python -m benchmarks.start              # commands, a dry round, and Prefect's server while nothing happens
    python -m benchmarks.start --round      # a round of the profile smoke too: seconds to the first stored episodes

A *dry* round opens everything that a round opens (libraries, target, store, registry, Prefect's server) and plays
nothing: it is start and end alone. The libraries of the model are timed beside it, for no round can do without them.
Homes are new ones, and warm: what the first command of a home makes is there.
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil

LIBRARIES = "import torch, transformers; from transformers import AttentionInterface, AutoModelForCausalLM"
COMMAND = [sys.executable, "-m", "flows.cli.main"]
SERVER_SECONDS = 20.0


def seconds(command: list[str], environment: dict[str, str], repeats: int = 1) -> float:
    """Wall seconds of a command, the best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - began)
    return best


def first_line(environment: dict[str, str]) -> float:
    """Seconds until `improve` says something."""
    began = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, "improve", "--profile", "dry"], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        said = time.perf_counter() - began
        process.stderr.read()
    return said


def first_episodes(environment: dict[str, str], home: Path) -> tuple[float, float]:
    """Seconds until a round has stored its first episodes, and the seconds that it took between its last stage and
    the end of the process."""
    began, told, stored = time.perf_counter(), 0.0, 0.0
    with subprocess.Popen(
        [*COMMAND, "improve", "--profile", "smoke", "--seed", "11", "--fresh"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not stored:
            time.sleep(0.1)
            with closing(sqlite3.connect(f"file:{home}/trace.db?mode=ro", uri=True)) as store:
                if store.execute("SELECT 1 FROM trajectories LIMIT 1").fetchone():
                    stored = time.perf_counter() - began
        assert process.stdout is not None
        for _ in process.stdout:
            told = time.perf_counter()
    return stored, time.perf_counter() - told


def idle_server() -> tuple[float, float]:
    """Per cent of a core that Prefect's temporary server takes when nothing asks it, and seconds until it answers."""
    from flows.cli.early_server import start_early

    began = time.perf_counter()
    server = start_early()
    server.wait()
    ready = time.perf_counter() - began
    (process,) = [psutil.Process(p.pid) for p in server._processes]
    time.sleep(5)
    before = sum(process.cpu_times()[:2])
    time.sleep(SERVER_SECONDS)
    used = sum(process.cpu_times()[:2]) - before
    server.stop()
    return 100 * used / SERVER_SECONDS, ready


def quiet(folder: Path) -> dict[str, str]:
    """An environment with homes of its own in `folder`."""
    from flows.cli.main import QUIET

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRACE_", "PREFECT_")) or k == "TRACE_CACHE"}
    return {**kept, **QUIET, "TRACE_HOME": str(folder / "home"), "PREFECT_HOME": str(folder / "prefect")}


def processor(command: list[str], environment: dict[str, str], repeats: int) -> float:
    """Processor seconds of a command and of all that it started and waited for, the best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        seconds(command, environment)
        best = min(best, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before)
    return best


def figures() -> dict[str, float]:
    """Processor time of commands as multiples of `python -c pass`, and of a dry round as one of loading the model's
    libraries."""
    with tempfile.TemporaryDirectory(prefix="trace-start-") as folder:
        environment = quiet(Path(folder))
        dry = [*COMMAND, "improve", "--profile", "dry"]
        seconds(dry, environment)
        python = processor([sys.executable, "-c", "pass"], environment, 5)
        libraries = processor([sys.executable, "-c", LIBRARIES], environment, 2)
        return {
            "help / python": processor([*COMMAND, "--help"], environment, 5) / python,
            "status / python": processor([*COMMAND, "status"], environment, 5) / python,
            "dry round / libraries": processor(dry, environment, 2) / libraries,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trace-start-") as folder:
        environment = quiet(Path(folder))
        dry = [*COMMAND, "improve", "--profile", "dry"]
        print(f"first command of a home (dry)  {seconds(dry, environment):6.1f} s")
        print(f"dry round                      {seconds(dry, environment, 3):6.1f} s")
        print(f"  of it the model's libraries  {seconds([sys.executable, '-c', LIBRARIES], environment, 3):6.1f} s")
        print(f"first line                     {first_line(environment):6.2f} s")
        for arguments in (["--help"], ["status"], ["rounds"], ["report"]):
            print(f"{arguments[0]:<30} {seconds([*COMMAND, *arguments], environment, 5):6.2f} s", flush=True)
        if options.round:
            stored, end = first_episodes(environment, Path(folder) / "home")
            print(f"first episodes are stored      {stored:6.1f} s")
            print(f"last word to the end           {end:6.1f} s")
        os.environ.update(environment)
        share, ready = idle_server()
        print(f"Prefect's server: ready in     {ready:6.1f} s, idle {share:.1f} % of a core")


if __name__ == "__main__":
    main()
