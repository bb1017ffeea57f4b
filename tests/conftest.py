"""What the tests share: a quiet environment, the embedded model, a tiny random model, a Prefect database of its own, a
PostgreSQL server."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import QUIET

# Until everything is collected, which imports millions of objects that stay: looking through them again and again would
# take a fifth of that time.
gc.disable()

# Set before the libraries that read them are imported by any test module.
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-home-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# Files that take two seconds or more on a quiet core: they train, score whole benchmarks, start processes or Prefect's
# server, attack modules or wait for leases.
SLOW = (
    "db/test_stage_ledger.py",
    "db/test_store_processes.py",
    "environments/sandbox/test_deadlines.py",
    "environments/sandbox/test_sandbox.py",
    "environments/synthesized/test_composed.py",
    "environments/synthesized/test_module_time.py",
    "environments/synthesized/test_modules.py",
    "environments/synthesized/test_references.py",
    "environments/synthesized/test_weakenings.py",
    "environments/targets/test_agentdojo.py",
    "environments/targets/test_junk_answers.py",
    "environments/targets/test_reasoning_gym.py",
    "environments/targets/test_shop_draws.py",
    "environments/targets/test_tau2.py",
    "flows/runs/test_left_over_slots.py",
    "flows/runs/test_left_running.py",
    "flows/test_approval.py",
    "flows/test_light_start.py",
    "flows/supervised/test_services.py",
    "flows/trainings/test_train_together.py",
    "flows/trainings/test_trained_at_once.py",
    "models/adapters/test_registry.py",
    "models/adapters/test_tracking.py",
    "models/serving/test_fleet.py",
    "models/serving/test_release_swaps.py",
    "models/serving/test_upstream_replicas.py",
    "models/training/test_endings.py",
    "models/training/test_grpo.py",
    "models/training/test_job.py",
    "models/training/test_out_of_memory.py",
    "models/training/test_rate.py",
    "models/training/test_shapes_trained.py",
    "models/training/test_training_levels.py",
    "models/vllm_backend/test_replicas.py",
    "models/vllm_backend/test_sleeping_servers.py",
    "tasks/housekeeping/test_backup_restore.py",
    "tasks/housekeeping/test_retention.py",
    "tasks/housekeeping/test_stored_retention.py",
    "tasks/measuring/test_evaluation.py",
    "tasks/measuring/test_gate_simulation.py",
    "tasks/methods/test_methods_whole.py",
    "tasks/releases/test_lifecycle.py",
    "tasks/round/test_traffic.py",
    "tasks/serving/test_restored_home.py",
    "tasks/serving/test_serving.py",
    "tasks/serving/test_stored_home.py",
    "tasks/shards/test_sharing.py",
    "tasks/synthesis/composing/test_guarded_target.py",
    "tasks/synthesis/learning/test_recalling.py",
    "tasks/synthesis/test_bank.py",
    "tasks/synthesis/test_module_writer.py",
    "tasks/synthesis/test_recorded_author.py",
    "tasks/synthesis/test_round_prompts.py",
    "tasks/synthesis/test_sound_modules.py",
    "tasks/test_stored_training.py",
    "tasks/test_train.py",
    "tasks/test_train_carry.py",
    "tasks/test_train_transfer.py",
)


# Files that take a minute or more, the longest first. They are begun first: of two processes, neither is then left with
# one of them when the other has nothing more to do.
LONGEST = (
    "integration/test_vllm_servers.py",
    "integration/test_written_round.py",
    "integration/test_deployment.py",
    "integration/test_retail_round.py",
    "integration/shapes/test_vllm_shapes.py",
    "tasks/shards/test_shards_on_clusters.py",
    "tasks/methods/test_methods_whole.py",
    "integration/test_round.py",
    "tasks/synthesis/test_sound_modules.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and mark what is not slow and needs neither servers nor the language model as quick:
    `make test ARGS="-m quick"`."""
    here = Path(__file__).parent
    slow = {here / name for name in SLOW}
    first = {here / name: place for place, name in enumerate(LONGEST)}
    if gone := sorted(str(path) for path in slow | first.keys() if not path.is_file()):
        raise pytest.UsageError(f"SLOW or LONGEST in {__file__} names what is no file: {', '.join(gone)}")
    items.sort(key=lambda item: first.get(item.path, len(first)))
    for item in items:
        if item.path not in slow and not any(item.get_closest_marker(name) for name in ("integration", "model")):
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """What the imports made stays and is looked through no more: each full collection in a test, of which accelerate
    asks for many, would take half a second over it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command that a test plays sets the level of the project's loggers: what the next test records must not depend
    on it."""
    loggers = [logging.getLogger(name) for name in ("trace", "mlflow.store.db.utils", "httpx")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def databases_like_the_first() -> Iterator[None]:
    """An empty store, and MLflow's, are made by their migrations once a process: a test in four makes one."""
    from tests.db.homes.databases_made import made_from_the_first

    with made_from_the_first():
        yield


@pytest.fixture(scope="session")
def embedded_model() -> tuple[Any, Any]:
    """(policy, renderer) of the embedded model; loaded once a session. Tests leave no adapter and no session behind."""
    from models.local.base import load_base

    base = load_base()
    return base.policy, base.renderer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer of 400 words with ChatML's template."""
    from tests.tokenizers_trained import chatml_tokenizer

    return chatml_tokenizer()


@pytest.fixture
def tiny_model(tiny_tokenizer: Any) -> tuple[Any, Any]:
    """(policy, renderer) on a random Llama of 3 layers in fp32: for the engine, without a real model."""
    from tests.tokenizers_trained import tiny_policy

    return tiny_policy(tiny_tokenizer)


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect database of the test session's own, for tests that call flows or tasks."""
    from prefect.testing import utilities

    from tests.db.homes.prefect_homes import prefect_home

    folder = prefect_home(tmp_path_factory.mktemp("harness"), "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: folder)  # where it would make the tables anew
        with utilities.prefect_test_harness(server_startup_timeout=120):
            yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server of the test session's own, without a database name."""
    from tests.db.postgres_server import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def new_postgres(postgres: str) -> Callable[[], str]:
    """Makes an empty database on that server; its address."""
    import psycopg

    numbers = count()

    def make() -> str:
        name = f"trace_{next(numbers)}"
        with psycopg.connect(f"{postgres}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"{postgres}/{name}"

    return make


@pytest.fixture
def postgres_url(new_postgres: Callable[[], str]) -> str:
    """An empty PostgreSQL database of its own."""
    return new_postgres()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: the test runs on a SQLite file, and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trace.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def settings_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder without any TRACE_ variable: settings come from the profile alone."""
    for name in [n for n in os.environ if n.startswith("TRACE_") and n != "TRACE_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
