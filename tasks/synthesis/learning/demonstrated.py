"""Reference solutions of new scenarios, as conversations to learn from (behaviour cloning; Pomerleau, 1989).

They are what the author of an environment knows, not what an agent has found: no policy plays, so they cost no episode,
and they teach what the base never does, which leaves nothing to reinforce. What is drawn here no training, calibration
or evaluation draws.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping

from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import solved
from errors import Untrainable
from models.local.base import BaseModel
from models.renderer import Conversation
from tasks.round.target_prompt import prompt_of_task

logger = logging.getLogger("trace")


def demonstrations(environment: ComposedEnvironment, base: BaseModel, wanted: Mapping[str, int]) -> list[Conversation]:
    """So many different reference solutions of each family as are `wanted`, those that the target's verdict calls a
    success, each behind the prompt that its scenario is played behind; fewer where a family has no more.

    What is longer than the base's context is left out with a warning: no policy could sample it, and others are drawn
    for it. Raises `Untrainable` where nothing else is left."""
    found, most = list[Conversation](), base.policy.context
    longer: dict[tuple[int, ...], str] = {}
    for family, count in wanted.items():
        different: dict[tuple[int, ...], Conversation] = {}
        for place in range(2 * count):
            rng = random.Random(f"{environment.spec.id}:demonstrated:{family}:{place}")
            task = environment.drawn(family, rng)
            if len(different) == count:
                break
            if messages := solved(environment.target.environment(), task):
                made = base.renderer.demonstration(prompt_of_task(environment.target, task), messages)
                if len(made.ids) > most:
                    longer[tuple(made.ids)] = family
                else:
                    different.setdefault(tuple(made.ids), made)
        found += different.values()
    if longer:
        limit = f"longer than the base's context of {most} tokens (up to {max(map(len, longer))})"
        if not found:
            raise Untrainable(f"all {len(longer)} reference solutions are {limit}; take a base with a longer context")
        of = ", ".join(f"{n} of {family}" for family, n in Counter(longer.values()).items())
        logger.warning("%d of %d reference solutions are %s and are not learnt from: %s",
                       len(longer), len(longer) + len(found), limit, of)  # fmt: skip
    return found
