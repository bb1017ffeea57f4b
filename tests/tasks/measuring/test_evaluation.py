"""Evaluations: figures, the no-op row, resuming, starting over, losses, money, and what is refused before work."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import AdapterRow, AdapterState, SpendRow, open_store
from environments.contract import Observation, TargetTask
from errors import AdapterError, ConfigurationError, ProviderError, TargetError
from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.fingerprint import TAG, take_fingerprint
from models.local.base import load_base
from models.policy import Sampling
from models.providers.litellm_client import Completion
from models.scripted import NoopPolicy, OraclePolicy
from settings import load_settings
from tasks.measuring.evaluation import _adapter_row
from tasks.measuring.figures import EvaluationRow, overall, success_of, table
from tasks.measuring.policy_names import BARE, LoadedPolicy, PolicyName, PolicyOptions, parse_policy
from tasks.measuring.targets import EvaluateRequest, evaluate_targets
from tasks.round.registry import open_registry
from tests.adapters_made import make_adapter
from tests.models.providers.chat_server import agent, calls, failed, says
from tests.models.providers.scripted_analyst import ScriptedAnalyst
from tests.models.vllm_backend.vllm_stub import vllm_stub
from tests.tasks.talking_target import MODEL, USER, TalkTarget

TARGET = "tests.tasks.counting_target:target"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> None:
    monkeypatch.setattr("models.providers.chat_policy.WAITS", (0.01,))


def evaluate(policy: str, options: PolicyOptions | None = None, **given: Any) -> list[EvaluationRow]:
    request = EvaluateRequest(**{"target": TARGET, "split": "test", "policy": policy, "workers": 3, **given})
    return evaluate_targets(request, options or PolicyOptions())


def at(server: ScriptedAnalyst, **given: Any) -> PolicyOptions:
    return PolicyOptions(api_base=server.api_base, **{"price": (1.0, 1.0), **given})


def counts(number: int, request: dict[str, Any]) -> dict[str, Any]:
    """A model that counts even numbers right and odd ones wrong, then says so."""
    if request["messages"][-1]["role"] == "tool":
        return says("Counted.")
    n = int(re.findall(r"\d+", request["messages"][1]["content"])[0])
    return calls(("count", {"n": n if n % 2 == 0 else -1}))


def test_figures_by_family_and_the_no_op_row(tmp_path: Path) -> None:
    oracle, noop = evaluate("oracle", trials=2)
    assert oracle.scored is not None
    assert noop.scored is not None
    assert (oracle.scored.success, oracle.scored.episodes, oracle.scored.tasks) == (1.0, 16, 8)
    assert (noop.policy, noop.scored.success, noop.scored.episodes) == ("noop", 0.0, 8)
    assert 0 < oracle.scored.low < 1 == oracle.scored.high
    assert {f: s.episodes for f, s in oracle.families.items()} == {"even": 8, "odd": 8}
    assert oracle.metrics == {"digits": 1.0}
    text = "\n".join(table([oracle, noop]))
    assert "data counting-1, user: none" in text
    assert "  even" in text
    assert text.index("oracle ") < text.index("noop ")
    many = {f"f{n}": oracle.scored for n in range(14)}
    wide = table([row.model_copy(update={"families": many}) for row in (oracle, noop)])
    assert sum("2 families more (--json)" in line for line in wide) == 1, "under no-op none is shown"


def test_the_release_that_was_played_is_stored_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of `release`, which is another one after the next night."""

    def live(name: PolicyName, *given: Any) -> LoadedPolicy:
        release = name.kind == "release"
        policy = OraclePolicy() if release else NoopPolicy()
        return LoadedPolicy(name, policy, Sampling(0.0, 0), release=3 if release else None)

    monkeypatch.setattr("tasks.measuring.targets.load_policy", live)
    row, noop = evaluate("release")
    assert (row.policy, row.release, noop.release) == ("release", 3, None)
    text = table([row, noop])
    assert f"release: evaluation {row.evaluation}, of release@3" in text
    assert not any(line.startswith("noop: evaluation") for line in text)
    assert row.dollars == 0.0


