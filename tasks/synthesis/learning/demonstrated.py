"""Reference solutions of new scenarios, as conversations to learn from (behaviour cloning; Pomerleau, 1989).

They are what the author of an environment knows, not what an agent has found: no policy plays, so they cost no episode,
and they teach what the base never does, which leaves nothing to reinforce. What is drawn here no training, calibration
or evaluation draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from environments.contract import Prompt
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import solved
from models.renderer import Conversation, Renderer


def demonstrations(
    environment: ComposedEnvironment, renderer: Renderer, prompt: Prompt, wanted: Mapping[str, int]
) -> list[Conversation]:
    """So many different reference solutions of each family as are `wanted`, those that the target's verdict calls a
    success, behind the target's own `prompt`; fewer where a family has no more."""
    found: list[Conversation] = []
    for family, count in wanted.items():
        different: dict[tuple[int, ...], Conversation] = {}
        for place in range(2 * count):
            rng = random.Random(f"{environment.spec.id}:demonstrated:{family}:{place}")
            task = environment.drawn(family, rng)
            if len(different) == count:
                break
            if messages := solved(environment.target.environment(), task):
                made = renderer.demonstration(prompt, messages)
                different.setdefault(tuple(made.ids), made)
        found += different.values()
    return found
