"""A runner that cannot work is refused before anything is played; workers on this machine are told where things are."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from settings import load_settings
from tasks.shards import runners
from tasks.shards.runners import check_runner, dealt_gpus, open_cluster, worker_environment


def test_the_process_needs_nothing(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect_dask", None)
    check_runner(load_settings())


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_a_package_that_is_not_installed(runner: str, settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"prefect_{runner}", None)
    with pytest.raises(ConfigurationError, match=rf"runner = '{runner}' needs the package .*-e '\.\[{runner}\]'"):
        check_runner(load_settings(runner=runner))


@pytest.mark.parametrize("address", ["nonsense", "tcp://host", "tcp://:8786", "host:port"])
def test_what_is_no_address(address: str, settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "PACKAGES", {"dask": "json"})
    with pytest.raises(ConfigurationError, match=r"is not an address; give one such as tcp://127\.0\.0\.1:8786"):
        check_runner(load_settings(runner="dask", runner_address=address))


def test_an_address_where_nothing_answers(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "PACKAGES", {"dask": "json"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_runner(load_settings(runner="dask", runner_address=address))
    with pytest.raises(
        ConfigurationError, match=rf"nothing answers at runner_address = '{address}'.*start the cluster"
    ):
        check_runner(load_settings(runner="dask", runner_address=address))


def test_an_address_without_a_cluster_is_refused(settings_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="with runner = 'process', which needs none"):
        load_settings(runner_address="127.0.0.1:8786")
    with pytest.raises(ConfigurationError, match="setting runner = 'spark'"):
        load_settings(runner="spark")


class Answering:
    """Stands for a cluster whose workers say what code they run."""

    def __init__(self, *codes: str) -> None:
        self.codes, self.closed = codes, False

    def versions(self) -> dict[str, str]:
        return {f"tcp://10.0.0.{n}:1": code for n, code in enumerate(self.codes)}

    def close(self) -> None:
        self.closed = True


def test_one_worker_of_another_version_refuses_the_cluster(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = runners.code_fingerprint()
    sound, mixed = Answering(mine, mine), Answering(mine, "0123")
    monkeypatch.setattr(runners, "DaskCluster", lambda settings: sound)
    assert open_cluster(load_settings(runner="dask"), mine) is sound
    assert not sound.closed
    monkeypatch.setattr(runners, "DaskCluster", lambda settings: mixed)
    with pytest.raises(ConfigurationError, match=r"the worker at tcp://10\.0\.0\.1:1 runs code 0123.*Install the same"):
        open_cluster(load_settings(runner="dask"), mine)
    assert mixed.closed


def test_workers_on_this_machine_find_the_round_and_inherit_no_more(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_SERVERS", "secret")
    policy = {"backend": "vllm", "url": "http://a:1,http://b:2", "api_key_env": "KEY_OF_SERVERS", "concurrency": 5}
    places = {"home": settings_folder / "home", "database": "sqlite:////tmp/x.db", "files": "s3://bucket/prefix"}
    settings = load_settings(**places, policy=policy)
    told = worker_environment(settings)
    assert told["TRACE_HOME"] == str(settings_folder / "home")
    assert told["TRACE_DATABASE"] == "sqlite:////tmp/x.db"
    assert (told["TRACE_POLICY__URL"], told["TRACE_POLICY__CONCURRENCY"]) == ("http://a:1,http://b:2", "5")
    assert told["KEY_OF_SERVERS"] == "secret"
    with runners._environment(told):
        there = load_settings()
    assert (there.folder, there.policy, there.database_url) == (settings.folder, settings.policy, settings.database_url)
    assert there.files == "s3://bucket/prefix"
    assert "TRACE_HOME" not in os.environ


@pytest.mark.parametrize(
    ("workers", "dealt", "told"),
    [
        (2, ["0", "MIG-a"], ""),
        (3, ["0", "MIG-a", "0"], "runner_workers = 3 share 2 visible GPUs: .* set runner_workers = 2, or policy.back"),
        (1, ["0"], "runner_workers = 1 and 2 GPUs are visible: .* set runner_workers = 2"),
    ],
)
def test_workers_that_sample_here_have_a_gpu_each(
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    dealt: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(runners, "visible_gpus", lambda: ["0", "MIG-a"])
    with caplog.at_level(logging.WARNING, "trace"):
        assert dealt_gpus(load_settings(runner="dask", runner_workers=workers)) == dealt
    assert len(caplog.messages) == bool(told)
    assert not told or re.search(told, caplog.text)


def test_workers_that_sample_on_servers_or_without_a_gpu_are_given_none(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "visible_gpus", list)
    assert dealt_gpus(load_settings(runner="dask")) == []
    monkeypatch.setattr(runners, "visible_gpus", lambda: pytest.fail("they were counted"))
    assert dealt_gpus(load_settings(runner="ray", policy={"backend": "vllm", "url": "http://a:1"})) == []
    assert caplog.messages == []


def test_each_worker_of_dask_is_shown_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number that a `LocalCluster` names it by, also when it is started again."""
    started: list[dict[str, Any]] = []

    class Nanny:
        def __init__(self, scheduler: str, **options: Any) -> None:
            started.append({"scheduler": scheduler, **options})

    monkeypatch.setattr("distributed.Nanny", Nanny)
    starter = runners._starter_on(["0", "3"])
    for name in (0, 1, 1):
        starter("tcp://a:1", name=name, env={"TRACE_HOME": "h"}, nthreads=1)
    assert [s["env"] for s in started] == [{"TRACE_HOME": "h", "CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "3", "3")]
    assert {(s["scheduler"], s["nthreads"]) for s in started} == {("tcp://a:1", 1)}
