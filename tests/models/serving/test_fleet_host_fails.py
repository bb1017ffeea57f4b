"""One server of several that is set up otherwise keeps no release from the others, and what fails is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import AdapterState
from models.serving.fleet.releases import ServedRelease
from models.vllm import server as vllm_server
from tests.models.serving.fleet_staged import Stage, staged


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
