"""A store of a test's own, and a registry in a database that a file's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db import Store, open_store
from models.adapters.registry import Registry


@pytest.fixture(scope="module")
def registries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture
def registry(registries: Path, request: pytest.FixtureRequest) -> Registry:
    return Registry(
        f"sqlite:///{registries}/mlflow.db", f"shop-{abs(hash(request.node.name)) % 10**8}", registries / "a"
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as opened:
        yield opened
