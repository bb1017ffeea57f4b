"""Text and JSON that both databases accept: PostgreSQL refuses NUL characters and lone surrogates, models emit both."""

from __future__ import annotations

import json
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean_text(value: str) -> str:
    """`value` with NUL characters and lone surrogates replaced by U+FFFD (token ids keep what was really sampled)."""
    if "\x00" not in value and _encodes(value):
        return value
    return "".join(REPLACEMENT if c == "\x00" or "\ud800" <= c <= "\udfff" else c for c in value)


def clean_json(value: Any) -> Any:
    """A JSON value with `clean_text` applied to every string in it."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(k) if isinstance(k, str) else k: clean_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(v) for v in value]
    return value


def dump_json(value: Any) -> str:
    """Compact JSON that both databases accept. Raises `ValueError` on NaN, which JSON does not have."""
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # The slow walk only where the text holds what a database would refuse (or the six characters \u0000 themselves).
    if "\\u0000" in written or not _encodes(written):
        written = json.dumps(clean_json(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return written


def _encodes(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
