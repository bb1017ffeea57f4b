"""Served adapters on stub servers: the order of loading, routing and unloading, and what happens when parts fail."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from errors import AdapterError, StoreError
from models.adapters.files import RegisteredAdapter, adapter_digest
from models.adapters.fingerprint import TAG, Fingerprint, prove, read_fingerprint, take_fingerprint
from models.adapters.limits import ServerLimits, check_limits, linear_modules
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import AdapterFleet, AdapterState, Reconciler
from models.serving.upstreams.local_engine import EngineHost, LocalEngine
from models.vllm import server as vllm_server
from models.vllm.server import VllmServer
from tests.adapters_made import make_adapter, renamed
from tests.models.vllm_backend.vllm_stub import Stub, logprob, vllm_stub

IDS = tuple(range(1, 20))
MOVE = 0.3


def proof(move: float = MOVE, base: float = 0.0) -> Fingerprint:
    """What the stub says of IDS under a move."""
    return Fingerprint(
        IDS, tuple(logprob(t, 0.0) + base for t in IDS[3:]), tuple(logprob(t, move) + base for t in IDS[3:])
    )


@dataclass
class Shelf:
    """Stands for the registry: champions by capability, folders copied on download."""

    folders: dict[str, Path] = field(default_factory=dict)
    wanted: dict[str, RegisteredAdapter] = field(default_factory=dict)
    known: list[RegisteredAdapter] = field(default_factory=list)
    away: bool = False

    def add(self, folder: Path, capability: str, version: int, **tags: str) -> RegisteredAdapter:
        digest = adapter_digest(folder)
        own = {"base": "tiny", "base_revision": "r1", TAG: proof().text()} | tags
        adapter = RegisteredAdapter(f"trace-t-{capability}", str(version), capability, digest, "m", "r", own)
        self.folders[adapter.served_name] = folder
        self.known.append(adapter)
        return adapter

    def champions(self) -> dict[str, RegisteredAdapter]:
        if self.away:
            raise StoreError("the registry is away; start it")
        return dict(self.wanted)

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        return [a for a in self.known if a.capability == capability]

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        folder = destination / adapter.served_name
        if not folder.exists():
            shutil.copytree(self.folders[adapter.served_name], folder)
        if adapter_digest(folder) != adapter.sha256:
            raise AdapterError(f"{folder} was changed; fetch it again")
        return folder


@dataclass
class Stage:
    """A fleet on two stubs with two versions of `pay` on the shelf."""

    stubs: list[Stub]
    shelf: Shelf
    fleet: Fleet
    one: RegisteredAdapter
    two: RegisteredAdapter
    folder: Path

    def champion(self, *adapters: RegisteredAdapter) -> list[str]:
        self.shelf.wanted = {a.capability: a for a in adapters}
        return self.fleet.reconcile()

    def states(self) -> dict[str, AdapterState]:
        return {a.name: a.state for a in self.fleet.adapters()}


@pytest.fixture
def stage(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    model = tiny_model[0].model
    shelf = Shelf()
    one, two = (shelf.add(make_adapter(model, tmp_path / f"made{n}", seed=n, layers=(1, 2)), "pay", n) for n in (1, 2))
    with vllm_stub() as first, vllm_stub() as second:
        for stub in (first, second):
            stub.moves = {one.served_name: MOVE, two.served_name: MOVE}
        hosts = [VllmHost(VllmServer(s.url, "base")) for s in (first, second)]
        limits = ServerLimits("tiny", "r1", 16, linear_modules(model))
        fleet = Fleet(shelf, hosts, tmp_path / "served", limits, drain_seconds=5)
        (tmp_path / "served").mkdir()
        yield Stage([first, second], shelf, fleet, one, two, tmp_path)


def test_a_champion_is_loaded_proven_and_routed_to(stage: Stage) -> None:
    assert isinstance(stage.fleet, AdapterFleet)
    assert stage.fleet.acquire("pay") is None
    stage.champion(stage.one)
    (served,) = stage.fleet.adapters()
    assert (served.name, served.state, served.version) == (stage.one.served_name, AdapterState.LIVE, "1")
    assert served.live_since is not None
    assert abs(served.live_since - time.time()) < 60
    assert set(served.replicas) == {s.url for s in stage.stubs}
    assert set(stage.fleet.replicas()) == set(served.replicas)
    assert stage.fleet.reconcile() == []  # nothing to change
    acquired = stage.fleet.acquire("pay")
    assert acquired is not None
    assert acquired.in_flight == 1
    assert stage.fleet.acquire("other") is None
    stage.fleet.release(acquired.name)
    assert stage.fleet.adapters()[0].in_flight == 0


def test_promotion_routes_to_the_new_version_and_waits_for_the_old_ones_requests(stage: Stage) -> None:
    stage.champion(stage.one)
    held = stage.fleet.acquire("pay")
    assert held is not None
    promoting = threading.Thread(target=lambda: stage.champion(stage.two))
    promoting.start()
    deadline = time.monotonic() + 5
    while (now := stage.fleet.acquire("pay")) is None or now.name != stage.two.served_name:
        assert now is not None, "a capability that is served is never without an adapter"
        stage.fleet.release(now.name)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert held.name in stage.stubs[0].names  # still loaded: a request is on it
    stage.fleet.release(held.name)
    promoting.join(5)
    assert not promoting.is_alive()
    assert [s.names for s in stage.stubs] == [{stage.two.served_name}] * 2
    assert stage.states() == {stage.two.served_name: AdapterState.LIVE}


def test_draining_ends_at_its_deadline(stage: Stage) -> None:
    stage.fleet.drain_seconds = 0.2
    stage.champion(stage.one)
    assert stage.fleet.acquire("pay") is not None
    changes = stage.champion(stage.two)
    assert any("1 requests cut off" in c for c in changes)
    assert stage.stubs[0].names == {stage.two.served_name}


def test_a_replaced_version_lingers_for_other_gateways(stage: Stage) -> None:
    stage.fleet.linger_seconds = 0.3
    stage.champion(stage.one)
    stage.champion(stage.two)
    assert stage.stubs[0].names == {stage.one.served_name, stage.two.served_name}
    assert stage.states()[stage.one.served_name] == AdapterState.DRAINING
    time.sleep(0.35)
    stage.fleet.reconcile()
    assert stage.stubs[0].names == {stage.two.served_name}


def test_withdrawn_champions_are_unloaded_and_the_base_answers(stage: Stage) -> None:
    stage.champion(stage.one)
    stage.champion()
    assert stage.fleet.acquire("pay") is None
    assert stage.fleet.adapters() == []
    assert stage.stubs[0].names == set()


def test_a_version_that_does_not_prove_itself_leaves_the_one_before_in_place(stage: Stage) -> None:
    stage.champion(stage.one)
    for stub in stage.stubs:
        stub.moves[stage.two.served_name] = 0.0  # what zero weights do
    changes = stage.champion(stage.two)
    assert any("is refused" in c and "not live" in c for c in changes)
    served = stage.fleet.acquire("pay")
    assert served is not None
    assert served.name == stage.one.served_name
    stage.fleet.release(served.name)
    assert [s.names for s in stage.stubs] == [{stage.one.served_name}] * 2
    # Once it answers as it should it takes over.
    for stub in stage.stubs:
        stub.moves[stage.two.served_name] = MOVE
    stage.fleet.reconcile()
    assert stage.states() == {stage.two.served_name: AdapterState.LIVE}


def test_a_server_that_was_started_again_gets_everything_again(stage: Stage) -> None:
    stage.champion(stage.one)
    stage.stubs[1].names.clear()
    changes = stage.fleet.reconcile()
    assert changes == [f"{stage.one.served_name} loaded on {stage.stubs[1].url}"]
    assert stage.stubs[1].names == {stage.one.served_name}


def test_a_server_that_is_away_is_left_out(stage: Stage) -> None:
    stage.champion(stage.one)
    with vllm_stub() as gone:
        pass
    stage.fleet.hosts = (stage.fleet.hosts[0], VllmHost(VllmServer(gone.url, "base")))
    stage.fleet.reconcile()
    assert stage.fleet.replicas() == [stage.stubs[0].url]
    assert stage.fleet.adapters()[0].replicas == (stage.stubs[0].url,)


def test_a_reported_adapter_is_not_handed_out_there_until_it_is_proven_again(stage: Stage) -> None:
    stage.champion(stage.one)
    name = stage.one.served_name
    stage.fleet.report(name, stage.stubs[0].url)
    acquired = stage.fleet.acquire("pay")
    assert acquired is not None
    assert acquired.replicas == (stage.stubs[1].url,)
    stage.fleet.report(name, stage.stubs[1].url)
    assert stage.fleet.acquire("pay") is None
    assert stage.fleet.adapters()[0].state == AdapterState.UNREACHABLE
    stage.fleet.reconcile()
    assert stage.states() == {name: AdapterState.LIVE}


def test_files_that_were_changed_or_removed_are_fetched_again(stage: Stage) -> None:
    stage.champion(stage.one)
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
    stage.champion(stage.two)
    assert stage.stubs[0].names == {stranger, "mine", stage.two.served_name}


def test_a_registry_that_is_away_changes_nothing_and_is_asked_again(stage: Stage) -> None:
    stage.champion(stage.one)
    stage.shelf.away = True
    with Reconciler(stage.fleet, seconds=0.05) as loop:
        deadline = time.monotonic() + 5
        while not loop.problem and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "registry is away" in loop.problem
        assert stage.fleet.acquire("pay") is not None
        stage.fleet.release(stage.one.served_name)
        stage.shelf.away = False
        while loop.problem and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loop.problem == ""
        stage.shelf.wanted = {}
        turns = loop.turns
        while loop.turns < turns + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stage.fleet.acquire("pay") is None


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
    stage.champion(replace(stage.one, tags=dict(stage.one.tags) | tags))
    (served,) = stage.fleet.adapters()
    assert served.state == AdapterState.REFUSED
    with pytest.raises(AssertionError, match=words):  # pytest's own message shows the reason when it differs
        raise AssertionError(served.reason)
    assert stage.fleet.acquire("pay") is None
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
        host.unload("probe")
        stage.fleet.hosts = (host,)
        good = stage.shelf.add(folder, "ship", 1, **{TAG: taken.text()})
        zero = stage.shelf.add(
            make_adapter(policy.model, tmp_path / "zero", size=0.0, layers=(1, 2)), "ask", 1, **{TAG: taken.text()}
        )
        stage.champion(good, zero)
        assert stage.states() == {good.served_name: AdapterState.LIVE, zero.served_name: AdapterState.REFUSED}
        assert policy.adapters == (good.served_name,)
        assert stage.fleet.adapters()[1].replicas == ()
        stage.champion()
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
