"""Served adapters on stub servers: the order of loading, routing and unloading, and what happens when parts fail."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from errors import AdapterError
from models.adapters.files import adapter_digest
from models.adapters.fingerprint import TAG, prove, read_fingerprint, take_fingerprint
from models.adapters.limits import check_limits
from models.router.router import Router
from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import FOLLOW_SECONDS, AdapterFleet, AdapterState, Reconciler
from models.serving.fleet.releases import ServedRelease, Standing
from models.serving.upstreams.local_engine import EngineHost, LocalEngine
from models.vllm import server as vllm_server
from models.vllm.server import VllmServer
from tests.adapters_made import make_adapter, renamed
from tests.models.serving.fleet_staged import IDS, MOVE, Stage, proof, staged
from tests.models.vllm_backend.vllm_stub import vllm_stub


@pytest.fixture
def stage(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    with staged(tiny_model[0].model, tmp_path) as one:
        yield one


def test_a_release_is_loaded_proven_and_routed_to(stage: Stage) -> None:
    assert isinstance(stage.fleet, AdapterFleet)
    assert stage.take() == (stage.fleet.standing().serving, None)
    router = Router.always("pay")
    stage.live(3, stage.one, router=router)
    (served,) = stage.fleet.adapters()
    assert (served.name, served.state, served.version) == (stage.one.served_name, AdapterState.LIVE, "1")
    assert served.live_since is not None
    assert abs(served.live_since - time.time()) < 60
    assert set(served.replicas) == {s.url for s in stage.stubs}
    assert set(stage.fleet.replicas()) == set(served.replicas)
    assert stage.fleet.reconcile() == []  # nothing to change
    generation, acquired = stage.take()
    assert acquired is not None
    assert acquired.in_flight == 1
    assert (generation.number, generation.router, generation.router_version) == (3, router, router.version)
    assert stage.take("other")[1] is None
    stage.fleet.leave(generation, acquired.name)
    assert stage.fleet.adapters()[0].in_flight == 0


def test_a_release_takes_over_at_once_and_the_old_one_waits_for_its_requests(stage: Stage) -> None:
    stage.live(1, stage.one)
    before, held = stage.take()
    early = stage.fleet.enter()  # a request that is still being routed when the swap comes
    changes = stage.live(2, stage.two)
    assert "release 2 is served, before it release 1" in changes
    assert stage.answers() == stage.two.served_name
    assert stage.one.served_name in stage.stubs[0].names, "a request is on it"
    assert held is not None
    stage.fleet.leave(before, held.name)
    assert stage.fleet.follow() == []
    late = stage.fleet.acquire(early, "pay")
    assert late is not None
    assert late.name == stage.one.served_name, "router and adapter are of one release, also over a swap"
    stage.fleet.leave(early, late.name)
    assert len(stage.fleet.follow()) == 2
    assert [s.names for s in stage.stubs] == [{stage.two.served_name}] * 2
    assert stage.states() == {stage.two.served_name: AdapterState.LIVE}


def test_draining_ends_at_its_deadline(stage: Stage) -> None:
    stage.fleet.drain_seconds = 0.2
    stage.live(1, stage.one)
    generation, held = stage.take()
    assert held is not None
    stage.live(2, stage.two)
    time.sleep(0.25)
    assert any("1 requests cut off" in c for c in stage.fleet.follow())
    assert stage.stubs[0].names == {stage.two.served_name}
    stage.fleet.leave(generation, held.name)  # answered after all, by a name that is no longer known


def test_a_release_that_is_live_again_before_it_was_drained_stays_loaded(stage: Stage) -> None:
    stage.live(1, stage.one)
    generation, held = stage.take()
    assert held is not None
    stage.live(2, stage.two)
    assert stage.states()[held.name] == AdapterState.DRAINING
    calls = len(stage.stubs[0].bodies)
    stage.shelf.wanted = ServedRelease(1, {"pay": stage.one})
    stage.fleet.follow()
    assert (stage.answers(), stage.states()) == (held.name, {held.name: AdapterState.LIVE})
    assert len(stage.stubs[0].bodies) == calls, "it was proven, and its server still has it: the way back is short"
    assert stage.stubs[0].calls.count("/v1/load_lora_adapter") == 2
    assert stage.fleet.adapters()[0].reason == ""
    stage.fleet.leave(generation, held.name)
    assert stage.fleet.adapters()[0].in_flight == 0


def test_what_a_server_lost_meanwhile_is_loaded_and_proven_again_before_a_swap(stage: Stage) -> None:
    stage.live(1, stage.one)
    stage.take()
    stage.live(2, stage.two)
    stage.stubs[0].names.discard(stage.one.served_name)
    calls = len(stage.stubs[0].bodies)
    stage.shelf.wanted = ServedRelease(3, {"pay": stage.one})
    stage.fleet.follow()
    assert stage.answers() == stage.one.served_name
    assert stage.one.served_name in stage.stubs[0].names
    assert len(stage.stubs[0].bodies) > calls
    # Where no server answers nothing is proven, whatever was known before.
    stage.fleet.hosts = ()
    stage.shelf.wanted = ServedRelease(4, {"pay": stage.two})
    stage.fleet.follow()
    assert (stage.fleet.standing().serving.number, stage.fleet.standing().wanted) == (3, 4)


def test_a_replaced_version_lingers_for_other_gateways(stage: Stage) -> None:
    stage.fleet.linger_seconds = 0.3
    stage.live(1, stage.one)
    stage.live(2, stage.two)
    assert stage.stubs[0].names == {stage.one.served_name, stage.two.served_name}
    assert stage.states()[stage.one.served_name] == AdapterState.DRAINING
    time.sleep(0.35)
    stage.fleet.follow()
    assert stage.stubs[0].names == {stage.two.served_name}


def test_after_a_rollback_to_the_base_all_adapters_leave_and_nothing_is_routed(stage: Stage) -> None:
    stage.live(1, stage.one, router=Router.always("pay"))
    stage.live(0)
    standing = stage.fleet.standing()
    assert (standing.serving.number, standing.serving.router, standing.problem) == (0, None, "")
    assert stage.answers() == ""
    assert stage.fleet.adapters() == []
    assert stage.stubs[0].names == set()


def test_a_broken_member_keeps_the_release_before_whole(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """`ship` of release 2 is sound, `pay` of it does not move the model: neither is served, nor its router."""
    first, second = Router.always("pay"), Router.always("ship")
    stage.live(1, stage.one, router=first)
    ship = stage.shelf.add(stage.shelf.folders[stage.two.served_name], "ship", 1)
    for stub in stage.stubs:
        stub.moves |= {stage.two.served_name: 0.0, ship.served_name: MOVE}  # what zero weights do
    changes = stage.live(2, stage.two, ship, router=second)
    assert any("is refused" in c and "not live" in c for c in changes)
    standing = stage.fleet.standing()
    assert (standing.serving.number, standing.wanted, standing.serving.router) == (1, 2, first)
    assert f"{stage.two.served_name} is refused" in standing.problem
    assert "release 2 is not served, release 1 goes on" in caplog.text
    assert (stage.answers("pay"), stage.answers("ship")) == (stage.one.served_name, "")
    assert stage.states()[ship.served_name] == AdapterState.READY
    assert stage.stubs[0].names == {stage.one.served_name, ship.served_name}, "what was refused is not kept"
    # Once it answers as it should the whole release takes over.
    for stub in stage.stubs:
        stub.moves[stage.two.served_name] = MOVE
    stage.fleet.reconcile()
    assert stage.states() == {stage.two.served_name: AdapterState.LIVE, ship.served_name: AdapterState.LIVE}
    assert stage.fleet.standing() == Standing(stage.fleet.standing().serving, 2, "")
    # One that is taken back before it was ever served leaves nothing.
    stage.live(3, stage.one)
    assert stage.states() == {stage.one.served_name: AdapterState.LIVE}


@pytest.mark.parametrize("before", [0, 1])
def test_a_release_that_cannot_be_read_is_not_served(stage: Stage, before: int) -> None:
    stage.live(before, *([stage.one] if before else []))
    stage.shelf.wanted = ServedRelease(2, {"pay": stage.two}, problem="its router was changed; fit it again")
    stage.fleet.follow()
    standing = stage.fleet.standing()
    assert (standing.serving.number, standing.wanted) == (before, 2)
    assert standing.problem == "its router was changed; fit it again"
    assert stage.answers() == (stage.one.served_name if before else "")
    assert stage.two.served_name not in stage.stubs[0].names


def test_a_live_member_whose_files_are_gone_goes_on_where_it_is_loaded(stage: Stage) -> None:
    stage.live(1, stage.one)
    shutil.rmtree(stage.folder / "served" / stage.one.served_name)
    stage.shelf.folders[stage.one.served_name] = stage.folder / "nowhere"
    stage.stubs[1].names.clear()
    stage.fleet.reconcile()
    (served,) = stage.fleet.adapters()
    assert (served.state, served.replicas) == (AdapterState.LIVE, (stage.stubs[0].url,))
    assert "nowhere" in served.reason


def test_a_server_that_was_started_again_gets_everything_again(stage: Stage) -> None:
    stage.live(1, stage.one)
    stage.stubs[1].names.clear()
    changes = stage.fleet.reconcile()
    assert changes == [f"{stage.one.served_name} loaded on {stage.stubs[1].url}"]
    assert stage.stubs[1].names == {stage.one.served_name}


def test_a_server_that_is_away_is_left_out(stage: Stage) -> None:
    stage.live(1, stage.one)
    with vllm_stub() as gone:
        pass
    stage.fleet.hosts = (stage.fleet.hosts[0], VllmHost(VllmServer(gone.url, "base")))
    stage.fleet.reconcile()
    assert stage.fleet.replicas() == [stage.stubs[0].url]
    assert stage.fleet.adapters()[0].replicas == (stage.stubs[0].url,)


def test_a_reported_adapter_is_not_handed_out_there_until_it_is_proven_again(stage: Stage) -> None:
    stage.live(1, stage.one)
    name = stage.one.served_name
    stage.fleet.report(name, stage.stubs[0].url)
    _, acquired = stage.take()
    assert acquired is not None
    assert acquired.replicas == (stage.stubs[1].url,)
    stage.fleet.report(name, stage.stubs[1].url)
    assert stage.answers() == ""
    assert stage.fleet.adapters()[0].state == AdapterState.UNREACHABLE
    stage.fleet.reconcile()
    assert stage.states() == {name: AdapterState.LIVE}


def test_a_server_that_was_started_again_has_its_adapters_back_soon_after_it_was_seen(stage: Stage) -> None:
    """At the next look for another release, and not only when everything is proven again a minute later."""
    ship = stage.shelf.add(stage.shelf.folders[stage.two.served_name], "ship", 1)
    for stub in stage.stubs:
        stub.moves[ship.served_name] = MOVE
    stage.live(1, stage.one, ship)
    for stub in stage.stubs:
        stub.names.clear()
        stage.fleet.report(stage.one.served_name, stub.url)
    assert stage.answers("pay") == ""
    stage.fleet.follow()
    assert (stage.answers("pay"), stage.answers("ship")) == (stage.one.served_name, ship.served_name)
    calls = len(stage.stubs[0].calls)
    assert stage.fleet.follow() == []
    assert len(stage.stubs[0].calls) == calls, "once it is mended, nothing is asked"


def test_files_that_were_changed_or_removed_are_fetched_again(stage: Stage) -> None:
    stage.live(1, stage.one)
    folder = stage.folder / "served" / stage.one.served_name
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-100])
    stage.fleet.reconcile()
    assert (folder / "adapter_model.safetensors").read_bytes() == whole
    shutil.rmtree(folder)
    stage.fleet.reconcile()
    assert folder.is_dir()
    assert stage.states() == {stage.one.served_name: AdapterState.LIVE}


def test_strangers_are_left_alone_and_forgotten_versions_taken_away(stage: Stage) -> None:
    stranger = "pay@v9-00000000"
    stage.stubs[0].names |= {stranger, "mine", stage.one.served_name}
    stage.live(2, stage.two)
    assert stage.stubs[0].names == {stranger, "mine", stage.two.served_name}


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.01)


def test_a_database_that_is_away_changes_nothing_and_is_asked_again(stage: Stage) -> None:
    stage.live(1, stage.one)
    stage.shelf.away = True
    with Reconciler(stage.fleet, seconds=0.05) as loop:
        until(lambda: "database is away" in loop.problem)
        stage.stubs[0].names.clear()  # what is served is looked after meanwhile
        until(lambda: stage.stubs[0].names == {stage.one.served_name})
        assert stage.answers() == stage.one.served_name
        stage.shelf.away, stage.shelf.wanted = False, None
        until(lambda: stage.answers() == "" and not loop.problem)


def test_a_defect_does_not_end_the_reconciler(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.shelf, "live", lambda: 1 // 0)
    with Reconciler(stage.fleet, seconds=0.05) as loop:
        until(lambda: "ZeroDivisionError" in loop.problem)
        monkeypatch.undo()
        until(lambda: not loop.problem)


def test_a_promotion_is_followed_at_once_though_everything_is_proven_only_now_and_then(stage: Stage) -> None:
    stage.live(1, stage.one)
    with Reconciler(stage.fleet, follow_seconds=0.05) as loop:
        until(lambda: loop.turns > 3)
        asked = len(stage.stubs[0].bodies)
        turns = loop.turns
        until(lambda: loop.turns > turns + 5)
        assert len(stage.stubs[0].bodies) == asked, "nothing is scored while nothing changes"
        stage.shelf.wanted = ServedRelease(2, {"pay": stage.two})
        until(lambda: stage.answers() == stage.two.served_name)
    # What a gateway does in production: the interval, and the time that loading and proving take.
    assert FOLLOW_SECONDS < 5


REFUSED: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    ("rank", {"max_rank": 2}, {}, "rank 4, the server takes at most 2"),
    ("base", {}, {"base": "big"}, r"trained on big \(r1\)"),
    ("revision", {}, {"base_revision": "r0"}, r"trained on tiny \(r0\)"),
    ("modules", {"modules": {}}, {}, "does not have"),
    ("shape", {"modules": "wider"}, {}, "shape"),
    ("fingerprint", {}, {TAG: ""}, "without a fingerprint"),
    ("other base", {}, {TAG: proof(base=2.0).text()}, "for another base"),
    ("other weights", {}, {TAG: proof(move=-MOVE).text()}, "not what was registered"),
]


@pytest.mark.parametrize(("limits", "tags", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_does_not_fit_is_refused_with_its_reason(
    stage: Stage, limits: dict[str, Any], tags: dict[str, str], words: str
) -> None:
    if limits.get("modules") == "wider":
        limits = {"modules": {n: (o, i + 1) for n, (o, i) in stage.fleet.limits.modules.items()}}
    stage.fleet.limits = replace(stage.fleet.limits, **limits)
    stage.live(1, replace(stage.one, tags=dict(stage.one.tags) | tags))
    (served,) = stage.fleet.adapters()
    assert served.state == AdapterState.REFUSED
    assert served.reason in stage.fleet.standing().problem, "at the start the bare base answers, and says so"
    with pytest.raises(AssertionError, match=words):  # pytest's own message shows the reason when it differs
        raise AssertionError(served.reason)
    assert stage.answers() == ""
    assert stage.stubs[0].names == set()
    before_loading = not tags.get(TAG)
    assert any("load_lora" in c for c in stage.stubs[0].calls) != before_loading


def test_adapters_of_other_modules_and_damaged_files_are_refused(stage: Stage, tmp_path: Path) -> None:
    other = renamed(stage.shelf.folders[stage.one.served_name], tmp_path / "other", "q_proj", "query")
    with pytest.raises(AdapterError, match="query"):
        check_limits(other, stage.fleet.limits, {})
    weights = other / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(AdapterError, match="not a safetensors file"):
        check_limits(other, stage.fleet.limits, {})


def test_the_local_model_is_a_host_like_a_server(stage: Stage, tiny_model: Any, tmp_path: Path) -> None:
    policy, _ = tiny_model
    with LocalEngine(policy) as engine:
        host = EngineHost(engine)
        folder = make_adapter(policy.model, tmp_path / "strong", size=2.0, layers=(1, 2))
        host.load("probe", adapter_digest(folder), folder)
        taken = take_fingerprint(host, IDS, "probe")
        assert host.score(IDS, 4) == host.score(IDS, 4) == policy.score(IDS, 4)
        assert host.score(IDS, 4, "probe") != host.score(IDS, 4)
        host.unload("probe")
        stage.fleet.hosts = (host,)
        good = stage.shelf.add(folder, "ship", 1, **{TAG: taken.text()})
        zero = stage.shelf.add(
            make_adapter(policy.model, tmp_path / "zero", size=0.0, layers=(1, 2)), "ask", 1, **{TAG: taken.text()}
        )
        stage.live(1, good, zero)
        assert stage.states() == {good.served_name: AdapterState.READY, zero.served_name: AdapterState.REFUSED}
        stage.live(2, good)
        assert stage.states() == {good.served_name: AdapterState.LIVE}
        assert policy.adapters == (good.served_name,)
        assert stage.fleet.adapters()[0].replicas == ()
        stage.live(0)
        assert policy.adapters == ()


def test_fingerprints_go_through_the_registry_and_say_when_nothing_moves(tiny_model: Any, tmp_path: Path) -> None:
    policy, _ = tiny_model
    for name, size in (("strong", 2.0), ("zero", 0.0)):
        folder = make_adapter(policy.model, tmp_path / name, size=size, layers=(1, 2))
        policy.load_adapter(name, adapter_digest(folder), folder)
    taken = take_fingerprint(policy, list(IDS) * 50, "strong")
    assert len(taken.text()) < 5000
    read = read_fingerprint({TAG: taken.text()}, "x")
    assert read.ids == taken.ids
    assert prove(policy, read, "strong").apart < 1e-3
    with pytest.raises(AdapterError, match="not live"):
        prove(policy, read, "zero")
    with pytest.raises(AdapterError, match="not live"):
        take_fingerprint(policy, IDS, "zero")
    for name in ("strong", "zero"):
        policy.unload_adapter(name)
