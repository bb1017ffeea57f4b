"""Which version of this program is at work."""

from __future__ import annotations

import contextlib
import subprocess
from importlib.metadata import version
from pathlib import Path


def code_version() -> str:
    """The package's version, with the commit where there is a checkout."""
    folder = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=5
        )
        return f"{version('trace-agent')}+{commit.stdout.strip()}"
    return version("trace-agent")
