"""The figures of a policy in an environment, and one episode of it to show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from environments.contract import Environment, Message, TargetTask
from environments.validation.playing import Played, SimplePolicy, play_all

# Attacks send very long texts; what is shown of a message is enough to see what happened.
_SHOWN = 2000


def measured(
    environment: Environment, tasks: Sequence[TargetTask], policy: SimplePolicy
) -> tuple[dict[str, Any], list[Played]]:
    """(figures, JSON-able, with the interval that the sample leaves; the episodes) of a policy on `tasks`. Episodes
    that ended in a fault are in no rate; three of them end the measurement."""
    played = play_all(environment, tasks, policy)
    scores = [episode.score for episode in played if episode.score is not None]
    successes, wins = sum(score.success for score in scores), sum(episode.won for episode in played)
    errors = [episode.error for episode in played if episode.error]
    row = {
        "episodes": len(played),
        "errors": len(errors),
        "error": errors[0] if errors else "",
        "successes": successes,
        "success_rate": round(successes / len(scores), 4) if scores else 0.0,
        "interval": list(wilson_interval(successes, len(scores))),
        "win_rate": round(wins / len(scores), 4) if scores else 0.0,
        "mean_reward": round(sum(score.reward for score in scores) / len(scores), 4) if scores else 0.0,
        "mean_steps": round(sum(episode.steps for episode in played) / len(played), 2) if played else 0.0,
    }
    return row, played


def exhibit(played: Sequence[Played]) -> dict[str, Any]:
    """The episode that was paid best, JSON-able: reward, success, checks and messages; {} when none was scored."""
    scored = [(episode.score, episode) for episode in played if episode.score is not None]
    if not scored:
        return {}
    score, best = max(scored, key=lambda pair: (pair[0].success, pair[0].reward))
    return {
        "reward": float(score.reward),
        "success": score.success,
        "checks": [asdict(check) for check in score.checks[:20]],
        "messages": [_shortened(message) for message in best.messages],
    }


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """95 % Wilson score interval of a rate; (0, 1) without episodes."""
    if not episodes:
        return 0.0, 1.0
    z, rate = 1.959963984540054, successes / episodes
    middle = (rate + z * z / (2 * episodes)) / (1 + z * z / episodes)
    half = z * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2)) / (1 + z * z / episodes)
    return round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)


def _shortened(message: Message) -> dict[str, Any]:
    """The message as JSON, every text in it bounded and encodable."""
    calls = [{"name": call.name[:80], "arguments": _text(_json(call.arguments))} for call in message.tool_calls]
    shown: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    return shown | ({"tool_calls": calls} if calls else {})


def _json(arguments: Any) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False, default=str)


def _text(text: str) -> str:
    return text[:_SHOWN].encode("utf-8", "replace").decode()
