"""API models as policies: the protocol, what is refused before work, retries, money, and what a failure becomes."""

from __future__ import annotations

from typing import Any

import pytest

from environments.contract import Action, Check, Message, Observation, Score, TargetTask, Termination, ToolCall
from errors import BudgetExceeded, ConfigurationError, ProviderError
from models.episodes import Episode, Player, Trajectory
from models.policy import Sampling
from models.providers.chat_policy import ChatPolicy, ChatSettings, ChatTurns, openai_messages
from models.providers.client import ModelClient
from models.providers.litellm_client import ModelCall
from models.providers.spending import Limits, SpendingCap, Spent
from tests.models.providers.chat_server import agent, calls, failed, says
from tests.models.providers.scripted_analyst import ScriptedAnalyst, good

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Counter:
    """Succeeds when `look` was called with {"at": 7} and a word was said then."""

    tools = (TOOL,)
    instructions = "Look at seven."
    examples = ()
    max_steps = 6

    def reset(self, task: TargetTask) -> Observation:
        self.looked = self.done = False
        return Observation((Message("user", "Please look."),))

    def step(self, action: Action) -> Observation:
        if action.malformed:
            return Observation((Message("tool", "cannot read this"),))
        if action.tool_calls:
            (call,) = action.tool_calls
            self.looked = dict(call.arguments) == {"at": 7}
            return Observation((Message("tool", "seen", tool_call_id=call.id, name=call.name),))
        return Observation((), done=True)

    def score(self) -> Score:
        return Score(float(self.looked), self.looked, (Check("looked", "look_up", True, self.looked),))

    def oracle(self) -> None:
        return None

    def close(self) -> None:
        return


def settings(server: ScriptedAnalyst, **given: Any) -> ChatSettings:
    return ChatSettings("openai/scripted", server.api_base, **{"price": (1.0, 2.0), "seconds": 60.0, **given})


def chat(asked: ChatSettings, cap: SpendingCap | None = None) -> ChatPolicy:
    """A policy with a client of its own."""
    return ChatPolicy(asked, ModelClient(cap))


def close(policy: ChatPolicy) -> None:
    policy.close()
    policy.client.close()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.providers.chat_policy.WAITS", (0.01, 0.01))


def play(policy: ChatPolicy) -> tuple[Trajectory, ChatTurns]:
    turns = ChatTurns(policy)
    (trajectory,) = Player(Counter, turns, None, Sampling()).play([Episode("e", TargetTask("t", "test", "f", 0))])
    return trajectory, turns


def test_calls_results_and_words_go_through_the_protocol() -> None:
    with agent(lambda n, r: [calls(("look", {"at": 7})), says("Seen it.")][n]) as server:
        policy = chat(settings(server))
        policy.check()
        trajectory, turns = play(policy)
        close(policy)
    assert trajectory.score is not None
    assert trajectory.score.success
    assert (turns.usage.calls, turns.usage.prompt_tokens, turns.usage.sampled_tokens) == (2, 200, 20)
    last = server.requests[-1]
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "tool"]
    assert last["messages"][2]["tool_calls"][0]["id"] == last["messages"][3]["tool_call_id"] == "c0"
    assert last["tools"][0]["function"]["name"] == "look"
    assert last["temperature"] == 0.0
    # 3 calls of 100 + 10 tokens at $1 and $2 a million: the probe is paid as well.
    assert policy.client.cap.dollars == pytest.approx(3 * 120e-6)
    assert policy.answered_by == {"scripted"}


def test_arguments_that_are_no_object_are_the_agents_mistake() -> None:
    answers = [calls(("look", '{"at": ')), calls(("look", "[7]")), says(""), says("I give up.")]
    with agent(lambda n, r: answers[n]) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
    assert trajectory.termination == Termination.DONE
    assert trajectory.score is not None
    assert not trajectory.score.success
    assert [bool(s.action.malformed) for s in trajectory.steps] == [True, True, True, False]
    assert [m["role"] for m in server.requests[-1]["messages"]][-2:] == ["assistant", "user"]


