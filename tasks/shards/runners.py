"""Where shards are worked on: Prefect's task runner of a Dask or a Ray cluster, opened once a round.

The cluster is one that runs already, by its address, or processes on this machine that end with the round. Workers of
a cluster elsewhere are given the database and the servers by their own environment (docs/10-scale.md): no address with
a password in it travels with a task.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any, Protocol
from urllib.parse import urlsplit

from errors import ConfigurationError
from settings import Settings
from tasks.operations.devices import visible_gpus
from tasks.shards.worker import check_same, code_fingerprint

logger = logging.getLogger("trace")
CONNECT_SECONDS = 5.0
PACKAGES = {"dask": "prefect_dask", "ray": "prefect_ray"}


class Cluster(Protocol):
    """A cluster that Prefect submits tasks to. `workers` is the number of its processes when it was opened."""

    workers: int

    def submit(self, task: Any, given: Mapping[str, Any]) -> Any: ...
    def done(self, future: Any) -> bool: ...
    def wait(self, future: Any) -> None: ...
    def result(self, future: Any) -> Any: ...
    def close(self) -> object: ...


def check_runner(settings: Settings) -> None:
    """Before any work: the package is there, and something answers at the address. Raises `ConfigurationError`."""
    if settings.runner == "process":
        return
    package = PACKAGES[settings.runner]
    try:
        importlib.import_module(package)
    except ImportError as problem:
        raise ConfigurationError(
            f"runner = {settings.runner!r} needs the package {package} ({problem}); install it with: "
            f"pip install -c constraints.txt -e '.[{settings.runner}]' in the checkout"
        ) from problem
    address = settings.runner_address
    if not address:
        return
    scheme = "tcp" if settings.runner == "dask" else "ray"
    try:
        parts = urlsplit(address if "://" in address else f"{scheme}://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigurationError(
            f"runner_address = {address!r} is not an address; give one such as {scheme}://127.0.0.1:"
            f"{8786 if settings.runner == 'dask' else 10001}, or leave it empty for a cluster on this machine"
        )
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as problem:
        raise ConfigurationError(
            f"nothing answers at runner_address = {address!r} ({problem}); start the cluster, correct the address, or "
            "leave it empty for a cluster on this machine"
        ) from problem


def open_cluster(settings: Settings, code: str) -> Cluster:
    """The cluster that the settings name, every worker of it proven to run this code. Raises `ConfigurationError`."""
    cluster: DaskCluster | RayCluster = (DaskCluster if settings.runner == "dask" else RayCluster)(settings)
    try:
        for where, theirs in cluster.versions().items():
            check_same(theirs, f"the worker at {where}")
    except BaseException:
        cluster.close()
        raise
    return cluster


def worker_environment(settings: Settings) -> dict[str, str]:
    """What worker processes on this machine need to find the round: where things are, by their settings' names."""
    places = {
        "TRACE_HOME": str(settings.folder),
        "TRACE_FILES": settings.files,
        "TRACE_DATABASE": settings.database_url,
        "TRACE_TRACKING": settings.tracking_uri,
        "TRACE_CACHE": settings.cache,
        "TRACE_METRICS_PORT": "0",
    }
    for name, value in settings.policy.model_dump(mode="json").items():
        if value is not None:
            places[f"TRACE_POLICY__{name.upper()}"] = str(value)
    passed = {name: os.environ[name] for name in ("PYTHONPATH", settings.policy.api_key_env) if os.environ.get(name)}
    return {name: value for name, value in places.items() if value} | passed


def dealt_gpus(settings: Settings) -> list[str]:
    """The GPU of each worker that is started on this machine, by the name that CUDA has for it; none where workers
    sample on servers, or there is no GPU. Without it all would load the base onto the first one."""
    many, gpus = settings.runner_workers, visible_gpus() if settings.policy.backend == "local" else []
    if gpus and many > len(gpus):
        logger.warning(
            "runner_workers = %d share %d visible GPUs: each worker loads the base, and keeps keys and values, onto "
            "one that others have, too; set runner_workers = %d, or policy.backend = 'vllm'",
            many, len(gpus), len(gpus),
        )  # fmt: skip
    elif many < len(gpus):
        logger.warning(
            "runner_workers = %d and %d GPUs are visible: a worker samples on one, the others have none; set "
            "runner_workers = %d",
            many, len(gpus), len(gpus),
        )  # fmt: skip
    return [gpus[worker % len(gpus)] for worker in range(many)] if gpus else []


def _starter_on(gpus: list[str]) -> type[Any]:
    """What starts a worker of a `LocalCluster` so that it sees one of these GPUs: the cluster itself gives all workers
    the same environment."""
    from distributed import Nanny

    class OnGpu(Nanny):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            gpu = gpus[options["name"] % len(gpus)]  # workers of such a cluster are named by their number
            options["env"] = {**options["env"], "CUDA_VISIBLE_DEVICES": gpu}
            super().__init__(*given, **options)

    return OnGpu


