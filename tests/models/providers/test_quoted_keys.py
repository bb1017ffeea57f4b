"""A server that quotes the key in its error: what is raised, stored and logged of it has none."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

from environments.contract import Message
from models.providers.chat_policy import ChatPolicy, ChatSettings, ChatTurns
from models.providers.client import ModelClient
from tests.models.providers.chat_server import failed
from tests.models.providers.scripted_analyst import ScriptedAnalyst
from tests.models.providers.test_chat import Counter

KEY = 'sk-very/secret+"1234567890'
QUOTED = f"{'x' * 330} incorrect key in 'Authorization: Bearer {KEY}', ask for another"
STEPS: dict[str, dict[str, Any]] = {
    **{str(status): failed(status, QUOTED) for status in (400, 401, 404, 429, 500)},
    "too long": failed(400, f"maximum context exceeded, {QUOTED}"),
    "no completion": {"body": {"error": {"message": QUOTED}}},
    "no JSON": {"body": f"<html>Bearer {KEY}</html>".encode()},
    "no JSON, 502": {"body": f"<html>Bearer {KEY}</html>".encode(), "status": 502},
}


@pytest.mark.parametrize("variable", ["DESK", "OPENAI_API_KEY"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_key_that_the_server_quotes_is_in_no_error_and_no_log(
    kind: str, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("models.providers.chat_policy.WAITS", ())
    monkeypatch.setenv(variable, KEY)
    with ScriptedAnalyst(lambda number, request: STEPS[kind]) as server:
        named = variable if variable == "DESK" else ""
        if not named:  # LiteLLM takes the key from its own variable, and the address too
            monkeypatch.setenv("OPENAI_BASE_URL", server.api_base)
        asked = ChatSettings("openai/scripted", server.api_base if named else "", named, price=(1.0, 1.0), seconds=60.0)
        policy = ChatPolicy(asked, ModelClient())
        with pytest.raises(Exception, match="openai/scripted") as raised:
            ChatTurns(policy).act(Counter(), [Message("user", "Look.")], 0)
        assert len(server.requests) == 1
        policy.client.close()
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("trace").error("lost", exc_info=raised.value)
    told = [str(raised.value), "".join(traceback.format_exception(raised.value)), caplog.text]
    assert not [text for text in told if "secret" in text or "1234567890" in text], told
