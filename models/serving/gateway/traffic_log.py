"""Conversations that the gateway stores, and what people say of them.

Writing happens in a thread of its own, so that no answer waits for the database. Where that is away for a while, what
is to be stored waits for it. When it cannot keep up, conversations are dropped and counted, and feedback is refused:
serving goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection

from db import ConversationRow, Store, row_id
from db.queries import rows
from db.rows.conversations import SEVERAL
from db.values.types import utc_now
from db.writes import put_rows
from errors import StoreError
from models.policy import PolicyIdentity
from models.serving.gateway.conversations import Routed, words_of
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import ROLES
from models.serving.upstreams.contract import Turn

logger = logging.getLogger("trace.gateway")
# The most turns that wait to be stored, and bytes of their requests: while a database hangs, large ones would take the
# memory of the answers.
WAITING, WAITING_BYTES = 1000, 256 << 20
LONGEST_COMMENT = 4000
# From which reward on a conversation is a success where its client says no more than that.
SUCCESS_REWARD = 0.5
# Seconds after which a turn is tried again that a database did not take which is away, or held by others.
AGAIN = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
# How long a client waits for its feedback to be kept, and a gateway that ends for conversations to be stored.
SAY_SECONDS, CLOSE_SECONDS = 5.0, 30.0


@dataclass(frozen=True)
class LoggedTurn:
    """One answered turn of a conversation."""

    owner: str
    routed: Routed
    turn: Turn
    seconds: float


@dataclass(frozen=True)
class Feedback:
    """Feedback on a conversation: at least one of the three fields. `reward` lies in [0, 1]."""

    conversation: str
    reward: float | None = None
    success: bool | None = None
    comment: str = ""


@dataclass(frozen=True)
class _Said:
    """Feedback that a client waits for to be kept."""

    owner: str
    feedback: Feedback
    kept: Future[dict[str, Any]] = field(default_factory=Future)


class TrafficLog:
    """`sample` is the share of conversations that is stored, by their name: a conversation is stored whole or not."""

    def __init__(
        self, store: Store, identity: PolicyIdentity, target: str, sample: float, count: Callable[[str], None]
    ) -> None:
        self._store, self._identity, self._target, self._sample, self._count = store, identity, target, sample, count
        self._queue: queue.Queue[LoggedTurn | _Said | threading.Event | None] = queue.Queue(WAITING)
        self._added = self._taken = 0  # bytes of requests; each is counted by one thread alone
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic log", daemon=True)
        self._thread.start()

    def wants(self, conversation: str) -> bool:
        """Whether a conversation is one of the sample."""
        return zlib.crc32(conversation.encode()) < self._sample * 2**32

    def add(self, spoken: LoggedTurn) -> None:
        """Have an answered turn stored, unless too much waits for that already."""
        size = spoken.turn.asked.size
        try:
            if self._added - self._taken + size > WAITING_BYTES:
                raise queue.Full
            self._queue.put_nowait(spoken)
            self._added += size
        except queue.Full:
            self._count("dropped")

    def flush(self) -> None:
        """Wait until what was added so far is stored."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Store what waits, and end. What a database that hangs has not taken by then is lost."""
        self._ending.set()  # nothing is tried again from now on
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the database does not answer: conversations that wait for it are lost")

    async def say(self, owner: str, feedback: Feedback) -> dict[str, Any]:
        """Keep feedback on a stored conversation of the same owner; the latest word counts. Raises `ApiError` (404, and
        503 when the database does not answer in time)."""
        said = _Said(owner, feedback)
        try:
            # Behind the turns that were added before it, in the thread that writes them: however many wait, they hold
            # no thread that others need.
            self._queue.put_nowait(said)
            async with asyncio.timeout(SAY_SECONDS):
                return await asyncio.wrap_future(said.kept)
        except (queue.Full, TimeoutError):
            problem = "the database does not answer in time"
        except StoreError as failed:
            problem = str(failed)
        logger.error("feedback was not kept: %s", problem)
        raise ApiError(503, "the gateway's database does not answer; send the feedback again later", retry_after=30)

    def _hear(self, said: _Said) -> None:
        """Keep feedback, unless nobody waits for it any more; what is raised is its client's."""
        if not said.kept.set_running_or_notify_cancel():
            return
        try:
            # A row is written whole: between reading and writing it no other gateway may write it.
            with self._store.transaction() as connection:
                kept = self._say(connection, said.owner, said.feedback)
        except Exception as problem:
            said.kept.set_exception(problem)
        else:
            said.kept.set_result(kept)

    def _say(self, connection: Connection, owner: str, feedback: Feedback) -> dict[str, Any]:
        row = self._kept(connection, owner, feedback.conversation)[1]
        # A client may tell any gateway of this home.
        row = row or _stored(connection, conversation_id(owner, feedback.conversation))
        if row is None:
            raise ApiError(
                404,
                f"conversation {feedback.conversation[:128]!r} is not stored (of all conversations {self._sample:.0%} "
                "are); give the id of the header x-trace-conversation",
                code="conversation_not_found",
                param="conversation",
            )
        said = _merged(row, feedback)
        put_rows(connection, [replace(row, **said, feedback_at=utc_now())], replace=True)
        return {"conversation": feedback.conversation, **said}

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, _Said):
                self._hear(item)
                continue
            try:
                self._store_turn(item)
                self._count("stored")
            except StoreError as problem:
                self._count("dropped")
                logger.error("a conversation was not stored: %s", problem)
            except Exception:  # if this thread ended, clients that give feedback would wait for ever
                self._count("dropped")
                logger.exception("a conversation was not stored")
            self._taken += item.turn.asked.size

    def _store_turn(self, spoken: LoggedTurn) -> None:
        """Store a turn as soon as the database takes it. Raises `StoreError` where it does not, or not for minutes."""
        for pause in (*AGAIN, None):
            try:
                with self._store.transaction() as connection:  # for the reason given in `_hear`
                    self._keep(connection, spoken)
                return
            except StoreError as problem:
                if not problem.transient or pause is None or self._ending.is_set():
                    raise
                if pause == AGAIN[0]:
                    logger.warning("conversations wait to be stored: %s", problem)
                self._ending.wait(pause)

    def _keep(self, connection: Connection, spoken: LoggedTurn) -> None:
        routed, turn, asked = spoken.routed, spoken.turn, spoken.turn.asked
        decision, adapter = routed.decision, turn.adapter
        said = [dict(m) | {"role": ROLES[m["role"]]} for m in asked.messages]
        if not asked.chat:
            said = [{"role": "user", "content": asked.prompt if isinstance(asked.prompt, str) else ""}]
        messages = [*said, turn.heard.message]
        key, before = self._kept(connection, spoken.owner, routed.name)
        # Feedback stays when the conversation goes on. Where something else stands at its beginning now, as when a turn
        # is asked again and answered otherwise, it was about what is no longer there.
        # Of one whose words were removed (`trace-agent clean`) nobody knows how it began.
        goes_on = before is not None and 0 < len(before.messages) == _alike(before.messages, messages)
        judged = before if goes_on else None
        turns = before.turns if before else 0
        same = _alike(before.messages, said) if before else 0
        # Asked again, or another conversation under the same id: what is stored and not said any more was answered to
        # something else. Nobody knows who gave answers that are said and not stored.
        if before and not _answers(said[same:]):
            turns = max(0, turns - _answers(before.messages[same:]))
        by = (routed.release, routed.router)
        alone = not turns or (before is not None and (before.release, before.router_version) == by)
        prompt = turn.prompt
        row = ConversationRow(
            id=key,
            conversation=routed.name,
            target=self._target,
            base=self._identity.base,
            policy_id=self._identity.id,
            capability=decision.capability,
            adapter=adapter.name if adapter else "",
            mode=decision.mode,
            release=routed.release if alone else SEVERAL,
            router_version=routed.router,
            probabilities={k or "none": v for k, v in decision.probabilities.items()},
            routing_milliseconds=decision.milliseconds,
            messages=messages,
            tools=[t["function"]["name"] for t in (asked.tools or (prompt.tools if prompt else ()))],
            turns=turns + 1,
            prompt_tokens=turn.heard.usage.prompt + (before.prompt_tokens if before else 0),
            sampled_tokens=turn.heard.usage.completion + (before.sampled_tokens if before else 0),
            seconds=spoken.seconds + (before.seconds if before else 0.0),
            reward=judged.reward if judged else None,
            success=judged.success if judged else None,
            comment=judged.comment if judged else "",
            feedback_at=judged.feedback_at if judged else None,
        )
        put_rows(connection, [row], replace=True)

    def _kept(self, connection: Connection, owner: str, name: str) -> tuple[str, ConversationRow | None]:
        """The key of a conversation with this target, and what is stored of it. A client may give its id for one to the
        gateways of several targets: what was said to another one stays its own."""
        apart, plain = conversation_id(owner, name, self._target), conversation_id(owner, name)
        if (found := _stored(connection, apart)) is not None:
            return apart, found
        found = _stored(connection, plain)
        return (plain, found) if found is None or found.target == self._target else (apart, None)


