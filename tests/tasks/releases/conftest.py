"""A home of its own for each test of releases, in stores that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from db import Store, open_store
from models.adapters.registry import Registry
from tests.tasks.releases.release_homes import Home

_TARGETS = count(1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    root = tmp_path_factory.mktemp("releases")
    with open_store(f"sqlite:///{root}/trace.db") as store:
        yield store, root


@pytest.fixture
def home(stores: tuple[Store, Path], tmp_path: Path) -> Home:
    store, root = stores
    registry = Registry(f"sqlite:///{root}/mlflow.db", f"target-{next(_TARGETS)}", root / "artifacts")
    return Home(store, registry, tmp_path)
