"""The analyst against a scripted server that behaves, misbehaves and fails in every way a provider does."""

import asyncio
import time

import pytest
from pydantic import BaseModel, Field

from db import ReplyRow, Round, open_store
from errors import BudgetExceeded, ConfigurationError, ProviderError
from models.providers.analyst import Analyst, AnalystSettings, Question, Refused, unanswered
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.providers.client import ModelClient
from models.providers.litellm_client import bad_release
from models.providers.spending import OF_ROUND, SpendingCap, most_tokens
from tests.models.providers.scripted_analyst import (
    ScriptedAnalyst,
    failed,
    good,
    in_turn,
    refused,
    slow,
    trickling,
    truncated,
)


class Word(BaseModel):
    answer: str


def question(text="Say yes.", **options):
    return Question("contrast", [{"role": "user", "content": text}], Word, **options)


@pytest.fixture
def ask(tmp_path):
    """ask(script, **settings) -> (analyst, server, store); everything is closed afterwards."""
    opened = []

    def start(script, round_id="r1", path="trace.db", **settings):
        store = open_store(f"sqlite:///{tmp_path / path}")
        if store.rows(Round, id=round_id) == []:
            round_id = store.start_round("shop", "hash", 0, round_id, {}).id
        server = ScriptedAnalyst(script).__enter__()
        base = {"model": "hosted_vllm/scripted", "api_base": server.api_base, "backoff_seconds": 0.02, "max_tokens": 64}
        base |= {"deadline_seconds": 5.0, "prompt_price": 1.0, "sampled_price": 2.0}
        asked, log = AnalystSettings(**base | settings), StoredSpend(store, round_id)
        client = ModelClient(SpendingCap(asked.limits, None, OF_ROUND, log.elsewhere), log)
        analyst = Analyst(asked, client, StoredReplies(store))
        opened.extend([(analyst, server, store)])
        return analyst, server, store

    yield start
    for analyst, server, store in opened:
        analyst.close()
        analyst.client.close()
        server.__exit__()
        store.close()


def test_a_good_reply_is_parsed_paid_for_and_never_paid_for_again(ask):
    analyst, server, store = ask(in_turn(good({"answer": "yes"})))
    first, again = analyst.ask(question()), analyst.ask(question())
    assert first.value.answer == again.value.answer == "yes"
    assert (first.cached, again.cached) == (False, True)
    assert first.request_hash == again.request_hash
    assert len(server.requests) == 1
    assert server.requests[0]["response_format"]["json_schema"]["strict"] is True
    spent = store.spent(analyst.client.log.round_id)
    assert (spent["calls"], spent["prompt_tokens"], spent["sampled_tokens"]) == (1, 10, 5)
    assert spent["dollars"] == pytest.approx((10 * 1.0 + 5 * 2.0) / 1e6)
    assert store.row(ReplyRow, request_hash=first.request_hash).completion_tokens == 5


class Bounded(BaseModel):
    pattern: str = Field(min_length=3, max_length=9, pattern="[a-z]+", description="letters")
    minimum: list[Word] = Field(min_length=1, max_length=4)
    share: float = Field(0.5, ge=0, lt=1)


def test_bounds_that_strict_servers_refuse_are_checked_here_alone(ask):
    """Names of fields are no bounds, whatever they are called."""
    words, few = [{"answer": "yes"}], {"pattern": "ab", "minimum": [], "share": 2}
    analyst, server, _ = ask(in_turn(good(few), good({"pattern": "abc", "minimum": words, "share": 0})))
    asked = Question("contrast", [{"role": "user", "content": "Say."}], Bounded)
    assert analyst.ask(asked).value.share == 0
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["pattern", "minimum", "share"]
    said = {name: set(part) - {"title"} for name, part in schema["properties"].items()}
    assert said == {"pattern": {"type", "description"}, "minimum": {"type", "items"}, "share": {"type"}}
    assert schema["$defs"]["Word"]["additionalProperties"] is False
    told = server.requests[1]["messages"][-1]["content"]
    assert all(f"{name}: " in told for name in ("pattern", "minimum", "share"))


def test_a_model_that_takes_no_temperature_is_sent_none(ask):
    analyst, server, _ = ask(in_turn(good({"answer": "yes"})))
    analyst.ask(question(temperature=0.5))
    silent, other, _ = ask(in_turn(good({"answer": "yes"})), path="other.db", send_temperature=False)
    silent.ask(question(temperature=0.5))
    assert server.requests[0]["temperature"] == 0.5
    assert "temperature" not in other.requests[0]


def test_samples_are_different_requests(ask):
    analyst, server, _ = ask(in_turn(good({"answer": "a"}), good({"answer": "b"})))
    assert [analyst.ask(question(sample=n)).value.answer for n in range(2)] == ["a", "b"]
    assert len(server.requests) == 2


@pytest.mark.parametrize("bad", [good("no json"), good({"other": 1}), truncated(), good('{"answer": ['), good("")])
def test_an_unusable_reply_gets_one_repair_that_says_what_was_wrong(ask, bad):
    analyst, server, store = ask(in_turn(bad, good('```json\n{"answer": "yes"}\n```')))
    assert analyst.ask(question()).value.answer == "yes"
    assert len(server.requests) == 2
    assert "not usable" in server.requests[1]["messages"][-1]["content"]
    assert store.spent(analyst.client.log.round_id)["calls"] == 2


