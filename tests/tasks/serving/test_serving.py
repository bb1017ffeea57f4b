"""A home as rounds leave it, served without any server: routed, promoted under a conversation, pinned, rolled back,
blended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from sqlalchemy import event

from db import ConversationRow, ReleaseRow, Store, open_store
from environments.contract import Message
from environments.targets.shop.target import target
from errors import AdapterError, ConfigurationError, StoreError
from models.adapters.blending import blend, blend_name, parts_named
from models.adapters.deltas import folder_deltas
from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.fingerprint import TAG, take_fingerprint
from models.adapters.registry import CHAMPION, Registry
from models.local.base import load_base
from models.router.first_observation import embed_openings, openings
from models.router.router import Router
from models.serving.fleet.lifecycle import RECONCILE_SECONDS
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.http import HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from settings import Settings, load_settings
from tasks.measuring.policy_names import PolicyOptions, parse_policy
from tasks.measuring.release_policy import load_release
from tasks.releases import publication
from tasks.releases.lifecycle import live_release, member_adapters, new_candidate, promote, rollback
from tasks.releases.lookup import Basis
from tasks.serving import gateway
from tasks.serving.blends import parse_weights, publish_blend
from tasks.serving.gateway import NoRound, Serving, build_gateway, preset_of, serving_settings
from tasks.serving.releases import HomeReleases, Routing
from tests.adapters_made import make_adapter
from tests.models.serving.gateway_servers import serving

CAPABILITY = {"refund": "refund_payment", "swap": "exchange_item"}


class Home:
    """A folder with a tiny base, a finished round with its router, and the releases that a test makes of it."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from tests.tokenizers_trained import tiny_policy

        self.folder = folder / "runs"
        policy, _ = tiny_policy(tokenizer, context=2048)
        policy.model.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        self.settings: Settings = load_settings(home=self.folder, base_model=str(folder / "base"), dtype="float32")
        self.base = load_base(self.settings.base_model, "float32", "compact", 4)
        self.registry = Registry(self.settings.tracking_uri, "shop", self.folder / "mlartifacts")
        with open_store(self.settings.database_url) as store:
            found = store.start_round("shop", target().data_hash, 0, "laptop", self.settings.identity())
        tasks = [t for t in target().tasks("diagnosis") if t.family.partition("_")[0] in ("refund", "swap", "status")]
        labels = [CAPABILITY.get(t.family.partition("_")[0], "") for t in tasks]
        given = openings(target().environment, self.base.renderer, tasks)
        vectors = embed_openings(self.base.policy, given)
        self.router = Router.fit(vectors, labels, [t.id for t in tasks])
        self.router.save(self.folder / found.id / "router")

        self.router_path = f"{found.id}/router"

    @property
    def store(self) -> Store:
        return open_store(self.settings.database_url)

    def register(self, capability: str, seed: int) -> RegisteredAdapter:
        """A new adapter of a capability."""
        place = self.folder / f"made-{capability}-{seed}"
        folder = make_adapter(self.base.policy.model, place, seed=seed, layers=(1, 2))
        self.base.policy.load_adapter(f"{capability}{seed}", "made", folder)
        said = [Message("user", "Please cancel order 314.")]
        talk = self.base.renderer.start(preset_of(self.settings).prompt, said)
        stamp = take_fingerprint(self.base.policy, talk.ids, f"{capability}{seed}").text()
        identity = self.base.identity
        record = AdapterRecord(capability, identity.base, identity.revision, "r1", {}, {TAG: stamp})
        return self.registry.register(record, folder, self.registry.start_run(f"{capability}/{seed}"))

    def candidate(self, *adapters: RegisteredAdapter, **changes: Any) -> ReleaseRow:
        """A candidate of the live release's members with these in their place, and the home's router."""
        with self.store as store:
            live = live_release(store, "shop")
            given: dict[str, Any] = {
                "target": "shop",
                "parent": live,
                "round_id": None,
                "basis": Basis(self.base.identity.base, self.base.identity.revision, target().data_hash),
                "members": {**(live.members if live else {}), **{a.capability: member(a) for a in adapters}},
                "router": self.router.version,
                "router_path": self.router_path,
            }
            return new_candidate(store, **given | changes)

    def promote(self, *adapters: RegisteredAdapter, **changes: Any) -> ReleaseRow:
        """Make such a release live."""
        row = self.candidate(*adapters, **changes)
        with self.store as store:
            return promote(store, self.registry, row.id, "better", by_hand=True)


