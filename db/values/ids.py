"""Ids are hashes of what makes a row unique, so that doing a thing twice finds the row that is already there."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def row_id(*parts: Any) -> str:
    """First 16 hex digits of the SHA-256 of the parts as sorted, compact JSON (equal to the contract's `content_hash`
    of the same list). Raises `ValueError` on NaN and `TypeError` on what is not JSON."""
    text = json.dumps(list(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
