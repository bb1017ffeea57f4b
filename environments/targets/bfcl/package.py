"""The package bfcl-eval: its version, where it is, and reading its files without importing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from environments.targets.third_party.adapter import package_folder
from errors import TargetError

VERSION = "2026.3.23"
LICENCE = "Apache-2.0"
INSTALL = f"run `make install-targets` (pip install mpmath; pip install --no-deps bfcl-eval=={VERSION})"


def bfcl_folder() -> Path:
    """Where the package lies. Raises TargetError when it is absent or of another version."""
    return package_folder("bfcl_eval", "bfcl-eval", VERSION, INSTALL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line. Raises TargetError when it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error}; {INSTALL}") from error
    except ValueError as error:
        raise TargetError(f"{path} is damaged: {error}; {INSTALL}") from error
