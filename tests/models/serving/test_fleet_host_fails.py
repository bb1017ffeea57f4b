"""One server of several that is set up otherwise keeps no release from the others, and what fails is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.serving.fleet import hosts
from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import AdapterState
from models.serving.fleet.releases import ServedRelease
from models.vllm import server as vllm_server
from models.vllm.server import VllmServer
from tests.models.serving.fleet_staged import MOVE, Stage, staged


@pytest.fixture
def stage(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    with staged(tiny_model[0].model, tmp_path) as one:
        yield one


def test_a_rollback_takes_place_though_one_server_no_longer_loads_adapters(stage: Stage) -> None:
    stage.live(1, stage.one)
    stage.live(2, stage.two)
    stage.stubs[1].names.clear()
    stage.stubs[1].loading = False  # started again without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    stage.shelf.wanted = ServedRelease(1, {"pay": stage.one})
    stage.fleet.follow()
    assert stage.answers() == stage.one.served_name
    served = next(a for a in stage.fleet.adapters() if a.name == stage.one.served_name)
    assert (served.state, served.replicas) == (AdapterState.LIVE, (stage.stubs[0].url,))
    assert stage.stubs[1].url in served.reason
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in served.reason
    stage.live(0)
    assert stage.answers() == ""


@pytest.mark.parametrize("cards", [None, [{"object": "model"}], ["base"]])
def test_a_release_is_followed_though_one_server_gives_a_list_of_models_that_is_none(
    stage: Stage, cards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stage.stubs[0].cards = cards
    stage.live(1, stage.one)
    assert stage.answers() == stage.one.served_name
    assert stage.fleet.replicas() == [stage.stubs[1].url]
    assert f"{stage.stubs[0].url} is left out" in caplog.text
    assert "a vLLM server is needed" in caplog.text


def test_a_release_is_followed_though_a_look_at_one_server_fails_in_a_way_that_nobody_expected(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage.fleet.hosts[0], "names", lambda: 1 // 0)
    stage.live(1, stage.one)
    assert (stage.answers(), stage.fleet.standing().problem) == (stage.one.served_name, "")
    assert f"{stage.stubs[0].url} is left out" in caplog.text
    assert "Traceback" in caplog.text


def test_what_nobody_expected_while_a_release_is_made_ready_is_told_as_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.live(1, stage.one)
    monkeypatch.setattr(VllmHost, "load", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stage.live(2, stage.two)
    standing = stage.fleet.standing()
    assert (standing.serving.number, standing.wanted) == (1, 2)
    assert standing.problem.startswith("ZeroDivisionError")
    assert stage.answers() == stage.one.served_name


def test_a_server_that_hangs_holds_up_no_promotion_and_no_rollback(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and answers nothing, where `policy.seconds` are five minutes."""
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        server = VllmServer(f"http://127.0.0.1:{hung.getsockname()[1]}", "base", seconds=5)
        stage.fleet.hosts = (VllmHost(server), stage.fleet.hosts[0])
        began = time.monotonic()
        for number, member in ((1, stage.one), (2, stage.two), (3, stage.one)):
            stage.shelf.wanted = ServedRelease(number, {"pay": member})
            stage.fleet.follow()
            assert stage.answers() == member.served_name
        assert time.monotonic() - began < 5, "it was waited for once, and not for long"


def test_a_server_whose_engine_hangs_is_waited_for_once_and_not_for_each_member(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "WORK_SECONDS", 1.0)
    both = tuple(VllmHost(VllmServer(s.url, "base")) for s in stage.stubs)
    stage.fleet.hosts = both
    ship = stage.shelf.add(stage.shelf.folders[stage.two.served_name], "ship", 1)
    for stub in stage.stubs:
        stub.moves[ship.served_name] = MOVE
    healthy, hangs = stage.stubs
    hangs.stalled.set()
    stage.live(1, stage.one, ship)
    assert (stage.answers("pay"), stage.answers("ship")) == (stage.one.served_name, ship.served_name)
    assert {a.replicas for a in stage.fleet.adapters()} == {(healthy.url,)}
    assert hangs.calls.count("/v1/completions") == 1
    hangs.stalled.clear()
    both[1]._silent_until -= hosts.SILENT_SECONDS  # so much later
    stage.fleet.reconcile()
    assert {a.replicas for a in stage.fleet.adapters()} == {(healthy.url, hangs.url)}
