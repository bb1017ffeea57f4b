"""The target `traffic`: conversations of the gateway that users gave feedback on, as diagnosis data of a round.

They were played already, by users: a round on them imports instead of rolling out, contrasts and selects. They cannot
be played again, so there is nothing to synthesize from, to train on or to evaluate with: what is found lacking is
trained in a round on the target that the gateway serves.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from db import CheckRow, ConversationRow, Round, StepRow, Store, TrajectoryRow, open_store, row_id
from db.copies import sqlite_file
from db.rows.conversations import TRAFFIC
from environments.contract import Message, Prompt, Target, TargetTask, Termination, content_hash
from environments.targets.catalogue import load_target
from environments.targets.third_party.adapter import TargetInfo
from environments.targets.third_party.simulated_user import UserModel
from errors import ConfigurationError, TargetError
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import to_messages
from settings import load_settings

logger = logging.getLogger("trace")

NOTHING_SAID = "no conversation has feedback that says success or a reward"
STAGES = ("rollout", "contrast", "select")
ANSWERED = "answer_user_request"


class TrafficTarget:
    """`Target` over stored conversations with feedback; their tasks are diagnosis tasks, there is no other split."""

    name = TRAFFIC
    licence = "your users'"

    def __init__(self, store: Store) -> None:
        # Those that say whether they were a success: only from them can be learnt, and few of all are.
        # 'trace-agent clean' may have left of one that alone.
        said = [row for row in store.rows(ConversationRow, success=[True, False]) if row.messages]
        self.conversations = [row for row in said if _readable(row)]
        # Changes with every conversation, turn and word of feedback; also where a turn was asked and answered again.
        self.data_hash = content_hash([[r.id, r.messages, r.success, r.reward] for r in self.conversations])

    def tasks(self, split: str) -> Sequence[TargetTask]:
        if split != "diagnosis":
            return []
        return [TargetTask(r.id, split, family(r), 0) for r in self.conversations]

    @cached_property
    def prompt(self) -> Prompt:
        """What the agent had before it, as far as it is stored: the first system message that one of the conversations
        begins with, and the names of all tools."""
        first = [row.messages[0] for row in self.conversations]
        said = (str(m.get("content") or "") for m in first if m["role"] == "system")
        names = dict.fromkeys(name for row in self.conversations for name in row.tools)
        return Prompt(next(said, ""), tuple({"type": "function", "function": {"name": name}} for name in names))

    def environment(self) -> Any:
        raise TargetError(
            "conversations of users cannot be played again; improve on the target that the gateway serves, and use "
            f"'trace-agent stage select --target {TRAFFIC}' to see what they lack"
        )


def family(row: ConversationRow) -> str:
    """What conversations are grouped by: the capability that they were routed to."""
    return row.capability or "base"


def check_stage(target: str, stage: str) -> None:
    """Raises `ConfigurationError` for what cannot be done with conversations that were played already."""
    if target == TRAFFIC and stage not in STAGES:
        raise ConfigurationError(
            f"{stage} needs tasks that can be played, and conversations of users cannot; on target {TRAFFIC!r} there "
            f"are the stages {', '.join(STAGES)}: train what they show to be lacking in a round on the target served"
        )


def import_conversations(store: Store, current: Round, target: TrafficTarget) -> list[str]:
    """Ids of the round's trajectories; stored when they are not yet, all or none. Feedback that comes later is another
    round's. Raises `TargetError` where there is none."""
    stored = store.trajectory_frame(current.id, purpose="diagnosis")
    if not stored.empty:
        return sorted(stored["id"])
    rows = [trajectory_of(row, current) for row in target.conversations]
    if not rows:
        raise TargetError(f"{NOTHING_SAID}; POST /v1/feedback gives it")
    # In one transaction: a round that finds some of them stored takes these for all.
    store.add_trajectories(rows)
    return sorted(row.id for row in rows)


