"""A home whose live release is watched, played by scripted policies."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import ReleaseRow, ReleaseState, Store, open_store
from errors import ConfigurationError
from models.policy import Sampling
from models.scripted import NoopPolicy, OraclePolicy
from settings import load_settings
from tasks.measuring.policy_names import LoadedPolicy
from tasks.operations import watch as watch_file
from tasks.operations.watch import Watched, watch_release
from tasks.unattended.notices import Notice
from tests.tasks.operations.watched_homes import NOW, Target


@pytest.fixture
def world(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store with two releases; `plays` says which scripted policy stands for which side."""
    said: list[Notice] = []
    plays: dict[str, Any] = {
        "release@2": OraclePolicy(),
        "release@1": OraclePolicy(),
        "local:smollm2-135m": NoopPolicy(),
    }
    back: list[str] = []
    monkeypatch.setattr(watch_file, "notify", lambda settings, notice: said.append(notice))
    monkeypatch.setattr(watch_file, "target_of", lambda *given: Target())
    monkeypatch.setattr(
        watch_file, "load_policy", lambda name, *given: LoadedPolicy(name, plays[name.text], Sampling(0.0, 0))
    )
    monkeypatch.setattr(watch_file, "open_registry", lambda *given: None)

    def rollback(store: Store, registry: Any, target: str, to: int | None, expected: str) -> Any:
        if expected != store.row(ReleaseRow, target=target, state=ReleaseState.LIVE).id:  # type: ignore[union-attr]
            raise ConfigurationError("release 2 was live and no longer is; look at the history")
        back.append(target if to is None else f"{target} to {to}")
        return None if to == 0 else SimpleNamespace(number=1)

    monkeypatch.setattr(watch_file, "rollback", rollback)

    def watch(now: datetime = NOW, **unattended: Any) -> Watched:
        settings = load_settings(home=settings_folder, unattended={"watch_tasks": 40} | unattended)
        return watch_release(settings, now)

    with open_store(load_settings(home=settings_folder).database_url) as store:
        yield SimpleNamespace(store=store, said=said, plays=plays, back=back, watch=watch)
