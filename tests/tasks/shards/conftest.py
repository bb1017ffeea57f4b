"""Rounds here sample on a stub that serves a base alone: none of them trains or loads an adapter."""

from __future__ import annotations

import pytest

from tasks.round import context


@pytest.fixture(autouse=True)
def _no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "check_adapters", lambda settings, base, backend: None)
