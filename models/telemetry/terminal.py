"""What may stand in a terminal. Standard library only, as every command prints."""

from __future__ import annotations

import re

# What steers a terminal instead of standing in it; what models, servers and users said may hold it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def written_out(text: str) -> str:
    """A text for a terminal, with what would steer it as it is written in Python."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
