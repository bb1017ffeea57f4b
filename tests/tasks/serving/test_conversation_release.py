"""Which release a stored conversation, and with it what is said of it, belongs to."""

from __future__ import annotations

import asyncio
from pathlib import Path

from db import ConversationRow, open_store
from db.rows.conversations import SEVERAL
from models.policy import PolicyIdentity
from models.router.router import RouteDecision
from models.serving.gateway.conversations import Routed
from models.serving.gateway.traffic_log import Feedback, LoggedTurn, TrafficLog
from models.serving.openai_api.requests import ChatRequest
from models.serving.upstreams.contract import Turn, TurnResult

DECISION = RouteDecision("", {"": 1.0}, (), 0.0, "retrieval")


def test_a_conversation_is_the_releases_that_answered_all_of_it(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        log = TrafficLog(store, PolicyIdentity("tiny", "1"), "shop", 1.0, lambda _: None)

        def answered(release: int, *messages: str, router: str = "router") -> int | None:
            said = [{"role": "user" if i % 2 == 0 else "assistant", "content": m} for i, m in enumerate(messages)]
            heard = TurnResult({"role": "assistant", "content": "Done."})
            turn = Turn(ChatRequest("trace", True, {}, said), None, "base", "c", None, True, heard)
            log.add(LoggedTurn("", Routed("c", DECISION, router, release), turn, 0.5))
            log.flush()
            return store.rows(ConversationRow)[0].release

        assert [answered(3, "a"), answered(3, "a", "Done.", "b")] == [3, 3]
        assert answered(4, "a") == 4, "its client has gone back to the beginning"
        asyncio.run(log.say("", Feedback("c", success=True)))
        assert store.rows(ConversationRow)[0].release == 4
        assert answered(0, "a", "Done.", "b") == SEVERAL, "what was said of release 4 is not said of the base"
        assert answered(0, "a", "Done.", "b", "Done.", "c") == SEVERAL
        assert answered(0, "a") == 0
        assert answered(5, "a", router="always") == 5
        assert answered(5, "a", "Done.", "b") == SEVERAL, "the first turn is that of a gateway with a router of its own"
        log.close()
