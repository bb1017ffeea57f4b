"""Which version of this program is at work."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

# An image holds no checkout: docker/Dockerfile sets this to the commit that it was built from.
VARIABLE = "TRACE_COMMIT"


def code_version() -> str:
    """The package's version, with the commit of the checkout or of the image, where there is one."""
    commit = _checkout() or os.environ.get(VARIABLE, "").strip()
    return f"{version('trace-agent')}+{commit}" if commit else version("trace-agent")


def _checkout() -> str:
    """The commit of the checkout that this file lies in; "" without git or checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