@pytest.mark.parametrize(("name", "arguments"), [("look", '{"at": "\ud800"}'), ("look\ud800", "{}")])
def test_a_call_that_no_request_can_hold_is_the_agents_mistake_and_its_episode_goes_on(
    name: str, arguments: str, no_waiting: None
) -> None:
    replies = [calls((name, arguments)), calls(("look", {"at": 7})), says("Seen it.")]
    with agent(lambda n, r: replies[n]) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
        assert [step.action.malformed for step in trajectory.steps] == [
            f"{name}({arguments})".replace("\ud800", "?"),
            "",
            "",
        ]
        assert trajectory.score is not None
        assert trajectory.score.success
        assert len(server.requests) == 3


def test_a_model_without_tool_calling_is_refused_before_work() -> None:
    with ScriptedAnalyst(lambda n, r: says("ping pong")) as server, pytest.raises(ConfigurationError, match="tool"):
        chat(settings(server)).check()
    server = ScriptedAnalyst(lambda n, r: failed(400, "tools are not supported"))
    with server, pytest.raises(ConfigurationError, match="enable-auto-tool-choice"):
        chat(settings(server)).check()
    with pytest.raises(ConfigurationError, match="has no tool calling"):
        chat(ChatSettings("gpt-3.5-turbo-instruct")).check()


def test_a_server_that_forces_no_calls_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    refusal = failed(400, "tool_choice can be auto or none where the gateway renders the prompt")
    with ScriptedAnalyst(lambda n, r: refusal if r.get("tool_choice") == "required" else says("ping")) as server:
        policy = chat(settings(server))
        policy.check()
        close(policy)
    assert [r.get("tool_choice") for r in server.requests][-1] == "required"
    assert "cannot be made to call" in caplog.text


def test_a_missing_key_and_a_cap_without_a_price_are_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        chat(ChatSettings("openai/gpt-4.1")).check()
    with pytest.raises(ConfigurationError, match="--price"):
        chat(ChatSettings("openai/unheard-of", "http://127.0.0.1:1/v1"), SpendingCap(Limits(dollars=1.0))).check()


@pytest.mark.usefixtures("no_waiting")
def test_what_may_pass_is_tried_again_and_what_stays_is_the_providers_error() -> None:
    with agent(lambda n, r: [failed(503), failed(429), says("Done.")][n]) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
    assert trajectory.score is not None
    with agent(lambda n, r: calls(("look", {"at": 7})) if not n else failed(500)) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
    assert trajectory.score is None
    assert (trajectory.boundary, len(trajectory.steps)) == ("provider", 1)
    with agent(lambda n, r: failed(401, "no such key")) as server:
        policy = chat(settings(server))
        assert play(policy)[0].boundary == "configuration"
        close(policy)


def test_a_context_that_is_too_small_fails_the_first_turn_and_ends_a_later_one() -> None:
    full = failed(400, "This model's maximum context length is 8192 tokens")
    with agent(lambda n, r: full) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
    assert (trajectory.termination, trajectory.boundary, trajectory.score) == (Termination.ERROR, "policy", None)
    assert "context" in trajectory.error
    with agent(lambda n, r: full if n else calls(("look", {"at": 7}))) as server:
        policy = chat(settings(server))
        trajectory, _ = play(policy)
        close(policy)
    assert (trajectory.termination, trajectory.error) == (Termination.CONTEXT, "")
    assert trajectory.score is not None


def test_no_call_is_made_that_may_pass_the_cap() -> None:
    with agent(lambda n, r: calls(("look", {"at": 7}))) as server:
        # A call may cost 1000 sampled tokens at $2 a million and a prompt; half a cent holds two, each is cheaper.
        policy = chat(settings(server, max_tokens=1000), SpendingCap(Limits(dollars=0.0025)))
        trajectory, _ = play(policy)
        close(policy)
    assert trajectory.boundary == "budget"
    assert 1 <= len(server.requests) <= 4
    assert policy.client.cap.dollars <= 0.0025
    over = SpendingCap(Limits(dollars=0.5), Spent(dollars=0.4)).call("openai/x", 10**6, 0, (1.0, 1.0))
    with pytest.raises(BudgetExceeded, match="max-cost"), over:
        raise AssertionError("the body of a call over the cap must not run")


