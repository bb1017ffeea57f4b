"""How well a router decides, and which mode it should decide by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from errors import ConfigurationError
from models.local.policy import LocalPolicy
from models.renderer import Renderer
from models.router.first_observation import Opening, embed_openings
from models.router.label_prompt import label_probabilities
from models.router.router import RouteDecision, Router

# How much more accurate than retrieval a mode with label probabilities must be on validation to be chosen.
MARGIN = 0.02
# Probabilities that are tried as the least that an adapter is chosen by.
CERTAIN = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class ModeChoice:
    """The mode chosen on validation, and every mode's accuracy there."""

    mode: str
    accuracies: dict[str, float]


def accuracy(decisions: Sequence[RouteDecision], truth: Sequence[str]) -> float:
    """Share of decisions whose capability is the true one. Raises `ConfigurationError` on none or unequal numbers."""
    _paired(decisions, truth)
    return sum(d.capability == t for d, t in zip(decisions, truth, strict=True)) / len(truth)


def confusion(decisions: Sequence[RouteDecision], truth: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Labels ("" last) and counts (labels, labels): true class by row, decided class by column."""
    _paired(decisions, truth)
    labels = tuple(sorted({*truth, *(d.capability for d in decisions)}, key=lambda name: (not name, name)))
    counts = np.zeros((len(labels), len(labels)), dtype=int)
    for decision, true in zip(decisions, truth, strict=True):
        counts[labels.index(true), labels.index(decision.capability)] += 1
    return labels, counts


def choose_mode(
    router: Router, policy: LocalPolicy, renderer: Renderer, rows: Sequence[tuple[Opening, str]], margin: float = MARGIN
) -> ModeChoice:
    """Retrieval, unless label probabilities earn their place on validation `rows` (opening, true class): another mode
    must be more accurate by over `margin`."""
    given, truth = [opening for opening, _ in rows], [label for _, label in rows]
    if not rows:
        raise ConfigurationError("no validation rows; the mode cannot be chosen: keep retrieval")
    vectors = embed_openings(policy, given, router.layers)
    label = label_probabilities(policy, renderer, router.candidates, [one.text for one in given])
    modes = ("retrieval", "both", "label")
    accuracies = {mode: accuracy(router.with_mode(mode).decide(vectors, label), truth) for mode in modes}
    best = max(modes, key=lambda mode: accuracies[mode])
    return ModeChoice(best if accuracies[best] > accuracies["retrieval"] + margin else "retrieval", accuracies)


def calibrated(router: Router, policy: LocalPolicy, renderer: Renderer, rows: Sequence[tuple[Opening, str]]) -> Router:
    """The router with the probability below which it abstains: the one with which it is most often right on validation
    `rows` (opening, true class), the least of equals. Nothing changes without rows, or in a mode that reads nothing."""
    if not rows or router.mode in ("fixed", "off"):
        return router
    decisions = replace(router, certain=0.0).route(policy, renderer, [opening for opening, _ in rows])
    truth = [label for _, label in rows]

    def right(certain: float) -> int:
        pairs = zip(decisions, truth, strict=True)
        return sum((d.capability if max(d.probabilities.values()) >= certain else "") == t for d, t in pairs)

    return replace(router, certain=max(CERTAIN, key=lambda c: (right(c), -c)))


def _paired(decisions: Sequence[RouteDecision], truth: Sequence[str]) -> None:
    if not truth or len(decisions) != len(truth):
        raise ConfigurationError(
            f"{len(decisions)} decisions against {len(truth)} true classes; give one each, at least one"
        )
