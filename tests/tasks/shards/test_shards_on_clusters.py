"""A stage's episodes on a real Dask cluster and a real Ray of two workers, one of which is killed in the middle."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import task
from prefect.cache_policies import NO_CACHE

from db import ShardRow
from settings import load_settings
from tasks.round.context import Context
from tasks.round.stage import forget
from tasks.shards import runners
from tasks.shards.runners import DaskCluster, RayCluster, check_runner
from tasks.shards.sharing import SharedPlay
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub
from tests.tasks.shards.shared_rounds import drawn, opened, ordered, saved_base

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with vllm_stub() as running:
        yield running


@pytest.fixture
def base(settings_folder: Path, tiny_model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return saved_base(settings_folder / "base", tiny_model, tiny_tokenizer)


def kill_one(context: Context, killed: list[int]) -> None:
    """SIGKILL to the first worker that has episodes stored and others open."""
    while not killed:
        time.sleep(0.02)
        holding = [row.owner for row in context.store.rows(ShardRow, state="running")]
        if holding and len(context.store.trajectory_frame(None, columns=["id"])) >= 2:
            killed.append(int(str(holding[0]).split(":")[1]))
            os.kill(killed[0], signal.SIGKILL)


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_a_killed_worker_loses_and_doubles_nothing(
    runner: str, settings_folder: Path, base: Path, stub: Stub, prefect: None
) -> None:
    alone = opened(settings_folder / "alone", base, stub)
    ids = alone.engine.play(*ordered(alone), "it")
    stub.delay = 0.4  # a stage of some seconds
    context = opened(settings_folder / runner, base, stub, runner=runner, rollout={"rows": 1, "max_tokens": 24})
    check_runner(context.settings)
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=(context, killed), daemon=True)
    killer.start()
    run = SharedPlay(context).play(context.engine.engine, *ordered(context), "it")
    assert run is not None
    assert killed
    assert killed[0] != os.getpid()
    assert run.ids == ids
    assert context.store.stored_ids(ids) == set(ids)
    assert len(context.store.trajectory_frame(None, columns=["id"])) == len(ids)
    assert drawn(context, ids) == drawn(alone, ids)
    shards = context.store.rows(ShardRow)
    assert {row.state for row in shards} == {"done"}
    assert max(row.attempt for row in shards) >= 2  # what the killed one held was claimed again
    owners = {str(row.owner).split(":")[1] for row in shards}
    assert str(killed[0]) not in owners or len(owners) >= 2
    for opened_round in (alone, context):
        forget(opened_round.round.id)
    assert not list(Path(tempfile.gettempdir()).glob("trace-ray-*"))  # the cluster is gone, and what it wrote


@task(cache_policy=NO_CACHE)
def shown() -> tuple[int, str]:
    """The process and the GPUs that it is shown, once the others have begun theirs."""
    time.sleep(1)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "all")


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_every_worker_that_samples_here_keeps_a_gpu_of_its_own(
    runner: str, settings_folder: Path, monkeypatch: pytest.MonkeyPatch, prefect: None
) -> None:
    """GPUs that are said to be there: what they are called is all that this looks at."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(runners, "visible_gpus", lambda: ["5", "MIG-a"])
    settings = load_settings(runner=runner, home=settings_folder / "home")
    cluster = (DaskCluster if runner == "dask" else RayCluster)(settings)
    try:
        futures = [cluster.submit(shown, {}) for _ in range(6)]
        seen = [cluster.result(future) for future in futures]
    finally:
        cluster.close()
    assert {gpu for _, gpu in seen} == {"5", "MIG-a"}
    assert len(set(seen)) == 2, "a process keeps its GPU, and is not started anew for every task"