def test_what_an_earlier_run_played_is_said_until_it_is_played_again() -> None:
    first = evaluate("oracle", trials=2, limit=4)
    assert "earlier run" not in "\n".join(table(first))
    again = evaluate("oracle", trials=2)
    assert "oracle: 8 of 16 episodes are from an earlier run; --fresh plays them again" in table(again)
    assert [row.earlier for row in again] == [8, 4]
    assert "earlier run" not in "\n".join(table(evaluate("oracle", trials=2, fresh=True)))


@pytest.mark.parametrize("user", ["scripted", "litellm:some/model"])
@pytest.mark.parametrize("target", ["shop", TARGET])
def test_a_simulated_user_for_a_target_that_has_none_is_refused(target: str, user: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--user '{user}' is given.*no simulated user.*leave --user out"):
        evaluate("noop", target=target, user=user)


def test_a_simulated_user_for_a_target_that_takes_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted one played, and nothing was said."""
    monkeypatch.setattr(f"{TARGET.partition(':')[0]}.CountingTarget.user", "scripted")
    with pytest.raises(ConfigurationError, match=r"--user 'litellm:some/model' is given.*its own, 'scripted', which"):
        evaluate("noop", user="litellm:some/model")
    assert evaluate("noop", user="scripted")[0].lost == {}


def test_an_api_model_is_measured_stored_and_not_asked_again(tmp_path: Path) -> None:
    with agent(counts) as server:
        row, _noop = evaluate("my-model", at(server))
        asked = len(server.requests)
        again, _ = evaluate("my-model", at(server))
        assert len(server.requests) == asked + 1  # the question whether it calls tools
        fresh, _ = evaluate("my-model", at(server), fresh=True)
        assert len(server.requests) == 2 * asked + 1
    assert row.scored is not None
    assert row.scored.success == 0.5
    assert (row.families["even"].success, row.families["odd"].success) == (1.0, 0.0)
    assert again.scored == row.scored
    assert (fresh.scored, fresh.evaluation == row.evaluation) == (row.scored, False)
    assert row.answered_by == ["scripted"]
    assert row.dollars == pytest.approx(17 * 110e-6)
    with open_store(f"sqlite:///{Path('runs').resolve() / 'trace.db'}") as store:
        stored = list(store.trajectories(None, group_id=row.evaluation))
        assert len(stored) == 8
        assert {t.purpose for t in stored} == {"evaluation"}
        assert all(t.round_id is None and t.prompt_tokens == 200 and len(t.steps) == 2 for t in stored)
        assert store.spent(None, stage=f"evaluation:{row.evaluation}")["calls"] == 18  # two runs' questions, 16 turns


def test_a_provider_that_fails_in_the_middle_loses_nothing_and_is_no_zero() -> None:
    down = threading.Event()

    def act(number: int, request: dict[str, Any]) -> dict[str, Any]:
        if number >= 8:
            down.set()
        return failed(500) if down.is_set() else counts(number, request)

    with agent(act) as server:
        row, _ = evaluate("my-model", at(server))
        assert row.owed > 0
        assert row.lost == {"provider": row.owed}
        assert row.scored is not None
        kept = row.scored.episodes
        assert 0 < kept == 8 - row.owed
        assert "INCOMPLETE" in "\n".join(table([row]))
        down.clear()
        server_calls = len(server.requests)
    with agent(counts) as back:
        options = PolicyOptions(api_base=server.api_base.replace(server.api_base, back.api_base), price=(1.0, 1.0))
        whole, _ = evaluate("my-model", options)
        assert whole.owed == 0
        assert server_calls > 0


def test_going_on_plays_only_what_is_owed() -> None:
    with agent(counts) as server:
        evaluate("my-model", at(server), limit=3)
        first = len(server.requests)
        row, _ = evaluate("my-model", at(server))
        assert len(server.requests) - first == 1 + 2 * 5
    assert row.scored is not None
    assert row.scored.episodes == 8


def test_a_key_that_is_refused_stops_at_once_and_says_so() -> None:
    with agent(lambda n, r: failed(401, "expired key")) as server:
        row, noop = evaluate("my-model", at(server), workers=1)
    assert (row.scored, row.owed, row.lost) == (None, 8, {"configuration": 1})
    assert "expired key" in row.stopped
    assert noop.owed == 0


def test_the_money_cap_counts_earlier_runs() -> None:
    with agent(counts) as server:
        options = at(server, max_tokens=100)
        row, _ = evaluate("my-model", options, workers=1, max_cost=0.0012)
        assert 0 < row.dollars <= 0.0012
        assert row.owed > 0
        assert "max-cost" in row.stopped
        before = len(server.requests)
        more, _ = evaluate("my-model", options, workers=1, max_cost=0.0012 + 1e-6)
        assert len(server.requests) - before <= 1
        assert more.dollars <= 0.0012 + 1e-6
        done, _ = evaluate("my-model", options, workers=1, max_cost=1.0)
    assert done.owed == 0


def test_the_money_cap_holds_for_policy_and_simulated_user_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.measuring.targets.load_target", TalkTarget)
    monkeypatch.setenv("TRACE_TARGET_USER", USER)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with agent(lambda n, r: says("Yes.")) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        options = PolicyOptions(api_base=server.api_base, price=(1.0, 1.0), max_tokens=100)
        row, noop = evaluate("my-model", options, target="talk", max_cost=0.0091)
        assert 0 < row.dollars <= 0.0091
        assert "max-cost" in row.stopped
        assert noop.owed == 4, "what the user of the no-op row would cost is under the same cap"
        whole, noop = evaluate("my-model", options, target="talk", max_cost=1.0)
        assert (whole.owed, noop.owed) == (0, 0)
    with open_store(f"sqlite:///{Path('runs').resolve() / 'trace.db'}") as store:
        rows = store.rows(SpendRow, stage=f"evaluation:{whole.evaluation}")
    assert {r.model for r in rows} == {"openai/my-model", MODEL}


def test_a_user_on_a_server_of_ones_own_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(client: Any, call: Any) -> Completion:
        return Completion("Yes.", prompt_tokens=10, sampled_tokens=10, dollars=sum(call.price) * 1e-5)

    monkeypatch.setattr("models.providers.client.ModelClient._wait_for", reply)
    with pytest.raises(ConfigurationError, match=r"--user-price 2,8 is given, and no model plays the users .*\(none\)"):
        evaluate("noop", user_price=(2.0, 8.0))
    monkeypatch.setattr("tasks.measuring.targets.load_target", TalkTarget)
    given: dict[str, Any] = {"target": "talk", "user": "litellm:hosted_vllm/mine", "max_cost": 1.0}
    with pytest.raises(ConfigurationError, match="no price for hosted_vllm/mine; give --user-price PROMPT,SAMPLED"):
        evaluate("noop", **given)
    assert evaluate("noop", **given, user_price=(2.0, 8.0))[0].dollars == pytest.approx(8 * 1e-4)
    for name, value in (("MODEL", "hosted_vllm/mine"), ("PROMPT_PRICE", "1"), ("SAMPLED_PRICE", "4")):
        monkeypatch.setenv(f"TRACE_ANALYST__{name}", value)
    assert evaluate("noop", **given, fresh=True)[0].dollars == pytest.approx(8 * 5e-5), "the analyst's"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"target": "nowhere"}, TargetError, "nowhere"),
        ({"split": "train"}, ConfigurationError, "diagnosis"),
        ({"split": "validation"}, ConfigurationError, "no task"),
        ({"policy": "vllm:localhost"}, ConfigurationError, "vllm:http"),
        ({"policy": "vllm:http://127.0.0.1:1#base"}, ProviderError, "127.0.0.1:1"),
        ({"policy": "/no/such/folder"}, ConfigurationError, "/no/such/folder"),
        ({"policy": "smollm2-135m@"}, ConfigurationError, "half a name"),
        ({"policy": "smollm2-135m@nothing_learnt"}, AdapterError, "nothing_learnt"),
    ],
)
def test_refused_before_work(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        evaluate(given.pop("policy", "oracle"), **given)


def test_a_context_too_small_is_refused_before_work(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.measuring import policy_names as names
    from tasks.measuring.evaluation import EvaluationSpec, check_context
    from tests.tasks.counting_target import Counting, target

    policy, renderer = tiny_model
    acting = names.LoadedPolicy(parse_policy("local:x"), policy, names.Sampling(0.0, 8), renderer, context=20)
    with pytest.raises(ConfigurationError, match="context of 20 tokens"):
        check_context(EvaluationSpec(target, target.name, "test"), acting)
    monkeypatch.setattr(Counting, "reset", raises_on_the_first(Counting.reset))
    assert check_context(EvaluationSpec(target, target.name, "test"), replace(acting, context=10_000)) == 0
    with pytest.raises(ConfigurationError, match="context of 20 tokens"):
        check_context(EvaluationSpec(target, target.name, "test"), acting)


def raises_on_the_first(reset: Any) -> Any:
    """A `reset` whose first task raises, as a user's may: its episode tells of it, and nothing else does."""

    def reset_or_raise(environment: Any, task: TargetTask) -> Observation:
        if task.id == "t0":
            raise KeyError("n")
        opened: Observation = reset(environment, task)
        return opened

    return reset_or_raise


@pytest.fixture
def small_model(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """The tiny model as a folder, as a user's own model is named."""
    folder = tmp_path / "model"
    tiny_model[0].model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def registered(model: Path, capability: str, fingerprinted: str = "") -> RegisteredAdapter:
    """A random adapter for `model` in the registry of the working folder, not promoted."""
    base, settings = load_base(str(model)), load_settings()
    registry = open_registry(settings, TARGET)
    folder = make_adapter(base.policy.model, model.with_name(capability), layers=(1, 2), seed=len(capability))
    base.policy.load_adapter("made", "made", model.with_name(fingerprinted) if fingerprinted else folder)
    taken = take_fingerprint(base.policy, list(range(5, 40)), "made")
    own = base.identity
    record = AdapterRecord(capability, own.base, own.revision, "round", {}, {TAG: taken.text()})
    return registry.register(record, folder, registry.start_run(capability))


def test_an_adapter_of_the_registry_plays(small_model: Path) -> None:
    made = registered(small_model, "count")
    options = PolicyOptions(max_tokens=4)
    row, noop = evaluate(f"local:{small_model}@count", options)
    assert (row.owed, row.scored is not None, noop.owed) == (0, True, 0)
    base, _ = evaluate(str(small_model), options)
    version, _ = evaluate(f"local:{small_model}@count@v{made.version}", options)
    assert version.evaluation == row.evaluation != base.evaluation
    with open_store(f"sqlite:///{Path('runs').resolve() / 'trace.db'}") as store:
        played = {k: list(store.trajectories(None, group_id=r.evaluation)) for k, r in {"a": row, "b": base}.items()}
    assert {t.adapter_id for t in played["a"]} == {made.served_name}
    assert {t.adapter_id for t in played["b"]} == {None}
    assert len(played["a"]) == len(played["b"]) == 8
    # Another seed's weights: what samples is the adapter, not the base.
    said = [[t.messages for t in sorted(p, key=lambda t: t.task_id)] for p in played.values()]
    assert said[0] != said[1]


@pytest.mark.parametrize("targets", [["shop"], ["shop", "bfcl-single"], ["bfcl-single"]])
def test_an_adapter_is_known_by_the_target_that_it_was_trained_for(tmp_path: Path, targets: list[str]) -> None:
    """Each target of a home may have a generalist of version 1."""
    loaded: Any = SimpleNamespace(served="generalist@v1-0123abcd", adapter="", name=SimpleNamespace(adapter=""))
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as store:
        for number, name in enumerate(targets, 1):
            round_ = store.start_round(name, "data", number, "laptop", {})
            given: dict[str, Any] = {"base": "b", "state": AdapterState.REGISTERED, "registered_version": "1"}
            model = f"trace-{name}-generalist"
            store.put([AdapterRow(id=f"of-{name}", round_id=round_.id, registered_model=model, **given)])
        for asked, name in (("shop", "shop"), ("bfcl:single", "bfcl-single")):
            assert _adapter_row(store, loaded, asked) == (f"of-{name}" if name in targets else loaded.served)


def test_an_adapter_that_is_not_what_was_registered_does_not_play(small_model: Path) -> None:
    registered(small_model, "count")
    registered(small_model, "swapped", fingerprinted="count")
    with pytest.raises(AdapterError, match="not what was registered"):
        evaluate(f"local:{small_model}@swapped")
    with pytest.raises(AdapterError, match=r"there are: count@v1"):
        evaluate(f"local:{small_model}@count@v7")


def test_with_the_vllm_backend_a_model_plays_on_the_servers(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with vllm_stub() as stub:
        monkeypatch.setenv("TRACE_POLICY__BACKEND", "vllm")
        monkeypatch.setenv("TRACE_POLICY__URL", stub.url)
        served = load_base(str(small_model)).policy
        stub.context, stub.scorer = 20, lambda ids, model: served.next_logprobs(ids).tolist()
        with pytest.raises(ConfigurationError, match="context of 20 tokens"):
            evaluate(str(small_model), PolicyOptions(max_tokens=4))
        stub.context = 4096
        row, _ = evaluate(str(small_model), PolicyOptions(max_tokens=4))
        assert row.owed == 0
        assert {b["model"] for b in stub.bodies} == {"base"}
        played = [b["prompt"] for b in stub.bodies if "logprob_token_ids" not in b]
        assert all(isinstance(token, int) for prompt in played for token in prompt)
    with pytest.raises(ProviderError, match="no vLLM server answers"):
        evaluate(str(small_model), PolicyOptions(max_tokens=5))


def test_figures_are_json() -> None:
    rows = evaluate("random", limit=2)
    assert json.loads(json.dumps([r.model_dump(mode="json") for r in rows]))[0]["policy"] == "random"


@pytest.mark.parametrize("policy", [BARE, "smollm2-135m", "release@1"])
def test_a_group_loads_the_bare_base_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is called the release before all others; any other release is its target's own."""
    loads: list[str] = []

    def load(name: PolicyName, *given: Any) -> LoadedPolicy:
        loads.append(name.text)
        return LoadedPolicy(name, NoopPolicy(), Sampling(0.0, 0))

    monkeypatch.setattr("tasks.measuring.targets.load_policy", load)
    monkeypatch.setattr("tasks.measuring.targets.expand", lambda name: ["shop", "shop:shift"])
    evaluate(policy, target="shop", limit=1)
    assert loads.count(policy) == (2 if policy == "release@1" else 1)


def test_steps_of_several_targets_are_those_of_their_finished_episodes() -> None:
    """A domain that finished none has no steps, which is not an episode of none."""
    frame = pd.DataFrame({"task_id": ["a", "b"], "success": [True, False], "reward": [1.0, 0.0]})

    def row(name: str, finished: pd.DataFrame, steps: float) -> tuple[EvaluationRow, pd.DataFrame]:
        made = EvaluationRow(
            target=name, split="test", policy="p", evaluation="e", data_hash="d", user="none", seed=0, trials=1,
            tasks=2, scored=success_of(finished), families={}, metrics={}, terminations={}, lost={}, owed=0,
            steps=steps, sampled_tokens=0, dollars=0.0,
        )  # fmt: skip
        return made, finished

    airline, retail = row("tau2:airline", frame, 6.0), row("tau2:retail", frame[:0], 0.0)
    assert (overall("tau2", [airline, retail]).steps, overall("tau2", [retail, retail]).steps) == (6.0, 0.0)
    assert overall("tau2", [airline, row("tau2:telecom", frame[:1], 3.0)]).steps == 5.0
