"""A router from examples: its mode, and what says beforehand how often it is right.

Linear where the successes of every class are known: each example is left out once, and what is expected of it without
it says how often the router is right. Where a mode or the probability below which it abstains is chosen, a share of the
examples is kept out of the votes for it; what is told of such a router is its share right on these.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from environments.contract import content_hash
from models.router.label_prompt import Candidate
from models.router.regression import share_right
from models.router.router import Router
from models.router.validation import accuracy, calibrated, choose_mode
from tasks.round.context import Context
from tasks.routing.examples import Example

logger = logging.getLogger("trace")

# How many neighbours vote: 5 were right on 92 to 94 % of the validation tasks that need an adapter (three rounds of the
# shop), 9 on 93 to 95 %, 15 on 95 to 97 %. No more than the smallest class has, or the others would outvote it.
FEWEST, MOST = 5, 15
# Share of the examples that mode and threshold are chosen on.
CALIBRATION_SHARE = 0.25
# Fewest tasks that a class has to have played, for a regression to be trusted with it.
LEAST_PLAYED = 16


@dataclass(frozen=True)
class Fitted:
    """The router, how many examples it was fitted on, and the share of `judged` ones that it sends right (None
    where there is none). Of a linear one each is judged without itself, of those that something solves. Else they are
    those kept out, on which its mode and threshold were chosen as well, and whose labels come from the tasks around
    them, which are those that vote: the share is too high, 89 % in 20 simulated families of eight tasks where no class
    is better than another."""

    router: Router
    examples: int
    judged: int = 0
    right: float | None = None


def kept_out(trajectory_id: str) -> bool:
    """Whether a trajectory is of the share that thresholds are fitted on, decided by its id alone."""
    return int(content_hash(trajectory_id), 16) % 1000 < 1000 * CALIBRATION_SHARE


def fitted(
    context: Context,
    examples: Sequence[Example],
    unlike: str,
    insisted: Collection[str] = (),
    definitions: Mapping[str, str] = MappingProxyType({}),
) -> Fitted:
    """The router of `settings.router`. `unlike` answers what is like none of the examples; `insisted` are examples that
    count many times, as their label says; `definitions` of capabilities are what the base reads where it reads labels.
    A linear router needs diagnosis tasks that each class has played; without them neighbours vote."""
    mode: str = context.settings.router
    if mode == "linear":
        found = _linear(examples, insisted, definitions)
        if found:
            return replace(found, router=replace(found.router, unlike=unlike))
        logger.warning(
            "some of what the router chooses among has played fewer than %d diagnosis tasks: neighbours vote instead",
            LEAST_PLAYED,
        )
        mode = "retrieval"
    labelled = [e for e in examples if e.label is not None]
    out = {e.id for e in labelled if kept_out(e.id)} - set(insisted)
    used, held = [e for e in labelled if e.id not in out], [e for e in labelled if e.id in out]
    if len({e.label for e in used}) < len({e.label for e in labelled}):
        logger.info("%d examples are too few to keep a share out: the router's threshold is not fitted", len(labelled))
        used, held = labelled, []
    base = context.base
    router = _voting(used, insisted, definitions)
    rows = [(e.opening, str(e.label)) for e in held]
    if mode == "auto":
        mode = choose_mode(router, base.policy, base.renderer, rows).mode if rows else "retrieval"
    router = replace(calibrated(router.with_mode(mode), base.policy, base.renderer, rows), unlike=unlike)
    if not held:
        return Fitted(router, len(used))
    decisions = router.route(base.policy, base.renderer, [e.opening for e in held])
    return Fitted(router, len(used), len(held), accuracy(decisions, [label for _, label in rows]))


def _voting(examples: Sequence[Example], insisted: Collection[str], definitions: Mapping[str, str]) -> Router:
    """A router by the votes of examples with labels. It knows the definitions of its classes in every mode: a gateway
    may read labels with a router that was fitted for another."""
    labels = [str(e.label) for e in examples]
    smallest = min(Counter(e.label for e in examples if e.id not in insisted).values(), default=FEWEST)
    near = max(FEWEST, min(MOST, smallest))
    vectors = np.stack([e.vector for e in examples])
    router = Router.fit(vectors, labels, [e.id for e in examples], near).insisting(insisted)
    # On one line each, as the label prompt lists them.
    return router.described(
        [Candidate(c, " ".join(definitions[c].split())) for c in router.classes if c in definitions]
    )


def _linear(examples: Sequence[Example], insisted: Collection[str], definitions: Mapping[str, str]) -> Fitted | None:
    """A router by expected success, None where some class has played too few examples. An insisted example is solved
    by its label and by nothing else; that is no play, and what was played of it stays one, so that what is insisted on
    does not make one kind of router of another."""
    voting = _voting([e for e in examples if e.label is not None], insisted, definitions)
    if min(sum(c in e.successes for e in examples) for c in voting.classes) < LEAST_PLAYED:
        return None
    shown = [e for e in examples if e.successes or e.id in insisted]
    told = [{str(e.label): 1.0} if e.id in insisted else e.successes for e in shown]
    rest = [0.0 if e.id in insisted else np.nan for e in shown]
    successes = np.array([[t.get(c, r) for c in voting.classes] for t, r in zip(told, rest, strict=True)])
    weights = [float(voting.neighbours) if e.id in insisted else 1.0 for e in shown]
    vectors = np.stack([e.vector for e in shown])
    router, left_out = voting.expecting(vectors, successes, weights)
    judged, right = share_right(left_out, successes)
    return Fitted(router, len(shown), judged, right)
