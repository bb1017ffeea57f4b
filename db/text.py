"""Text and JSON that both databases accept: PostgreSQL refuses NUL characters and lone surrogates, models emit both."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from errors import StoreError

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


def clean_value(name: str, value: Any) -> Any:
    """A column's value as both databases keep it: NumPy scalars become Python's (SQLite would store an integer as its
    bytes), text is cleaned, and `StoreError` for NaN and infinity (SQLite would store NaN as NULL)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{name} is {value!r}; store a finite number, or None when there is none")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def dump_json(value: Any) -> str:
    """Compact JSON that both databases accept; `StoreError` for NaN, infinity and what is no JSON."""
    try:
        written = _dump(value)
        # The slow walk only where the text holds what a database would refuse (or writes it out).
        return _dump(clean_json(value)) if "\\u0000" in written or not _encodes(written) else written
    except (TypeError, ValueError) as error:
        raise StoreError(f"a JSON value cannot be stored ({error}); use plain, finite values and None") from error


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)


def _encodes(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
