"""Text and JSON that both databases accept: PostgreSQL refuses NUL characters and lone surrogates, models emit both."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from errors import StoreError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_QUICK = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


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


def clean_value(value: Any, *where: str) -> Any:
    """A column's value as both databases keep it; `where` are the words that name it in an error. NumPy scalars become
    Python's (SQLite would store an integer as its bytes), text is cleaned, and NaN and infinity raise `StoreError`
    (SQLite would store NaN as NULL)."""
    value = plain_value(value)
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{' '.join(where)} is {value!r}; store a finite number, or None when there is none")
    return value


def plain_value(value: Any) -> Any:
    """A NumPy scalar as Python's; anything else as it is."""
    return value.item() if _is_scalar(value) else value


@contextmanager
def encodable() -> Iterator[None]:
    """Turn the driver's refusal of a text into a `StoreError`. What is written is cleaned; what is asked for is not."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise StoreError(f"the database takes no such text ({error}); give one without lone surrogates") from error


def _is_scalar(value: Any) -> bool:
    """Whether it is NumPy's: where nobody has imported NumPy, nothing is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _plain(value: Any) -> Any:
    if _is_scalar(value):
        return plain_value(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def dump_json(value: Any) -> str:
    """Compact JSON that both databases accept; `StoreError` for NaN, infinity and what is no JSON."""
    try:
        # Ten times faster than the standard library, which matters at three values a step.
        quick = orjson.dumps(value, default=_plain, option=_QUICK)
    except orjson.JSONEncodeError:
        return _dump_strictly(value)
    # It writes NaN as null, and a NUL character as an escape that PostgreSQL refuses.
    if b"null" in quick or b"\\u0000" in quick:
        return _dump_strictly(value)
    return quick.decode()


def _dump_strictly(value: Any) -> str:
    try:
        return json.dumps(clean_json(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"a JSON value cannot be stored ({error}); use plain, finite values and None, not nested too deeply"
        ) from error


def _encodes(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
