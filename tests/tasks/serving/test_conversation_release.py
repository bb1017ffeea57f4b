"""Which release a stored conversation, and what is said of it, belongs to; and what is said of removed words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from db import ConversationRow, Store, open_store
from db.rows.conversations import SEVERAL
from db.values.types import utc_now
from models.policy import PolicyIdentity
from models.router.router import RouteDecision
from models.serving.gateway.conversations import Routed
from models.serving.gateway.traffic_log import Feedback, LoggedTurn, TrafficLog
from models.serving.openai_api.requests import ChatRequest
from models.serving.upstreams.contract import Turn, TurnResult

DECISION = RouteDecision("", {"": 1.0}, (), 0.0, "retrieval")


class Answering:
    """A gateway's log, and the one conversation that is stored."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log = TrafficLog(store, PolicyIdentity("tiny", "1"), "shop", 1.0, lambda _: None)

    def row(self) -> ConversationRow:
        (row,) = self.store.rows(ConversationRow)
        return row

    def answered(self, release: int, *messages: str, router: str = "router") -> int | None:
        """A release has answered these messages, of the user and of itself in turn; the row's release."""
        said = [{"role": "user" if i % 2 == 0 else "assistant", "content": m} for i, m in enumerate(messages)]
        heard = TurnResult({"role": "assistant", "content": "Done."})
        turn = Turn(ChatRequest("trace", True, {}, said), None, "base", "c", None, True, heard)
        self.log.add(LoggedTurn("", Routed("c", DECISION, router, release), turn, 0.5))
        self.log.flush()
        return self.row().release

    def judged(self, success: bool) -> None:
        asyncio.run(self.log.say("", Feedback("c", success=success)))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Answering]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        answering = Answering(store)
        yield answering
        answering.log.close()


def test_a_conversation_is_the_releases_that_answered_all_of_it(gateway: Answering) -> None:
    answered = gateway.answered
    assert [answered(3, "a"), answered(3, "a", "Done.", "b")] == [3, 3]
    assert answered(4, "a") == 4, "its client has gone back to the beginning"
    gateway.judged(success=True)
    assert gateway.row().release == 4
    assert answered(0, "a", "Done.", "b") == SEVERAL, "what was said of release 4 is not said of the base"
    assert answered(0, "a", "Done.", "b", "Done.", "c") == SEVERAL
    assert answered(0, "a") == 0
    assert answered(5, "a", router="always") == 5
    assert answered(5, "a", "Done.", "b") == SEVERAL, "the first turn is that of a gateway with a router of its own"
    assert answered(6, "x") == 6, "a client that gives its id to one conversation after the other"
    gateway.judged(success=True)
    assert (gateway.row().release, gateway.row().turns, gateway.row().success) == (6, 1, True)
    assert answered(7, "b", "Said elsewhere.", "c") == SEVERAL, "who answered before is not known"


def test_feedback_whose_words_were_removed_is_about_no_others(gateway: Answering) -> None:
    """A client that gives its user's id to one conversation after the other."""
    gateway.answered(3, "a")
    gateway.judged(success=False)
    assert gateway.row().success is False
    assert gateway.store.forget_conversations(utc_now() + timedelta(days=1)) == (0, 1)
    gateway.answered(3, "b")
    row = gateway.row()
    assert (row.messages[0]["content"], row.success, row.reward) == ("b", None, None)


def test_a_comment_on_a_conversation_whose_words_were_removed_goes_as_they_did(gateway: Answering) -> None:
    gateway.answered(3, "a")
    gateway.judged(success=False)
    later = utc_now() + timedelta(days=1)
    assert gateway.store.forget_conversations(later) == (0, 1)
    asyncio.run(gateway.log.say("", Feedback("c", success=False, comment="I am Anna Smith")))
    assert (gateway.row().conversation, gateway.row().comment) == ("", "I am Anna Smith")
    assert gateway.store.forget_conversations(later) == (0, 1)
    assert (gateway.row().success, gateway.row().comment) == (False, "")
    assert gateway.store.forget_conversations(later) == (0, 0)