def member(adapter: RegisteredAdapter) -> dict[str, str]:
    return {"adapter_id": "", "model": adapter.name, "version": adapter.version, "sha256": adapter.sha256}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = Home(folder, tiny_tokenizer)
        made.promote(made.register("refund_payment", 1), made.register("exchange_item", 2))
        yield made


def served(home: Home, **given: Any) -> Any:
    settings, store = serving_settings(home.folder, None, given.get("release", 0))
    return build_gateway(settings, store, Serving(**given), GatewaySettings(blend=0.6))


def test_gateways_that_share_servers_leave_one_another_what_was_replaced(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hears of a release while another still sends requests for the one before."""
    nobody = HttpUpstream(Pool(Servers(["http://127.0.0.1:9"])), "base")
    monkeypatch.setattr(gateway, "_servers", lambda *_: (nobody, []))
    assert served(home, servers=("http://127.0.0.1:9",)).gateway.fleet.linger_seconds > RECONCILE_SECONDS


def ask(url: str, *said: str, model: str = "trace", **headers: str) -> httpx.Response:
    """The answer to the last of `said`, which are a user's words and the model's in turns."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_home_is_served_and_follows_its_releases(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    app = served(home, routing=Routing("fixed", "refund_payment"))
    assert (app.gateway.upstream.temperature, app.gateway.upstream.longest) == (0.3, 128)  # as rounds play
    with serving(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        names = [m.id for m in client.models.list()]
        assert names[:2] == ["trace", "base"]
        first = next(name for name in names if name.startswith("refund_payment@v"))
        answer = ask(url, "Refund 7 of order 264.", **{"x-trace-conversation": "c"})
        heard = answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["model"] == first
        assert answer.headers["x-trace-preset"] == "shop"
        before = int(answer.headers["x-trace-release"])
        whole = status(url)
        assert {a["state"] for a in whole["adapters"]} == {"live"}
        assert (whole["release"]["number"], whole["release"]["members"]["refund_payment"]) == (before, first)
        assert whole["release"]["live_at"]
        better = home.register("refund_payment", 3)
        began = time.monotonic()
        release = home.promote(better)
        follow(url, release.number)
        assert time.monotonic() - began < 10
        app.reconciler.follow_seconds = 0.1
        second = ask(url, "Refund 7 of order 264.", heard, "And 3 more.", **{"x-trace-conversation": "c"})
        assert (second.json()["model"], second.headers["x-trace-release"]) == (better.served_name, str(release.number))
        assert first not in [m.id for m in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=first, messages=[{"role": "user", "content": "x"}])
        app.gateway.log.flush()
        rows = app.gateway.log._store.rows(ConversationRow, conversation="c")
        assert [(r.turns, r.adapter) for r in rows] == [(2, better.served_name)]

        # A release whose files are not those that were released is not served: this one goes on, and says why.
        broken = home.promote(better, router="0" * 16)
        told = follow(url, release.number, wanted=broken.number)
        assert f"has router {'0' * 16}, but" in told["problem"]
        assert f"release {broken.number} is not served, release {release.number} goes on" in caplog.text
        assert ask(url, "x").headers["x-trace-release"] == str(release.number)

        # Back to the bare base: nothing is routed, and the routed name still answers.
        with home.store as store:
            rollback(store, home.registry, "shop", 0)
        follow(url, 0)
        alone = ask(url, "Refund 7 of order 264.", heard, "And 3 more.", **{"x-trace-conversation": "c"})
        assert (alone.json()["model"], alone.headers["x-trace-release"]) == ("base", "none")
        assert [m.id for m in client.models.list()] == ["trace", "base"]
        with home.store as store:
            promote(store, home.registry, release.id, "back", by_hand=True)
        follow(url, release.number)


def follow(url: str, number: int, wanted: int | None = None) -> dict[str, Any]:
    """Wait until a release is served while `wanted` should be."""
    end = time.monotonic() + 20
    while (now := status(url)["release"])["number"] != number or now["wanted"] != (
        number if wanted is None else wanted
    ):
        assert time.monotonic() < end, now
        time.sleep(0.05)
    return dict(now)


def status(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/status", trust_env=False).json())


def test_a_release_can_be_pinned_and_a_broken_one_leaves_the_base(home: Home) -> None:
    refund = home.register("refund_payment", 4)
    tried = home.candidate(refund)
    broken = home.candidate(home.register("refund_payment", 7), router_path="nowhere")
    with serving(served(home, release=tried.number)) as url:
        assert status(url)["release"]["pinned"] is True
        assert ask(url, "x", model="refund_payment").json()["model"] == refund.served_name
    with serving(served(home, release=broken.number)) as url:
        answer = ask(url, "x")
        assert (answer.json()["model"], answer.headers["x-trace-release"]) == ("base", "none")
        assert "nowhere" in status(url)["release"]["problem"]
    with pytest.raises(StoreError, match=r"no release 99; it has 1, 2"):
        serving_settings(home.folder, None, 99)


def test_an_alias_that_was_moved_by_hand_is_put_back_and_decides_nothing(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    with home.store as store:
        live = live_release(store, "shop")
    assert live is not None
    moved = home.register("refund_payment", 5)
    home.registry.client.set_registered_model_alias(moved.name, CHAMPION, moved.version)
    with serving(served(home)) as url:
        assert status(url)["release"]["members"]["refund_payment"] != moved.served_name
    back = home.registry.by_alias("refund_payment", CHAMPION)
    assert back is not None
    assert back.version == live.members["refund_payment"]["version"]
    assert "put back" in caplog.text


def test_another_base_in_memory_than_the_release_stands_on(home: Home) -> None:
    with home.store as store:
        mine = replace(home.base.identity, revision="other")
        releases = HomeReleases(store, home.registry, home.folder, "shop", mine, lambda router: None)
        wanted = releases.live()
        assert wanted is not None
        assert "this gateway has" in wanted.problem
        assert releases.live() is wanted, "what cannot be read is not read again at once"


def test_a_gateway_never_reads_a_mixture_while_a_release_is_promoted_or_rolled_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway is started at every statement of a promotion and a rollback, and at every step of their publication."""
    with home.store as store:
        old = live_release(store, "shop")
    assert old is not None
    router = home.router.with_mode("label")
    router.save(home.folder / "elsewhere")
    new = home.candidate(home.register("refund_payment", 6), router=router.version, router_path="elsewhere")
    whole = {
        row.number: ({m["sha256"] for m in row.members.values()}, version)
        for row, version in ((old, home.router.version), (new, router.version))
    }
    seen: list[int] = []
    with home.store as writer, home.store as reader:

        def look(*_: Any) -> None:
            # Made anew: a process that was started at this moment.
            found = HomeReleases(reader, home.registry, home.folder, "shop", home.base.identity, lambda router: None)
            release = found.live()
            assert release is not None
            assert release.router is not None
            assert not release.problem
            members = {a.sha256 for a in release.members.values()}
            assert (members, release.router.version) == whole[release.number]
            seen.append(release.number)

        def watched(step: Callable[..., Any]) -> Callable[..., Any]:
            def looked(*given: Any) -> Any:
                look()
                return step(*given)

            return looked

        for name in ("put_release", "set_champion", "drop_champion", "set_live"):
            monkeypatch.setattr(publication, name, watched(getattr(publication, name)))
        event.listen(writer._engines.write, "after_cursor_execute", look)
        promote(writer, home.registry, new.id, "better", by_hand=True)
        look()
        rollback(writer, home.registry, "shop")
        look()
        event.remove(writer._engines.write, "after_cursor_execute", look)
    assert len(seen) > 20
    assert seen[0] == seen[-1] == old.number
    changes = [(a, b) for a, b in itertools.pairwise(seen) if a != b]
    assert changes == [(old.number, new.number), (new.number, old.number)], "one moment of change each way"


def test_the_stored_router_decides_as_it_does_in_a_round(home: Home) -> None:
    app = served(home)
    tasks = [t for t in target().tasks("test") if t.family.startswith(("refund", "swap"))][:6]
    given = openings(target().environment, home.base.renderer, tasks)
    wanted = home.router.route(home.base.policy, home.base.renderer, given)
    with serving(app) as url:
        for task, decision in zip(tasks, wanted, strict=True):
            answer = ask(url, task.payload["opening"])
            assert answer.headers["x-trace-capability"] == (decision.capability or "none")
            assert answer.headers["x-trace-router"] == home.router.version


def test_router_modes_and_homes_that_cannot_be_served(home: Home, tmp_path: Path) -> None:
    assert Routing().of(home.router) is home.router
    assert Routing().of(None) is None
    made = [Routing(mode, fixed).of(home.router) for mode, fixed in (("off", ""), ("fixed", "swap"), ("both", ""))]
    assert [(r.mode, r.fixed) for r in made if r] == [("off", ""), ("fixed", "swap"), ("both", "")]
    with pytest.raises(ConfigurationError, match="--fixed CAPABILITY"):
        Routing("fixed")
    with pytest.raises(ConfigurationError, match="does not exist"):
        Routing("guess")
    for mode in ("auto", "off", "both"):
        with pytest.raises(ConfigurationError, match=f"--fixed 'swap' is given, and mode '{mode}'.*add --mode fixed"):
            Routing(mode, "swap")
    with pytest.raises(NoRound, match="there is no home in"):
        serving_settings(tmp_path / "empty", None)


def test_an_address_that_cannot_work_is_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --wait` waits for a home's first round, which this one never has."""
    monkeypatch.setenv("TRACE_DATABASE", "mysql://somewhere/trace")
    with pytest.raises(ConfigurationError) as told:
        serving_settings(tmp_path, None)
    assert not isinstance(told.value, NoRound)


def test_a_blend_is_the_weighted_sum_and_is_served(home: Home, tmp_path: Path) -> None:
    with home.store as store:
        live = live_release(store, "shop")
        assert live is not None
        members = member_adapters(home.registry, live)
    weights = {"refund_payment": 0.75, "exchange_item": 0.25}
    folders = {home.registry.download(members[c], home.folder / "served"): w for c, w in weights.items()}
    before = {n: p.clone() for n, p in home.base.policy.model.named_parameters()}
    _, mixed = folder_deltas(blend(home.base.policy.model, folders, tmp_path / "blend"))
    parts = [(w, folder_deltas(f)[1]) for f, w in folders.items()]
    for name, delta in mixed.items():
        torch.testing.assert_close(delta.whole(), sum(w * d[name].whole() for w, d in parts), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(before[n], p) for n, p in home.base.policy.model.named_parameters())

    row, name = publish_blend(home.folder, None, ["refund_payment=0.5", "exchange_item=0.5"])
    assert name.startswith("blend-exchange_item-2-refund_payment-2@v1-")
    assert (row.state, row.parent_id, row.router) == ("candidate", live.id, live.router)
    assert set(row.members) == {*live.members, name.partition("@")[0]}
    assert publish_blend(home.folder, None, ["refund_payment=0.5", "exchange_item=0.5"]) == (row, name)
    with serving(served(home, release=row.number)) as url:
        assert ask(url, "x", model=name).json()["model"] == name
    with pytest.raises(ConfigurationError, match="is not a member"):
        publish_blend(home.folder, None, ["nothing=1"])


def test_a_release_with_a_blend_is_measured_like_any_other(home: Home) -> None:
    row, name = publish_blend(home.folder, None, ["refund_payment=0.5", "exchange_item=0.5"])
    settings, store = serving_settings(home.folder, None)
    store.close()
    loaded = load_release(parse_policy(f"release@{row.number}"), PolicyOptions(), settings, target())
    digest = row.members[name.partition("@")[0]]["sha256"]
    assert digest in {loaded.policy.identity(adapter).adapter for adapter in loaded.policy.adapters}
    assert loaded.choose is not None
    assert loaded.choose(target().tasks("validation")[:1])
    loaded.close()


def test_names_and_weights_of_blends() -> None:
    assert blend_name({"a": 0.55, "b": 0.45}) == "blend-a-2-b-2"
    assert blend_name({"a": 0.95, "b": 0.05}) == "a"
    assert blend_name({"a": 0.7, "": 0.3}) == "blend-a-3"
    assert parts_named(blend_name({"a_b": 0.55, "c": 0.45})) == {"a_b": 2, "c": 2}
    assert parts_named("blend") == parts_named("a_b") == parts_named("blend-a-b") == {}
    with pytest.raises(AdapterError, match="leave no adapter"):
        blend_name({"a": 0.1, "": 0.9})
    assert parse_weights(["a=0.5", "b=.25"]) == {"a": 0.5, "b": 0.25}
    for wrong in (["a"], ["a=x"], ["a=0"], ["a=0.9", "b=0.9"], []):
        with pytest.raises(ConfigurationError):
            parse_weights(wrong)
    with pytest.raises(ConfigurationError, match=r"'a' is given twice, as 0.5 and in 'a=0.25'; give it once"):
        parse_weights(["a=0.5", "a=0.25"])
