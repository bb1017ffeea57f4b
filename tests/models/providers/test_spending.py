"""What language models cost: reserved before each call, charged after it, and held to one cap for all of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from db import open_store
from errors import BudgetExceeded, ConfigurationError, ProviderError
from models.providers import simulated_user
from models.providers.analyst_store import StoredSpend
from models.providers.client import ModelClient
from models.providers.litellm_client import ModelCall
from models.providers.simulated_user import user_model
from models.providers.spending import OF_ROUND, Limits, SpendingCap, Spent, most_prompt_tokens
from tests.models.providers.chat_server import calls, failed, says
from tests.models.providers.scripted_analyst import ScriptedAnalyst

USER = "litellm:openai/gpt-4.1"
SAID = [{"role": "user", "content": "Hi! How can I help you today?"}]


class Rows:
    """Stands for the table `spend`."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, Spent]] = []

    def add(self, purpose: str, model: str, cost: Spent, seconds: float) -> None:
        self.rows.append((purpose, model, cost))


def test_a_simulated_user_is_counted_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ScriptedAnalyst(lambda n, r: says("I want help.")) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        cap, log = SpendingCap(Limits(dollars=0.01)), Rows()
        client = ModelClient(cap, log)
        speak = user_model(USER, client)
        assert speak is not None
        assert speak(SAID, ()) == ("I want help.", ())
        # 100 prompt and 10 sampled tokens at LiteLLM's $2 and $8 a million.
        assert cap.dollars == pytest.approx(280e-6)
        assert cap.spent["openai/gpt-4.1"].calls == 1
        assert log.rows == [("simulated_user", "openai/gpt-4.1", Spent(1, 100, 10, pytest.approx(280e-6)))]
        cap.settle()
        assert (cap.dollars, cap.spent) == (pytest.approx(280e-6), {})
        cap.limits = Limits(dollars=0.0083)  # a turn may cost 1,024 sampled tokens
        with pytest.raises(BudgetExceeded, match="max-cost"):
            speak(SAID, ())
        assert len(server.requests) == len(log.rows) == 1
        client.close()
    assert "max_tokens" not in server.requests[0]
    assert server.requests[0]["temperature"] == 0.0


@pytest.mark.parametrize("most", [float("nan"), -1.0])
def test_a_cap_that_could_never_be_passed_is_refused(most: float) -> None:
    """The command line lets nan through: it is not below the least."""
    with pytest.raises(ConfigurationError, match="dollars is none; give a number from 0 on"):
        Limits(dollars=most)


def test_a_reply_without_a_count_of_its_tokens_is_not_free() -> None:
    silent = says("I want help.")
    del silent["body"]["usage"]
    with ScriptedAnalyst(lambda n, r: silent) as server:
        log = Rows()
        call = ModelCall("policy", "openai/m", SAID, max_tokens=20, api_base=server.api_base, price=(2000.0, 8000.0))
        most = most_prompt_tokens(SAID)
        client = ModelClient(SpendingCap(Limits(dollars=2e-3 * most + 8e-3 * 21)), log)  # one call's, and a token
        assert client.complete(call).prompt_tokens == most
        assert log.rows == [("policy", "openai/m", Spent(1, most, 7, pytest.approx(2e-3 * most + 8e-3 * 7)))]
        with pytest.raises(BudgetExceeded):
            client.complete(call)
        client.close()
    assert len(server.requests) == len(log.rows) == 1


def test_a_scripted_user_needs_no_model() -> None:
    assert user_model("scripted", ModelClient()) is None


