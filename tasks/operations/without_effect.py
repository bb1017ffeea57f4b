"""Settings that have no effect because of another one, or with the target: said before a round begins, and in its dry
run.

    train.practice = 8 has no effect in the round: a generalist practises where it is made first, from ...

No profile has such a setting by itself: where its value is named, it was another setting that left it without effect.
What a comparison's ablation takes away on purpose is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from db import GENERALIST, ReleaseRow
from environments.contract import Target
from settings import SCRIPTED_USER, Settings
from tasks.measuring.lineup import members_of

# How the names of the methods begin that play rounds of their own.
ROUNDS = ("trace", "placebo", "ablation")


def without_effect(settings: Settings, live: ReleaseRow | None = None) -> list[str]:
    """A sentence for each train setting that is set and changes nothing in a round which goes on from the release
    `live` (None: the bare base)."""
    t, written = settings.train, settings.synthesizer.kind == "llm"
    unmade = "" if t.generalist else "with train.generalist = 0 no generalist is made"
    if written:
        unmade = unmade or "no generalist is made of environments that a model writes (synthesizer.kind = 'llm')"
    advised = "" if t.hints else "with train.hints = 0 there is no advice to show anything with"
    last = "a generalist practises where it is made first, from train.demonstrations or, with train.hints, train.shown"
    # A champion is gone on from for its own capability, and what learns from successes begins from zero.
    champions = {name for name, adapter in members_of(live).items() if adapter}
    first = t.generalist_first and not unmade and GENERALIST not in champions
    begins = t.carry or first or champions - {GENERALIST}
    alone = "nothing goes on from an adapter (train.carry = false, no generalist comes first, no champion is live)"
    composed = "families are drawn so where environments are composed (synthesizer.kind = 'llm' has them written)"
    reasons = {
        "generalist": unmade,
        "demonstrations": unmade,
        "shown": unmade or advised,
        "practice": unmade or ("" if t.generalist_first else last),
        "recall_rate": unmade,
        "recall_steps": unmade,
        "carry_rate": "" if begins else alone,
        "focus": composed if written else "",
    }
    return [
        f"train.{name} = {json.dumps(getattr(t, name))} has no effect in the round: {reason}"
        for name, reason in reasons.items()
        if reason and getattr(t, name)
    ]


def user_without_effect(settings: Settings, target: Target) -> list[str]:
    """A sentence where `target_user` is set, and the target is not told who plays its users."""
    user, own = settings.target_user, getattr(target, "user", None)
    if user in (SCRIPTED_USER, own):
        return []
    played = f"has a user of its own, {own!r}" if own else "has no simulated user to choose"
    return [f"target_user = {json.dumps(user)} has no effect in the round: {settings.target} {played}"]


def without_effect_in(settings: Settings, methods: Sequence[str]) -> list[str]:
    """What `without_effect` says of the rounds of a comparison of `methods`, each from the bare base; nothing where
    none of them plays one."""
    return without_effect(settings) if any(name.startswith(ROUNDS) for name in methods) else []