def test_a_server_that_does_not_answer_in_time() -> None:
    with ScriptedAnalyst(lambda n, r: good("late") | {"seconds": 3}) as server:
        policy = chat(settings(server, seconds=0.3))
        policy.stop.wait(0)
        with pytest.raises(ProviderError, match=r"0\.3 s"):
            policy._once([{"role": "user", "content": "x"}], [], ChatTurns(policy).usage, {})
        close(policy)


def test_a_price_that_another_provider_has_pays_a_reply_that_stays() -> None:
    """LiteLLM's own count knows no `hosted_vllm/gpt-4o`; the cap was held with gpt-4o's $2.50 and $10."""
    with ScriptedAnalyst(lambda n, r: says("Yes.")) as server:
        client = ModelClient(SpendingCap(Limits(dollars=1.0)))
        call = ModelCall("test", "hosted_vllm/gpt-4o", [{"role": "user", "content": "?"}], api_base=server.api_base)
        reply = client.complete(call)
        client.close()
    assert (reply.content, reply.dollars) == ("Yes.", pytest.approx(100 * 2.5e-6 + 10 * 10e-6))
    assert client.cap.dollars == pytest.approx(reply.dollars)


def test_worked_examples_without_ids_get_them() -> None:
    shown = openai_messages(
        [
            Message("user", "a"),
            Message("assistant", "", (ToolCall("f", {}), ToolCall("g", {}))),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("tool", "cannot read this"),
        ]
    )
    ids = [c["id"] for c in shown[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [m.get("tool_call_id") for m in shown[2:4]] == ids
    assert shown[4]["role"] == "user"


def refused_or(reply: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The reply, or the refusal of a provider that wants each call answered by a result with its id."""
    said = request["messages"]
    for place, message in enumerate(said):
        wanted = [call["id"] for call in message.get("tool_calls") or ()]
        given = [m.get("tool_call_id") for m in said[place + 1 : place + 1 + len(wanted)]]
        if wanted != given:
            return failed(400, "'tool_calls' must be followed by tool messages responding to each 'tool_call_id'")
    return reply


class Terse(Counter):
    """As an environment of anybody's: results name no call, and only the first call of a turn is answered."""

    def step(self, action: Action) -> Observation:
        if not action.tool_calls:
            return Observation((), done=True)
        self.looked |= dict(action.tool_calls[0].arguments) == {"at": 7}
        return Observation((Message("tool", "seen"),))


def test_a_provider_takes_the_conversation_of_an_environment_whose_results_name_no_call() -> None:
    replies = [calls(("look", {"at": 7})), calls(("look", {"at": 8}), ("look", {"at": 9})), says("Seen.")]
    with agent(lambda n, r: refused_or(replies[n], r)) as server:
        policy = chat(settings(server))
        (trajectory,) = Player(Terse, ChatTurns(policy), None, Sampling()).play(
            [Episode("e", TargetTask("t", "test", "f", 0))]
        )
        close(policy)
    assert trajectory.error == ""
    assert trajectory.score is not None
    assert trajectory.score.success
    results = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert results == ["seen", "seen", "(this call was not answered)"]


@pytest.mark.parametrize("ended", [{"finish_reason": "abort"}, {"finish_reason": "error", "error": {"code": 502}}])
def test_a_reply_that_broke_off_is_no_turn_of_the_agents(ended: dict[str, Any], no_waiting: None) -> None:
    """It has an answer's status: a server that ends what is under way, and a gateway whose provider failed."""

    def broken() -> dict[str, Any]:
        step = says("I was about to")
        step["body"]["choices"][0] |= ended
        return step

    replies = [broken(), calls(("look", {"at": 7})), says("Seen it.")]
    with agent(lambda n, r: replies[n]) as server:
        policy = chat(settings(server))
        trajectory, turns = play(policy)
        close(policy)
    assert trajectory.error == ""
    assert [step.action.content for step in trajectory.steps] == ["", "Seen it."]
    assert trajectory.score is not None
    assert trajectory.score.success
    assert turns.policy.client.cap.spent["openai/scripted"].calls == 3, "what broke off is paid for"