@pytest.mark.parametrize(
    ("step", "transient", "said"),
    [
        (failed(503), True, r"simulated user 'openai/gpt-4\.1': .*try again later"),
        (failed(401, "no such key"), False, "no such key.*check the model's name, key and address"),
        (says(""), True, "empty turn"),
        (calls(("look", "[7]")), True, "not an object"),
        (calls(("look", '{"at": ')), True, "not JSON"),
    ],
)
def test_a_user_whose_model_fails_is_the_providers_error_and_its_calls_are_stored(
    monkeypatch: pytest.MonkeyPatch, step: dict[str, object], transient: bool, said: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(simulated_user, "WAITS", (0.0, 0.0, 0.0))
    log = Rows()
    client = ModelClient(log=log)
    with ScriptedAnalyst(lambda n, r: step) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        speak = user_model(USER, client)
        assert speak is not None
        with pytest.raises(ProviderError, match=said) as caught:
            speak(SAID, ())
    client.close()
    assert caught.value.transient is transient
    assert [cost.calls for _, _, cost in log.rows] == ([1] * 4 if transient else [1])


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(calls=2), "calls to 3, over the cap of 2"),
        (Limits(tokens=230), "tokens to 2[34].*over the cap of 230"),
        (Limits(dollars=0.00023), "dollars to .*over the cap of 0.00023"),
    ],
)
def test_one_cap_holds_for_every_model_together(limits: Limits, said: str) -> None:
    cap = SpendingCap(limits, refusal=OF_ROUND)
    for model in ("a/one", "b/two"):
        with cap.call(model, 90, 10, (1.0, 1.0)) as charge:
            charge(Spent(1, 90, 10, 100e-6))
    with pytest.raises(BudgetExceeded, match=said), cap.call("a/one", 30, 10, (1.0, 1.0)):
        raise AssertionError("the body of a call over the cap must not run")


def test_a_failed_call_counts_as_a_call_and_costs_nothing() -> None:
    cap = SpendingCap(Limits(calls=1, dollars=1.0))
    with pytest.raises(ProviderError), cap.call("a/one", 10**5, 0, (1.0, 1.0)):
        raise ProviderError("down")
    assert (cap.dollars, cap.spent) == (0.0, {})
    with pytest.raises(BudgetExceeded), cap.call("a/one", 1, 0, (1.0, 1.0)):
        raise AssertionError("the body of a call over the cap must not run")


def test_a_call_that_does_not_fit_waits_for_those_under_way() -> None:
    """Each call is reserved at 60 cents and costs 5: a dollar holds all six, one after another."""
    cap, under_way, most = SpendingCap(Limits(dollars=1.0)), [0], [0]

    def one() -> None:
        with cap.call("a/one", 600_000, 0, (1.0, 1.0)) as charge:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(0.002)
            under_way[0] -= 1
            charge(Spent(1, 50_000, 0, 0.05))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]
    assert cap.spent["a/one"].calls == 6
    assert cap.dollars == pytest.approx(0.3)


def test_what_other_processes_spend_counts_before_each_call(tmp_path: Path) -> None:
    """Two logs of one round are those of two processes; neither counts its own calls twice."""
    store = open_store(f"sqlite:///{tmp_path}/trace.db")
    this = store.start_round("shop", "data", 0, "smoke", {})
    caps = []
    for _ in range(2):
        log = StoredSpend(store, this.id)
        caps.append((SpendingCap(Limits(calls=3), refusal=OF_ROUND, elsewhere=log.elsewhere), log))

    def spend(cap: SpendingCap, log: StoredSpend) -> None:
        with cap.call("a/one", 90, 10, (1.0, 1.0)) as charge:
            charge(Spent(1, 90, 10, 100e-6))
        log.add("test", "a/one", Spent(1, 90, 10, 100e-6), 0.0)

    for which in (0, 1, 0):
        spend(*caps[which])
    for cap, log in caps:
        with pytest.raises(BudgetExceeded, match="calls to 4, over the cap of 3"):
            spend(cap, log)
    assert [log.elsewhere().calls for _, log in caps] == [1, 2]
    assert store.spent(this.id)["calls"] == 3
    store.close()


def test_a_closed_client_makes_another_call() -> None:
    client = ModelClient()
    with ScriptedAnalyst(lambda n, r: says("Yes.")) as server:
        call = ModelCall("test", "openai/any", SAID, api_base=server.api_base)
        for _ in range(2):
            assert client.complete(call).content == "Yes."
            client.close()
            client.close()
