"""A home as a round leaves it, served without any server: routed, promoted under a conversation, blended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from db import ConversationRow
from environments.contract import Message
from environments.targets.shop.target import target
from errors import AdapterError, ConfigurationError
from models.adapters.blending import blend, blend_name
from models.adapters.deltas import folder_deltas
from models.adapters.files import AdapterRecord
from models.adapters.fingerprint import TAG, take_fingerprint
from models.adapters.registry import Registry
from models.local.base import load_base
from models.router.first_observation import embed_openings, openings
from models.router.router import Router
from models.serving.gateway.settings import GatewaySettings
from settings import Settings, load_settings
from tasks.serving.blends import parse_weights, publish_blend
from tasks.serving.gateway import Serving, build_gateway, chosen_router, preset_of, serving_settings
from tests.adapters_made import make_adapter
from tests.models.serving.gateway_servers import serving

CAPABILITY = {"refund": "refund_payment", "swap": "exchange_item"}


class Home:
    """A folder with a tiny base, a finished round with its router, and champions in the registry."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from tests.tokenizers_trained import tiny_policy

        self.folder = folder / "runs"
        policy, _ = tiny_policy(tokenizer, context=1024)
        policy.model.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        self.settings: Settings = load_settings(home=self.folder, base_model=str(folder / "base"), dtype="float32")
        self.base = load_base(self.settings.base_model, "float32", "compact", 4)
        self.registry = Registry(self.settings.tracking_uri, "shop", self.folder / "mlartifacts")
        from db import open_store

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
                "base": self.base.identity.base,
                "base_revision": self.base.identity.revision,
                "data_hash": target().data_hash,
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


def ask(url: str, text: str, model: str = "trace", **headers: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_home_is_served_and_follows_its_registry(home: Home) -> None:
    app = served(home, mode="fixed", fixed="refund_payment")
    with serving(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        names = [m.id for m in client.models.list()]
        assert names[:2] == ["trace", "base"]
        first = next(name for name in names if name.startswith("refund_payment@v1-"))
        answer = ask(url, "Refund 7 of order 264.", **{"x-trace-conversation": "c"})
        assert answer.json()["model"] == first
        assert answer.headers["x-trace-preset"] == "shop"
        whole = httpx.get(f"{url}/status", trust_env=False).json()
        assert {a["state"] for a in whole["adapters"]} == {"live"}
        second = home.promote("refund_payment", 3)
        for change in app.gateway.fleet.reconcile():
            assert "refused" not in change, change
        assert ask(url, "And 3 more.", **{"x-trace-conversation": "c"}).json()["model"] == second
        assert first not in [m.id for m in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=first, messages=[{"role": "user", "content": "x"}])
        app.gateway.log.flush()
        rows = app.gateway.log._store.rows(ConversationRow)
        assert [(r.conversation, r.turns, r.adapter) for r in rows] == [("c", 2, second)]


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
    settings, store = serving_settings(home.folder, None)
    assert chosen_router(settings, store, Serving(mode="off")).mode == "off"  # type: ignore[union-attr]
    assert chosen_router(settings, store, Serving(mode="both")).mode == "both"  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="--fixed CAPABILITY"):
        chosen_router(settings, store, Serving(mode="fixed"))
    with pytest.raises(ConfigurationError, match="does not exist"):
        chosen_router(settings, store, Serving(mode="guess"))
    store.close()
    with pytest.raises(ConfigurationError, match="there is no round"):
        serving_settings(tmp_path / "empty", None)


def test_a_blend_is_the_weighted_sum_and_is_served(home: Home, tmp_path: Path) -> None:
    champions = home.registry.champions()
    weights = {"refund_payment": 0.75, "exchange_item": 0.25}
    folders = {home.registry.download(champions[c], home.folder / "served"): w for c, w in weights.items()}
    before = {n: p.clone() for n, p in home.base.policy.model.named_parameters()}
    _, mixed = folder_deltas(blend(home.base.policy.model, folders, tmp_path / "blend"))
    parts = [(w, folder_deltas(f)[1]) for f, w in folders.items()]
    for name, delta in mixed.items():
        torch.testing.assert_close(delta, sum(w * d[name] for w, d in parts), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(before[n], p) for n, p in home.base.policy.model.named_parameters())

    name = publish_blend(home.folder, None, ["refund_payment=0.5", "exchange_item=0.5"])
    assert name.startswith("blend-exchange_item-2-refund_payment-2@v1-")
    with serving(served(home)) as url:
        assert ask(url, "x", model=name).json()["model"] == name
    with pytest.raises(ConfigurationError, match="has no champion"):
        publish_blend(home.folder, None, ["nothing=1"])


def test_names_and_weights_of_blends() -> None:
    assert blend_name({"a": 0.55, "b": 0.45}) == "blend-a-2-b-2"
    assert blend_name({"a": 0.95, "b": 0.05}) == "a"
    assert blend_name({"a": 0.7, "": 0.3}) == "blend-a-3"
    with pytest.raises(AdapterError, match="leave no adapter"):
        blend_name({"a": 0.1, "": 0.9})
    assert parse_weights(["a=0.5", "b=.25"]) == {"a": 0.5, "b": 0.25}
    for wrong in (["a"], ["a=x"], ["a=0"], ["a=0.9", "b=0.9"], []):
        with pytest.raises(ConfigurationError):
            parse_weights(wrong)
