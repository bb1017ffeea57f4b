"""What files take on disk while others are at work on them."""

from __future__ import annotations

import os
from pathlib import Path


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder. What goes while it is looked at counts nothing, a folder as well
    as a file: `os.walk` passes over it, where `Path.rglob` raises `FileNotFoundError`."""
    inside = (Path(place, name) for place, _, names in os.walk(path) for name in names) if path.is_dir() else [path]
    total = 0
    for file in inside:
        try:
            total += file.lstat().st_size
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed meanwhile
    return total