@pytest.mark.parametrize("bad", [good("no json"), truncated()])
def test_after_the_repair_it_is_an_error_and_nothing_is_cached(ask, bad):
    analyst, server, store = ask(in_turn(bad))
    with pytest.raises(ProviderError, match="no usable answer") as found:
        analyst.ask(question())
    assert not found.value.transient
    assert len(server.requests) == 2
    assert store.rows(ReplyRow) == []
    assert store.spent(analyst.client.log.round_id)["calls"] == 2


def test_what_the_check_says_is_told_to_the_model(ask):
    def check(word):
        if word.answer != "yes":
            raise ValueError(f"the answer {word.answer!r} is not among yes")

    analyst, server, _ = ask(in_turn(good({"answer": "no"}), good({"answer": "yes"})))
    assert analyst.ask(question(check=check)).value.answer == "yes"
    assert "'no' is not among yes" in server.requests[1]["messages"][-1]["content"]
    # A reply that today's check refuses is asked for again, not served from the cache.
    with pytest.raises(ProviderError, match="nothing is right"):
        analyst.ask(question(check=lambda word: (_ for _ in ()).throw(ValueError("nothing is right"))))


@pytest.mark.parametrize("trouble", [failed(429), failed(500), failed(503), failed(408), {"body": b"<html>"}])
def test_passing_trouble_is_retried(ask, trouble):
    analyst, server, store = ask(in_turn(trouble, trouble, good({"answer": "yes"})))
    assert analyst.ask(question()).value.answer == "yes"
    assert len(server.requests) == 3
    assert store.spent(analyst.client.log.round_id)["calls"] == 3


def test_lasting_trouble_is_one_transient_error_after_all_attempts(ask):
    analyst, server, _ = ask(in_turn(failed(500)), attempts=3)
    with pytest.raises(ProviderError, match="500") as found:
        analyst.ask(question())
    assert found.value.transient
    assert len(server.requests) == 3


def test_a_provider_that_asks_to_wait_is_waited_for(ask):
    analyst, _, _ = ask(in_turn(failed(429, **{"retry-after": "1"}), good({"answer": "yes"})))
    before = time.monotonic()
    analyst.ask(question())
    assert time.monotonic() - before >= 1.0


@pytest.mark.parametrize(("status", "said"), [(401, "key"), (404, "check model")])
def test_what_no_retry_can_mend_is_a_configuration_error_at_once(ask, status, said):
    analyst, server, _ = ask(in_turn(failed(status)))
    with pytest.raises(ConfigurationError, match=said):
        analyst.ask(question())
    assert len(server.requests) == 1


def test_a_bad_request_is_not_retried(ask):
    analyst, server, _ = ask(in_turn(failed(400, "too long")))
    with pytest.raises(ProviderError, match="too long") as found:
        analyst.ask(question())
    assert not found.value.transient
    assert len(server.requests) == 1


@pytest.mark.parametrize("step", [slow({"answer": "x"}, 3), trickling({"answer": "x"}, 0.1)])
def test_a_slow_server_meets_the_deadline(ask, step):
    analyst, _, store = ask(in_turn(step), deadline_seconds=0.7)
    before, said = time.monotonic(), "may have 64 tokens, so raise analyst.deadline_seconds for a slow model"
    with pytest.raises(ProviderError, match=said) as found:
        analyst.ask(question())
    assert time.monotonic() - before < 2.0
    assert found.value.transient
    assert store.spent(analyst.client.log.round_id)["calls"] >= 1


def filtered(kind):
    step = failed(400, "The prompt was stopped by the content filter.")
    step["body"]["error"] |= {"type": "invalid_request_error", "code": kind}
    return step


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (refused("I will not."), "refused to answer: I will not"),
        (filtered("content_policy_violation"), "content filter"),
        (failed(400, "The response was filtered by Azure OpenAI's content management policy."), "management policy"),
        (failed(400, "This model's maximum context length is 100 tokens"), "maximum context"),
    ],
)
def test_a_refusal_is_an_error_at_once(ask, step, said):
    analyst, server, _ = ask(in_turn(step))
    with pytest.raises(Refused, match=said) as found:
        analyst.ask(question())
    assert not unanswered(found.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [402, 413, 422, 500])
def test_a_call_that_fails_is_no_answer_of_the_model(ask, status):
    analyst, _, _ = ask(in_turn(failed(status)), attempts=1)
    with pytest.raises(ProviderError, match=str(status)) as found:
        analyst.ask(question())
    assert unanswered(found.value)
    assert found.value.transient is (status == 500)
    with pytest.raises(ProviderError, match="no usable answer") as found:
        ask(in_turn(good("no json")), path="other.db")[0].ask(question())
    assert not unanswered(found.value)


