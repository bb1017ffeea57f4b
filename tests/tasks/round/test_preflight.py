"""What is wrong with a language model is one clear error before a round starts; what is right costs one probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from db import ConversationRow, ReleaseRow, ReleaseState, Round, SpendRow, Store, open_store
from environments.contract import TargetTask
from environments.targets.shop import target
from errors import BudgetExceeded, ConfigurationError, ProviderError, SandboxError, TargetError
from settings import Settings, load_settings
from tasks.round.analyst import analyst_settings, author_settings, models_of
from tasks.round.preflight import check_analyst, check_by_loading, check_live, check_tasks, least_calls, preflight
from tasks.round.stage import open_context
from tasks.round.target_prompt import context_text
from tasks.round.traffic import TrafficTarget
from tests.models.providers.scripted_analyst import ScriptedAnalyst, failed, good, in_turn, refused
from tests.shapes_made import tiny_config

FREE = {"prompt_price": 0.0, "sampled_price": 0.0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


def with_model(api_base: str = "http://127.0.0.1:9/v1", **analyst: Any) -> Settings:
    given = {"kind": "llm", "model": "hosted_vllm/scripted", "api_base": api_base, "attempts": 2, **FREE}
    return load_settings(analyst=given | {"backoff_seconds": 0.01, "deadline_seconds": 60.0} | analyst)


def test_a_round_without_a_model_needs_none(settings_folder: Path, store: Store) -> None:
    check_analyst(load_settings(), target(), store)
    assert store.rows(SpendRow) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_base", "http://author/v1"),
        ("api_key_variable", "AUTHOR_KEY"),
        ("prompt_price", 0.0),
        ("sampled_price", 9.0),
    ],
)
def test_an_authors_own_address_without_its_model_is_refused(
    settings_folder: Path, store: Store, name: str, value: Any
) -> None:
    """It was left aside without a word, and the author asked at the analyst's server."""
    settings = load_settings(analyst={"model": "openai/m"}, synthesizer={"kind": "llm", name: value})
    with pytest.raises(ConfigurationError, match=rf"synthesizer\.{name} given, and synthesizer\.model is not"):
        check_analyst(settings, target(), store)
    check_analyst(load_settings(synthesizer={name: value}), target(), store)


def test_a_target_that_is_only_reported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = target()
    check_tasks(shop)
    monkeypatch.setattr(type(shop), "tasks", lambda self, split: [TargetTask("t", split, "f", 0)] * (split == "test"))
    with pytest.raises(ConfigurationError, match=r"'shop' has no diagnosis task \(diagnosis 0, validation 0, test 1\)"):
        check_tasks(shop)


def test_tasks_that_are_practised_and_reported_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop = target()
    tasks = type(shop).tasks
    test = [replace(task, id=f"again-{task.id}", split="test") for task in shop.tasks("diagnosis")[:3]]
    monkeypatch.setattr(type(shop), "tasks", lambda self, split: test if split == "test" else tasks(self, split))
    with caplog.at_level("WARNING", "trace"):
        check_tasks(shop)
    assert caplog.messages[0].startswith("3 of 3 tasks of test are tasks of diagnosis, too, such as 'again-")


