"""What simulated users cost: counted by the thread's meter, and held to its cap."""

from __future__ import annotations

import pytest

from environments.targets.simulated_user import litellm_completion, metered
from errors import BudgetExceeded
from models.providers.spending import SpendingCap
from tests.models.providers.chat_server import says
from tests.models.providers.scripted_analyst import ScriptedAnalyst


def test_a_simulated_user_is_counted_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ScriptedAnalyst(lambda n, r: says("I want help.")) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.api_base)
        speak = litellm_completion("openai/gpt-4.1")
        said = [{"role": "user", "content": "Hi! How can I help you today?"}]
        assert speak(said, ()) == ("I want help.", ())
        purse = SpendingCap(cap=0.01)
        with metered(purse.user_call):
            speak(said, ())
            # 100 prompt and 10 sampled tokens at LiteLLM's $2 and $8 a million.
            assert purse.dollars == pytest.approx(280e-6)
            assert purse.spent["openai/gpt-4.1"].calls == 1
            purse.settle()
            assert (purse.dollars, purse.spent) == (pytest.approx(280e-6), {})
            purse.cap = 0.0083  # a turn may cost 1,024 sampled tokens
            with pytest.raises(BudgetExceeded, match="max-cost"):
                speak(said, ())
        speak(said, ())
        assert len(server.requests) == 3