def test_a_model_without_structured_output_is_told_how_to_go_on(ask):
    def script(number, request):
        return (
            failed(400, "response_format is not supported") if "response_format" in request else good({"answer": "yes"})
        )

    analyst, _, _ = ask(script)
    with pytest.raises(ConfigurationError, match="'text'"):
        analyst.ask(question())
    analyst, server, _ = ask(script, structured="text")
    assert analyst.ask(question()).value.answer == "yes"
    assert '"answer"' in server.requests[0]["messages"][-1]["content"]


def test_no_model_is_one_clear_error(ask):
    with pytest.raises(ConfigurationError, match="no model is configured"):
        ask(in_turn(good("")), model="")


def test_a_missing_key_is_named(ask, monkeypatch):
    monkeypatch.delenv("MISSING_KEY", raising=False)
    analyst, server, _ = ask(in_turn(good("")), api_key_variable="MISSING_KEY")
    with pytest.raises(ConfigurationError, match="MISSING_KEY"):
        analyst.ask(question())
    assert server.requests == []


def test_concurrency_is_bounded_and_errors_stand_in_their_place(ask):
    def script(number, request):
        text = request["messages"][0]["content"]
        return refused() if text == "7" else slow({"answer": text}, 0.05)

    analyst, server, _ = ask(script, concurrency=3)
    found = analyst.ask_many([question(str(n)) for n in range(12)])
    assert [getattr(a, "value", None) and a.value.answer for a in found] == [
        None if n == 7 else str(n) for n in range(12)
    ]
    assert isinstance(found[7], ProviderError)
    assert server.most_running == 3


@pytest.mark.parametrize(
    ("cap", "said"),
    [({"max_calls": 2}, "calls"), ({"max_total_tokens": 200}, "tokens"), ({"max_dollars": 0.0003}, "dollars")],
)
def test_caps_stop_before_the_call_that_would_pass_them_and_nothing_is_lost(ask, cap, said):
    # 64 sampled tokens may come, and 10 + 64 do: two calls leave no room for a third.
    script = in_turn(reply_of(10, 64))
    analyst, server, store = ask(script, concurrency=1, **cap)
    with pytest.raises(BudgetExceeded, match=said):
        analyst.ask_many([question(f"q{n}") for n in range(6)])
    asked = len(server.requests)
    assert 1 <= asked <= 2
    spent = store.spent(analyst.client.log.round_id)
    assert spent["calls"] == asked
    assert len(store.rows(ReplyRow)) == asked
    assert spent["prompt_tokens"] + spent["sampled_tokens"] <= cap.get("max_total_tokens", 1e9)
    assert spent["dollars"] <= cap.get("max_dollars", 1e9)
    # The same round without the cap goes on where it stopped: only the rest is asked.
    more, server, _ = ask(script, round_id=analyst.client.log.round_id)
    found = more.ask_many([question(f"q{n}") for n in range(6)])
    assert [answer.cached for answer in found] == [n < asked for n in range(6)]
    assert len(server.requests) == 6 - asked


def reply_of(prompt_tokens, sampled_tokens):
    return good({"answer": "yes"}, prompt_tokens, sampled_tokens)


def test_a_cap_counts_what_earlier_processes_of_the_round_spent(ask):
    analyst, _, _ = ask(in_turn(good({"answer": "yes"})), max_calls=1)
    analyst.ask(question())
    later, server, _ = ask(in_turn(good({"answer": "yes"})), round_id=analyst.client.log.round_id, max_calls=1)
    with pytest.raises(BudgetExceeded):
        later.ask(question("another"))
    assert server.requests == []


def test_a_dollar_cap_without_a_price_is_refused(ask):
    with pytest.raises(ConfigurationError, match="price of"):
        ask(in_turn(good("")), prompt_price=None, sampled_price=None, max_dollars=1.0)


def test_cached_tokens_cost_what_the_table_of_prices_says(ask):
    """The context stands in front of every request of a round: most of its tokens are cached ones."""
    reply = good({"answer": "yes"}, prompt_tokens=8000, sampled_tokens=100)
    reply["body"]["usage"]["prompt_tokens_details"] = {"cached_tokens": 7000}
    table = {"model": "openai/gpt-4.1-mini", "prompt_price": None, "sampled_price": None}
    analyst, _, store = ask(in_turn(reply), max_dollars=1.0, **table)
    analyst.ask(question())
    # 0.40, 0.10 where cached, and 1.60 dollars per million tokens
    assert store.spent(analyst.client.log.round_id)["dollars"] == pytest.approx((1000 * 0.4 + 7000 * 0.1 + 160) / 1e6)


def test_it_can_be_asked_from_inside_an_event_loop(ask):
    analyst, _, _ = ask(in_turn(good({"answer": "yes"})))

    async def inside():
        return analyst.ask(question()).value.answer

    assert asyncio.run(inside()) == "yes"


def test_the_estimate_of_tokens_is_an_upper_one():
    assert most_tokens("a" * 100) >= 25
    assert most_tokens("\U0001f600" * 10) >= 40


def test_compromised_releases_are_known():
    assert bad_release("1.107.0")
    assert bad_release("1.82.8")
    assert not bad_release("1.106.2")
