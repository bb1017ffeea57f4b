"""A simulated user played by a model, in a round: its calls are the round's, under the round's caps, and stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from db import SpendRow
from environments.targets.catalogue import load_target
from environments.targets.tau2 import describe
from errors import BudgetExceeded, ConfigurationError
from models.providers.analyst import Question
from models.scripted import NoopPolicy
from settings import load_settings
from tasks.reporting.analyst import analyst_figures
from tasks.round.context import Context
from tasks.round.preflight import Ready, preflight
from tasks.round.rollouts import episodes_for
from tasks.round.stage import current, forget, open_context
from tasks.round.target_prompt import target_prompt
from tests.models.providers.chat_server import says
from tests.models.providers.scripted_analyst import ScriptedAnalyst, good
from tests.tasks.talking_target import MODEL, USER, TalkTarget


@pytest.fixture
def server(settings_folder: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedAnalyst]:
    monkeypatch.setattr("tasks.round.traffic.load_target", TalkTarget)
    monkeypatch.setenv("TRACE_TARGET_USER", USER)
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def reply(number: int, request: dict[str, Any]) -> dict[str, Any]:
        return good({"ready": True}) if "response_format" in request else says("I want help.")

    with ScriptedAnalyst(reply) as running:
        monkeypatch.setenv("OPENAI_API_BASE", running.api_base)
        yield running


def opened(**analyst: Any) -> Context:
    return open_context(load_settings(profile="smoke", home="home", analyst=analyst))


def play(context: Context) -> list[str]:
    episodes = episodes_for(context.target.tasks("diagnosis"), 1, 0)
    return context.engine_of(NoopPolicy()).play(context.ground("diagnosis"), episodes)


def test_the_cap_stops_a_users_call_before_it_is_made_and_what_was_spent_is_stored(server: ScriptedAnalyst) -> None:
    context = opened(max_calls=5)
    with pytest.raises(BudgetExceeded, match=r"round's calls to 6, over the cap of 5.*raise the cap and run again"):
        play(context)
    assert len(server.requests) == 5
    rows = context.store.rows(SpendRow)
    assert {(r.round_id, r.stage, r.model) for r in rows} == {(context.round.id, "simulated_user", MODEL)}
    spent = context.spent()
    assert (spent["calls"], spent["prompt_tokens"], spent["sampled_tokens"]) == (5, 500, 50)
    assert spent["dollars"] == pytest.approx(5 * 280e-6)
    figures = analyst_figures(context.settings, context.store, context.round.id, None)
    assert figures is not None
    assert (figures.model, figures.calls) == (MODEL, 5)
    assert figures.stages["simulated_user"] == pytest.approx(5 * 280e-6)
    # The same round under a higher cap, in another process: what was spent counts, two played episodes are kept.
    forget(context.round.id)
    again = opened(max_calls=8)
    assert again.round.id == context.round.id
    with pytest.raises(BudgetExceeded, match="calls to 9"):
        play(again)
    assert len(server.requests) == 8
    forget(again.round.id)
    assert len(play(opened())) == 4
    # Four episodes of two calls, and one call of each of the two episodes that a cap had broken off.
    assert len(server.requests) == 10
    forget(context.round.id)


def test_analyst_and_user_are_under_one_cap(server: ScriptedAnalyst) -> None:
    context = opened(kind="llm", model=MODEL, max_calls=1000, max_dollars=0.0095, max_tokens=16)
    assert context.analyst.client is context.client
    context.analyst.ask(Question("contrast", [{"role": "user", "content": "Ready?"}], Ready))
    before = context.spent()["dollars"]
    assert before > 0
    with pytest.raises(BudgetExceeded, match=r"dollars to .* over the cap of 0\.0095"):
        play(context)
    spent = context.spent()["dollars"]
    assert before < spent <= 0.0095
    assert {r.stage for r in context.store.rows(SpendRow, round_id=context.round.id)} == {
        "contrast", "simulated_user",
    }  # fmt: skip
    forget(context.round.id)


def test_who_plays_the_user_is_fixed_with_the_round(server: ScriptedAnalyst, monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened()
    assert context.round.config["target_user"] == USER
    forget(context.round.id)
    monkeypatch.setenv("TRACE_HOME", "home")
    monkeypatch.setenv("TRACE_TARGET_USER", "scripted")
    assert current(context.round.id).settings.target_user == USER
    other = opened()
    assert other.round.id != context.round.id
    assert "target_user" not in other.round.config
    forget(other.round.id)
    monkeypatch.setenv("TRACE_TARGET_USER", USER)
    assert current(other.round.id).settings.target_user == "scripted"
    assert server.requests == []


def test_a_user_that_cannot_play_is_found_before_the_round(
    server: ScriptedAnalyst, monkeypatch: pytest.MonkeyPatch, embedded_model: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"{USER!r} needs a model"):
        TalkTarget("talk", USER, None)
    monkeypatch.setenv("TRACE_TARGET_USER", "litellm:openai/unheard-of")
    with pytest.raises(ConfigurationError, match="price of the simulated user 'openai/unheard-of' is unknown"):
        opened(max_dollars=1.0)
    priced = {"model": "openai/unheard-of", "prompt_price": 1.0, "sampled_price": 1.0}
    forget(opened(max_dollars=1.0, **priced).round.id)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigurationError, match="needs OPENAI_API_KEY"):
        preflight(load_settings(profile="smoke", home="home"))
    assert server.requests == []


def test_reading_a_targets_policy_and_tools_asks_no_model() -> None:
    if missing := describe()[0].missing:
        pytest.skip(missing)
    asked = list[Any]()
    target = load_target("tau2:airline", USER, lambda messages, tools: asked.append(messages) or ("Hello.", ()))
    prompt = target_prompt(target)
    assert "airline" in prompt.instructions.lower()
    assert len(prompt.tools) > 5
    assert asked == []