def _merged(row: ConversationRow, feedback: Feedback) -> dict[str, Any]:
    """What is said of a conversation, with the latest word. Of reward and success, one that follows from the other
    follows again when that is said anew: else whoever takes a reward back would leave the success that it made."""
    reward, success = feedback.reward, feedback.success
    if reward is None and success is None:
        reward, success = row.reward, row.success
    elif reward is None:
        followed = row.reward is None or row.reward == float(bool(row.success))
        reward = float(bool(success)) if followed else row.reward
    elif success is None:
        followed = row.reward is None or row.success == (row.reward >= SUCCESS_REWARD)
        success = reward >= SUCCESS_REWARD if followed else row.success
    return {"reward": reward, "success": success, "comment": feedback.comment or row.comment}


def _stored(connection: Connection, key: str) -> ConversationRow | None:
    return next(iter(rows(connection, ConversationRow, {"id": key})), None)


def _alike(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages both begin with, as a client sends these."""
    pairs = zip(before, messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: words_of(pair[0]) == words_of(pair[1]), pairs))


def _answers(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(words_of(message)[0] == "assistant" for message in messages)


def conversation_id(owner: str, conversation: str, *target: str) -> str:
    """The key of a stored conversation: owners cannot speak of one another's. With the `target` where another one's has
    the id already."""
    return row_id("conversation", owner, conversation, *target)


def parse_feedback(body: dict[str, Any]) -> Feedback:
    """Feedback from a request's body. Raises `ApiError` (400)."""
    conversation, reward, success = body.get("conversation"), body.get("reward"), body.get("success")
    comment = body.get("comment")
    if not isinstance(conversation, str) or not conversation:
        raise ApiError(400, "conversation must be the id of the header x-trace-conversation", param="conversation")
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if reward is not None and not (number and 0 <= reward <= 1):
        raise ApiError(400, f"reward is {reward!r:.40}; give a number from 0 to 1", param="reward")
    if success is not None and not isinstance(success, bool):
        raise ApiError(400, f"success is {success!r:.40}; give true or false", param="success")
    if comment is not None and (not isinstance(comment, str) or len(comment) > LONGEST_COMMENT):
        raise ApiError(400, f"comment must be a text of at most {LONGEST_COMMENT} characters", param="comment")
    if reward is None and success is None and not comment:
        raise ApiError(400, "feedback needs reward, success or comment")
    return Feedback(conversation, None if reward is None else float(reward), success, comment or "")