def messages_of(row: ConversationRow) -> list[Message]:
    """What was said in a conversation. Raises `ApiError` where a server took what this project cannot read: images, or
    calls whose arguments are not JSON."""
    return to_messages([{**m, "content": m.get("content") or ""} for m in row.messages])


def _readable(row: ConversationRow) -> bool:
    """Whether a round can learn from the conversation; the log says why not."""
    try:
        messages_of(row)
    except ApiError as problem:
        logger.warning("conversation %s is left out of %s: %s", row.conversation, TRAFFIC, problem)
        return False
    return True


def trajectory_of(row: ConversationRow, current: Round) -> TrajectoryRow:
    """A stored conversation as a trajectory. It has no token ids: a client may have changed what was sampled."""
    messages = messages_of(row)
    return TrajectoryRow(
        id=row_id(TRAFFIC, current.id, row.id),
        round_id=current.id,
        purpose="diagnosis",
        target=TRAFFIC,
        data_hash=current.data_hash,
        environment=row.target,
        task_id=row.id,
        family=family(row),
        split="diagnosis",
        seed=0,
        trial=0,
        policy_id=row.policy_id,
        base=row.base,
        termination=str(Termination.DONE),
        reward=row.reward,
        success=row.success,
        adapter_id=row.adapter or None,
        prompt_tokens=row.prompt_tokens,
        sampled_tokens=row.sampled_tokens,
        seconds=row.seconds,
        messages=[m.as_dict() for m in messages],
        steps=_steps(messages),
        checks=checks_of(row, messages),
    )


def _steps(messages: Sequence[Message]) -> list[StepRow]:
    """One step an assistant's turn, with what followed it."""
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    ends = [*turns[1:], len(messages)]
    return [
        StepRow(messages[i].as_dict(), [m.as_dict() for m in messages[i + 1 : end]])
        for i, end in zip(turns, ends, strict=True)
    ]


def checks_of(row: ConversationRow, messages: Sequence[Message]) -> list[CheckRow]:
    """What a program sees of a conversation: which tools were called and did not answer with an error, whether the user
    was answered in words; and whether the capability that it was routed to succeeded, as the feedback says."""
    names = {call.id: call.name for m in messages for call in m.tool_calls}
    failed: dict[str, bool] = dict.fromkeys(names.values(), False)
    for message in messages:
        if message.role == "tool" and (name := names.get(message.tool_call_id)):
            failed[name] |= _is_error(message.content)
    checks = [CheckRow(f"tool:{n}", f"call_{_snake(n)}", True, not bad, n) for n, bad in sorted(failed.items())]
    last = messages[-1]
    answered = last.role == "assistant" and bool(last.content.strip())
    checks.append(CheckRow("answered", ANSWERED, True, answered, row.comment))
    if row.capability:
        checks.append(CheckRow("routed", row.capability, True, bool(row.success), row.comment))
    return checks


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name).lower().strip("_")
    return "_".join(words.split("_")[:4])


def _is_error(text: str) -> bool:
    """Whether a tool's result says that the call failed."""
    if text.lstrip().lower().startswith("error"):
        return True
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and bool(value.get("error"))


def target_named(name: str, store: Store, user: str, user_model: UserModel | None) -> Target:
    """A target by name, with its simulated user; `traffic` is what the store has of users."""
    return TrafficTarget(store) if name == TRAFFIC else load_target(name, user, user_model)


def describe_traffic(home: Path | None) -> list[TargetInfo]:
    """A line for the target `traffic` when users gave feedback; nothing is created to find out."""
    settings = load_settings(home=home)
    file = sqlite_file(settings.database_url)
    if file is not None and not file.is_file():
        return []
    with open_store(settings.database_url) as store:
        target = TrafficTarget(store)
        count = len(target.conversations)
        return [TargetInfo(TRAFFIC, target.licence, {"diagnosis": count}, target.data_hash)] if count else []
