"""What the gateway counts is what its clients did and waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from models.serving.gateway.traffic_log import Feedback
from tests.models.serving.gateway_running import KEY, Running, run


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with run() as found:
        yield found


def test_seconds_until_an_answer_are_those_that_its_client_waits(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model in this process the router's turn comes between the passes of others: seconds, under load."""
    decide = running.router.decide

    async def late(*given: Any) -> Any:
        await asyncio.sleep(0.2)
        return await decide(*given)

    monkeypatch.setattr(running.router, "decide", late)
    assert [running.chat(f"refund {i}", stream=i == 1).status_code for i in range(2)] == [200, 200]
    end = time.monotonic() + 20
    while running.figure("trace_gateway_request_seconds_count") < 2:
        assert time.monotonic() < end
    assert running.figure("trace_gateway_request_seconds_sum") >= 0.4


def test_a_comment_on_a_conversation_that_was_judged_is_no_further_judgement(running: Running) -> None:
    class Judged:
        """A log with a conversation that was said to be a success."""

        async def say(self, owner: str, feedback: Feedback) -> dict[str, Any]:
            return {"conversation": feedback.conversation, "reward": 1.0, "success": True, "comment": ""}

        def wants(self, conversation: str) -> bool:
            return False

        def close(self) -> None:
            """Nothing is kept."""

    running.gateway.log = Judged()  # type: ignore[assignment]
    for word in ({"success": True}, {"comment": "thank you"}, {"reward": 1}, {"comment": "again", "success": True}):
        assert running.post({"conversation": "c", **word}, "/v1/feedback").status_code == 200
    counted = [running.figure(f'trace_gateway_feedback_total{{outcome="{o}"}}') for o in ("success", "comment")]
    assert counted == [3, 1]


def test_requests_are_counted_by_the_paths_that_are_served_whatever_anybody_asks_for(running: Running) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for name in ("no-such", "sk-typed-by-mistake"):
        asked = [httpx.get(f"{running.url}/v1/models/{name}", headers=h, trust_env=False) for h in (key, {})]
        assert [answer.status_code for answer in asked] == [404, 401]
    rows = httpx.get(f"{running.url}/metrics", headers=key, trust_env=False).text.splitlines()
    counted = [row for row in rows if row.startswith('trace_gateway_requests_total{path="/v1/models/')]
    assert len(counted) == 2
    assert all('{path="/v1/models/{name:path}"' in row and row.endswith(" 2.0") for row in counted)
