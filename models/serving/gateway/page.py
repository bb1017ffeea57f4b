"""The page at `/`: one file without anything from elsewhere (`models/serving/gateway/page.html`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def page() -> str:
    """The page's HTML."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
