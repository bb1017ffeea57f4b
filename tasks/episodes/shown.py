"""One episode as it is shown to people: its turns as short texts, without secrets, however long it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from db import TrajectoryRow

# What is shown of one episode: turns (half from its beginning, half from its end), characters of each text, and checks
# (those that failed first).
MOST_TURNS, MOST_CHARACTERS = 24, 600
MOST_CHECKS = 20
# Takes what nobody may read out of a text.
Hide = Callable[[str], str]


@dataclass(frozen=True)
class ShownTurn:
    """One message: who speaks (`user`, `assistant`, `tool`, ...), the words, and the calls as `name(a=1)`."""

    role: str
    text: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShownCheck:
    """One verdict of the verifier; `kind` is the capability that it speaks of."""

    name: str
    kind: str
    required: bool
    passed: bool
    detail: str


@dataclass(frozen=True)
class ShownEpisode:
    """One episode, cut to size. `title` says what played, or which trial it is; `note` anything else worth a word.
    `left_out` counts turns that are not shown, `checks_left_out` checks. `reward` and `success` are None for one lost
    to the infrastructure, which `error` then tells. `seconds` is wall time, `tokens` what the policy sampled."""

    id: str
    title: str
    reward: float | None
    success: bool | None
    termination: str
    turns: tuple[ShownTurn, ...]
    checks: tuple[ShownCheck, ...]
    left_out: int = 0
    checks_left_out: int = 0
    error: str = ""
    note: str = ""
    tokens: int = 0
    seconds: float = 0.0


def shown_episode(row: TrajectoryRow, hide: Hide, title: str = "", note: str = "") -> ShownEpisode:
    """A stored trajectory, cut to size."""
    turns = [_turn(message, hide) for message in row.messages]
    over = max(0, len(turns) - MOST_TURNS)
    if over:
        turns = turns[: MOST_TURNS // 2] + turns[-(MOST_TURNS // 2) :]
    checks = [
        ShownCheck(c.name, c.kind, c.required, c.passed, cut(hide(c.detail), MOST_CHARACTERS // 3))
        # What failed is what a reader looks for.
        for c in sorted(row.checks, key=lambda c: (c.passed or not c.required, c.name))[:MOST_CHECKS]
    ]
    return ShownEpisode(
        id=row.id,
        title=title or f"trial {row.trial + 1}",
        reward=row.reward,
        success=row.success,
        termination=row.termination,
        turns=tuple(turns),
        checks=tuple(checks),
        left_out=over,
        checks_left_out=len(row.checks) - len(checks),
        error=cut(hide(f"{row.error_boundary}: {row.error}"), MOST_CHARACTERS) if row.error_boundary else "",
        note=note,
        tokens=row.sampled_tokens,
        seconds=row.seconds,
    )


def cut(text: str, most: int) -> str:
    """The text, or its beginning and how much more there is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _turn(message: Mapping[str, Any], hide: Hide) -> ShownTurn:
    calls = tuple(cut(hide(_call(call)), MOST_CHARACTERS) for call in message.get("tool_calls") or ())
    return ShownTurn(str(message.get("role", "")), cut(hide(_words(message.get("content"))), MOST_CHARACTERS), calls)


def _words(content: Any) -> str:
    """A message's content as text; parts of another kind are shown as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False, default=str)


def _call(call: Mapping[str, Any]) -> str:
    given: Any = call.get("arguments", {})
    if not isinstance(given, Mapping):
        return f"{call.get('name', '')}({given})"
    return f"{call.get('name', '')}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in given.items())})"


def evenly(count: int, most: int) -> Sequence[int]:
    """At most `most` of the places 0 to `count` - 1, at equal distances, the first and the last among them."""
    if count <= most:
        return range(count)
    if most < 2:
        return range(min(count, most))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