class DaskCluster:
    """`prefect-dask`: a scheduler by its address, or a `LocalCluster` of one-threaded processes."""

    def __init__(self, settings: Settings) -> None:
        from prefect_dask import DaskTaskRunner

        if settings.runner_address:
            self.runner = DaskTaskRunner(address=settings.runner_address)
        else:
            gpus = dealt_gpus(settings)
            self.runner = DaskTaskRunner(
                cluster_kwargs={
                    "n_workers": settings.runner_workers,
                    "threads_per_worker": 1,  # a worker plays many episodes at once by itself
                    "env": worker_environment(settings),
                    "dashboard_address": None,
                    "worker_class": _starter_on(gpus) if gpus else None,
                }
            )
        self.runner.__enter__()
        try:
            client = self.runner.client
            client.wait_for_workers(1, timeout=60)
        except Exception as problem:
            self.close()
            where = settings.runner_address or "this machine"
            raise ConfigurationError(
                f"runner = 'dask': no worker of the cluster at {where} came within 60 s ({problem}); start workers"
            ) from problem
        self.workers = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))

    def versions(self) -> dict[str, str]:
        """The code that each worker runs, by address."""
        return _told(lambda: self.runner.client.run(code_fingerprint))

    def submit(self, task: Any, given: Mapping[str, Any]) -> Any:
        return self.runner.submit(task, dict(given))

    def done(self, future: Any) -> bool:
        return bool(future.wrapped_future.done())

    def wait(self, future: Any) -> None:
        future.wait(60)

    def result(self, future: Any) -> Any:
        return future.result(timeout=60)

    def close(self) -> object:
        self.runner.__exit__(None, None, None)
        return None


def _place(worker: int) -> str:
    """Ray's name of what only one task at a time can have."""
    return f"trace_worker_{worker}"


class RayCluster:
    """`prefect-ray`: a head by its address, or a Ray of so many processors on this machine."""

    def __init__(self, settings: Settings) -> None:
        import ray
        from prefect_ray import RayTaskRunner

        self.ray = ray
        how: dict[str, Any] = {"configure_logging": False}
        # Workers inherit this: as Ray's own `runtime_env` it would stand in Ray's logs, passwords included.
        places = {} if settings.runner_address else worker_environment(settings)
        self.folder = ""
        self.gpus: list[str] = [] if settings.runner_address else dealt_gpus(settings)
        self._next = cycle(range(len(self.gpus)))
        if not settings.runner_address:
            # Ray's own folder of sessions grows by one a round.
            self.folder = tempfile.mkdtemp(prefix="trace-ray-")
            how |= {"num_cpus": settings.runner_workers, "include_dashboard": False, "_temp_dir": self.folder}
            places["RAY_USAGE_STATS_ENABLED"] = "0"
            if self.gpus:
                how["resources"] = {_place(worker): 1 for worker in range(len(self.gpus))}
        self.runner = RayTaskRunner(address=settings.runner_address or None, init_kwargs=how)
        try:
            with _environment(places):
                self.runner.__enter__()
        except Exception as problem:
            self._forget()
            where = settings.runner_address or "this machine"
            raise ConfigurationError(f"runner = 'ray': Ray at {where} cannot be used: {problem}") from problem
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def versions(self) -> dict[str, str]:
        """The code that each node's workers run, by node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def code() -> str:  # Ray takes no function with a cache around it
            return code_fingerprint()

        asked = self.ray.remote(num_cpus=0)(code)
        nodes = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]

        def ask() -> dict[str, str]:
            at = [asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)) for n in nodes]
            return dict(zip(nodes, self.ray.get([a.remote() for a in at], timeout=120), strict=True))

        return _told(ask)

    def submit(self, task: Any, given: Mapping[str, Any]) -> Any:
        from prefect_ray.context import remote_options

        if not self.gpus:
            return self.runner.submit(task, dict(given))
        worker = next(self._next)
        # Ray's own GPUs (`num_gpus`) would end the process, and its base, with every task. A process of one environment
        # is used again for tasks of the same one alone, and a place keeps two tasks from one GPU at once.
        seen = {"env_vars": {"CUDA_VISIBLE_DEVICES": self.gpus[worker]}}
        with remote_options(resources={_place(worker): 1}, runtime_env=seen):
            return self.runner.submit(task, dict(given))

    def done(self, future: Any) -> bool:
        return bool(self.ray.wait([future.wrapped_future], timeout=0)[0])

    def wait(self, future: Any) -> None:
        self.ray.wait([future.wrapped_future], timeout=60)

    def result(self, future: Any) -> Any:
        return future.result(timeout=60)

    def close(self) -> object:
        with suppress(Exception):  # a cluster that is gone needs no goodbye
            self.runner.__exit__(None, None, None)
        self._forget()
        return None

    def _forget(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within, this process's environment has these values: for processes that are started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _told(ask: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """What workers say of their code; a worker without it cannot say anything."""
    try:
        return dict(ask())
    except Exception as problem:  # it is raised on the worker, by whatever is missing there
        raise ConfigurationError(
            f"a worker cannot load this program ({type(problem).__name__}: {str(problem)[:300]}); install the same "
            "version of trace-agent on every worker"
        ) from problem