@pytest.mark.parametrize("empty", ["validation", "test"])
def test_a_target_by_which_nothing_is_proven_or_reported_is_only_looked_at(
    monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    shop = target()
    monkeypatch.setattr(type(shop), "tasks", lambda self, split: [TargetTask(split, split, "f", 0)] * (split != empty))
    with pytest.raises(ConfigurationError, match=rf"'shop' has no {empty} task \(diagnosis 1, .*{empty} 0"):
        check_tasks(shop)
    check_tasks(shop, "select")
    with pytest.raises(ConfigurationError, match=f"has no {empty} task"):
        check_tasks(shop, "train")


def test_ids_that_repeat_over_splits_are_refused_before_a_round(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = target()
    monkeypatch.setattr(type(shop), "tasks", lambda self, split: [TargetTask("0", split, "f", 0)])
    with pytest.raises(TargetError, match="'0' is in diagnosis and in validation"):
        check_tasks(shop, "select")
    with pytest.raises(TargetError, match="'0' is in diagnosis and in validation"):
        open_context(load_settings(profile="smoke", home=settings_folder, target="shop"))


def test_traffic_that_nobody_judged_is_told_what_is_missing(store: Store) -> None:
    with pytest.raises(ConfigurationError, match=r"no conversation has feedback .* POST /v1/feedback gives it"):
        check_tasks(TrafficTarget(store))
    row = ConversationRow(
        id="c", conversation="c", target="shop", base="b", policy_id="p", capability="", adapter="", mode="off",
        router_version="", turns=1, success=True, reward=1.0,
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
    )  # fmt: skip
    store.put([row])
    check_tasks(TrafficTarget(store))


@pytest.mark.parametrize("part", ["analyst", "synthesizer"])
def test_no_model_configured(settings_folder: Path, store: Store, part: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no model is configured.*TRACE_ANALYST__MODEL"):
        check_analyst(load_settings(**{part: {"kind": "llm"}}), target(), store)


def test_a_missing_key_is_named_and_never_shown(
    settings_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_MODEL_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="'MY_MODEL_KEY', which is empty"):
        check_analyst(with_model(api_key_variable="MY_MODEL_KEY"), target(), store)


@pytest.mark.parametrize(("given", "missing"), [("prompt", "sampled"), ("sampled", "prompt")])
def test_one_price_of_two_is_not_left_aside(settings_folder: Path, store: Store, given: str, missing: str) -> None:
    one = with_model(**{f"{given}_price": 3.0, f"{missing}_price": None})
    with pytest.raises(ConfigurationError, match=f"analyst.{given}_price is given and analyst.{missing}_price is not"):
        check_analyst(one, target(), store)


def test_caps_that_cannot_hold_a_round(settings_folder: Path, store: Store) -> None:
    settings = with_model()
    calls = least_calls(settings, target())
    tasks = len(target().tasks("diagnosis")) * settings.rollout.trials
    assert calls == 1 + 10 * -(-tasks // settings.analyst.batch)
    fewer = load_settings(analyst={"kind": "llm"}, rollout={"tasks": 10, "trials": 2})
    assert least_calls(fewer, target()) == 1 + 10 * 5
    with pytest.raises(ConfigurationError, match=f"max_calls = {calls - 1}, and a round needs {calls} at least"):
        check_analyst(with_model(max_calls=calls - 1), target(), store)
    with pytest.raises(ConfigurationError, match="max_total_tokens = 5000, and a round needs"):
        check_analyst(with_model(max_total_tokens=5000), target(), store)
    with pytest.raises(ConfigurationError, match=r"max_dollars = 0\.001, and a round needs"):
        check_analyst(with_model(max_dollars=0.001, prompt_price=3.0, sampled_price=9.0), target(), store)
    with pytest.raises(ConfigurationError, match="price of 'hosted_vllm/scripted' is unknown"):
        check_analyst(with_model(max_dollars=1.0, prompt_price=None, sampled_price=None), target(), store)
    with pytest.raises(BudgetExceeded, match="dollars"):  # one reply alone may pass it
        check_analyst(with_model(max_dollars=0.02, prompt_price=0.0, sampled_price=9.0), target(), store)
    assert store.rows(SpendRow) == []


@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        (failed(400, "response_format json_schema is not supported"), ConfigurationError, "structured output"),
        (good("Of course! I am ready."), ConfigurationError, "does not answer in a schema.*'object' or 'text'"),
        (refused(), ConfigurationError, "does not answer in a schema"),
        (failed(401, "bad key"), ConfigurationError, "401.*check model, api_base and key"),
        (failed(404, "no such model"), ConfigurationError, "404"),
        (failed(503), ProviderError, "503"),
        (failed(402, "Insufficient credits"), ProviderError, "402.*Insufficient credits.*; pay its provider"),
    ],
)
def test_the_probe_finds_what_does_not_work(
    settings_folder: Path, store: Store, step: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with ScriptedAnalyst(in_turn(step)) as server, pytest.raises(kind, match=said):
        check_analyst(with_model(server.api_base), target(), store)
    assert store.rows(Round) == []


def test_a_server_that_is_not_there(settings_folder: Path, store: Store) -> None:
    with pytest.raises(ProviderError, match="hosted_vllm/scripted"):
        check_analyst(with_model(), target(), store)


def test_a_model_that_works_is_probed_once_and_the_round_remembers_no_address(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, embedded_model: Any
) -> None:
    with ScriptedAnalyst(in_turn(good({"ready": True}))) as server:
        settings = with_model(server.api_base, max_calls=10_000)
        preflight(settings)
        context = open_context(settings)
        assert len(server.requests) == 1
        (spent,) = context.store.rows(SpendRow)
        assert (spent.stage, spent.round_id, spent.calls) == ("probe", None, 1)
        config = context.round.config["analyst"]
        assert config["model"] == "hosted_vllm/scripted"
        assert not {"api_base", "api_key_variable", "max_calls"} & set(config)
        # Another address and other caps: the same round goes on.
        again = open_context(with_model(server.api_base, max_calls=20_000, concurrency=1))
        assert again.round.id == context.round.id
        assert open_context(with_model(server.api_base, temperature=0.1)).round.id != context.round.id


def test_without_a_sandbox_nothing_is_asked(
    settings_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE_SANDBOX", "container")
    monkeypatch.delenv("TRACE_SANDBOX_IMAGE", raising=False)
    settings = load_settings(
        analyst={"model": "hosted_vllm/scripted", "api_base": "http://127.0.0.1:9/v1"}, synthesizer={"kind": "llm"}
    )
    with pytest.raises(SandboxError, match="container"):
        check_analyst(settings, target(), store)


def test_the_client_gets_every_setting_it_knows(settings_folder: Path) -> None:
    settings = with_model(max_dollars=2.5, concurrency=7)
    client = analyst_settings(settings)
    assert (client.max_dollars, client.concurrency, client.api_base) == (2.5, 7, "http://127.0.0.1:9/v1")


def two_models(judge: str, author: str, **more: Any) -> Settings:
    """One model that judges, and another that writes, each with its own address."""
    own = {"kind": "llm", "model": "hosted_vllm/writer", "api_base": author, **FREE}
    return with_model(judge).model_copy(update={"synthesizer": load_settings(synthesizer=own | more).synthesizer})


def test_author_and_judge_may_be_two_models_and_both_are_probed(settings_folder: Path, store: Store) -> None:
    with ScriptedAnalyst(in_turn(good({"ready": True}))) as one, ScriptedAnalyst(in_turn(good({"ready": True}))) as two:
        settings = two_models(one.api_base, two.api_base)
        assert (settings.judge, settings.author) == ("hosted_vllm/scripted", "hosted_vllm/writer")
        check_analyst(settings, target(), store)
        assert (len(one.requests), len(two.requests)) == (1, 1)
    client = author_settings(settings)
    assert (client.model, client.api_base, client.attempts) == ("hosted_vllm/writer", two.api_base, 2)
    assert [part for part, _ in models_of(settings)] == ["analyst", "synthesizer"]
    assert author_settings(with_model("http://a/v1")) == analyst_settings(with_model("http://a/v1"))
    # The same model for both is asked once.
    alone = load_settings(analyst={"kind": "llm", "model": "m"}, synthesizer={"kind": "llm"})
    assert [part for part, _ in models_of(alone)] == ["analyst"]
    assert (alone.judge, alone.author) == ("m", "m")


def test_an_author_alone_needs_no_analyst_and_its_faults_name_it(
    settings_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"kind": "llm", "model": "hosted_vllm/writer", "api_base": "http://127.0.0.1:9/v1"}
    with ScriptedAnalyst(in_turn(good({"ready": True}))) as server:
        check_analyst(load_settings(synthesizer=given | FREE | {"api_base": server.api_base}), target(), store)
        assert len(server.requests) == 1
    monkeypatch.delenv("AUTHORS_KEY", raising=False)
    with pytest.raises(ConfigurationError, match=r"synthesizer\.api_key_variable names .*'AUTHORS_KEY'"):
        check_analyst(load_settings(synthesizer=given | {"api_key_variable": "AUTHORS_KEY"}), target(), store)
    with (
        ScriptedAnalyst(in_turn(good("I am ready."))) as server,
        pytest.raises(ConfigurationError, match=r"another model as synthesizer\.model"),
    ):
        check_analyst(load_settings(synthesizer=given | FREE | {"api_base": server.api_base}), target(), store)
    capped = load_settings(analyst={"max_dollars": 1.0}, synthesizer=given)
    with pytest.raises(ConfigurationError, match="price of 'hosted_vllm/writer' is unknown"):
        check_analyst(capped, target(), store)


def test_the_context_holds_policy_and_every_tool() -> None:
    text = context_text(target())
    assert "You work at the desk of a shop" in text
    assert all(f'"{name}"' in text for name in ("find", "move", "coupon", "person"))


def test_a_round_on_another_base_than_the_live_release_is_refused_before_it_is_opened(settings_folder: Path) -> None:
    settings = load_settings(profile="smoke", home=settings_folder / "home")
    with open_store(settings.database_url) as store:
        store.put([ReleaseRow(id="r", target="shop", number=3, base="large", data_hash="d", state=ReleaseState.LIVE)])
        said = "release 3 of shop is live and stands on large, .* base model is smollm2-135m; give --base-model large"
        for refused in (check_live, open_context):
            with pytest.raises(ConfigurationError, match=f"{said}.*rollback --to 0 --target shop"):
                refused(settings)
        assert store.rows(Round) == []


def test_a_base_model_whose_tokenizer_does_not_do_is_refused_before_a_round(
    settings_folder: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    base = tmp_path / "base"
    tiny_config("llama", vocabulary=len(tiny_tokenizer)).save_pretrained(base)
    save_file({}, base / "model.safetensors")
    settings = load_settings(profile="smoke", home=settings_folder, base_model=str(base))
    with pytest.raises(ConfigurationError, match="its tokenizer cannot be read"):
        check_by_loading(settings)
    tiny_tokenizer.save_pretrained(base)
    check_by_loading(settings)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match="no chat template"):
        check_by_loading(settings)
