"""Homes of Prefect whose database is made already. Prefect's migrations take ten seconds and more of a core, and a test
that starts a round has a home of its own: they run once a test run, and each home gets a copy of what they made. What
makes the tables at a first start is tested in `test_early_server.py`, on homes that are empty."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DATABASE = "prefect.db"
MAKE = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


def prefect_home(folder: Path, database: str = DATABASE) -> str:
    """The folder `prefect` in `folder`, for `PREFECT_HOME`; new, it holds a database with Prefect's tables."""
    home = folder / "prefect"
    if not home.exists():
        home.mkdir(parents=True)
        shutil.copyfile(tables_made(), home / database)
    return str(home)


def tables_made() -> Path:
    """The database as Prefect's migrations leave it, made by the first test process that asks."""
    # Processes of one test run share it; a run is a process of its own where nothing runs side by side.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    made = Path(tempfile.gettempdir()) / f"prefect-tables-{run}"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "done").exists():
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
            subprocess.run([sys.executable, "-c", MAKE], env=environment | {"PREFECT_HOME": str(made)}, check=True)
            (made / "done").touch()
    return made / DATABASE
