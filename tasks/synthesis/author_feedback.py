"""Calibration as the author of an environment is told of it: the band before, three typical episodes after."""

from __future__ import annotations

from typing import Any

import pandas as pd

from db import Store
from settings_parts import CalibrationSettings


def typical_episodes(
    store: Store, frame: pd.DataFrame, player: str = "the agent that will train"
) -> tuple[dict[str, Any], ...]:
    """The worst, the median and the best episode of `frame` (of `outcomes`) by reward: name, reward, success, checks
    and messages, without the prompt. Fewer where there are fewer episodes; `player` says who played them."""
    order = list(frame.sort_values(["reward", "success", "id"])["id"])
    places = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    chosen: dict[str, str] = {}
    for name, identity in places.items():
        chosen.setdefault(identity, name)
    messages = {row.id: row.messages for row in store.trajectories(None, id=list(chosen))}
    by_id = frame.set_index("id")
    shown = []
    for identity, name in chosen.items():
        checks = store.check_frame(None, id=identity)[["name", "required", "passed", "detail"]]
        shown.append(
            {
                "name": f"{player}, {name} episode",
                "reward": float(by_id["reward"][identity]),
                "success": bool(by_id["success"][identity]),
                "checks": [
                    {
                        "name": str(c.name),
                        "required": bool(c.required),
                        "passed": bool(c.passed),
                        "detail": str(c.detail),
                    }
                    for c in checks.head(20).itertuples(index=False)
                ],
                "messages": [m for m in messages[identity] if m["role"] != "system"],
            }
        )
    return tuple(shown)


def band_text(s: CalibrationSettings) -> str:
    """What `calibration.judge` asks of the figures, in words for the author of an environment."""
    text = (
        f"The agent that will train plays {s.seeds} scenarios {s.samples} times each behind the target's own prompt, "
        "at one level after another: one of yours has to fit, and you are asked again only when none does. There its "
        f"mean reward and its success rate must each lie in [{s.low:g}, {s.high:g}], and the standard deviation of "
        f"its rewards be at least {s.spread:g}. At most {s.uniform:.0%} of the scenarios may be solved in all their "
        f"episodes, and at most {s.uniform:.0%} earn nothing in any; in at least {s.informative:.0%} the episodes must "
        "differ in reward. A level that is too hard is made easier around the capability (shorter requests, "
        "fewer records, fewer other steps), never by letting an agent without it succeed."
    )
    if s.informative_alone:
        text += (
            f" Success below {s.low:g}, but not 0, is accepted as long as the share of scenarios whose episodes differ "
            "and the spread are reached."
        )
    return text
