"""The router that examples give: linear where successes are known, by votes where they are not."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from models.router import router as router_file
from models.router import validation
from tasks.routing import fitting
from tasks.routing.examples import Example
from tasks.routing.fitting import CALIBRATION_SHARE, LEAST_PLAYED, fitted, kept_out

CALLS, DECLINES = {"": 0.0, "call": 1.0, "all": 0.0}, {"": 0.0, "call": 0.0, "all": 1.0}


def settings(mode: str) -> Any:
    """A context that a linear router asks for its mode alone."""
    return SimpleNamespace(settings=SimpleNamespace(router=mode), base=Mock())


def examples(count: int, told: bool = True) -> list[Example]:
    """Tasks that differ in what they are about (16 directions) and a little in whether a function fits (the first),
    with neighbours' labels as wrong as neighbours are."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        fits = i % 2 == 0
        vector = 3 * rng.normal(size=32)
        vector[0] = (1 if fits else -1) + 0.3 * rng.normal()
        label = "call" if fits != (i % 5 == 0) else "all"
        successes = (CALLS if fits else DECLINES) if told else {}
        found.append(Example(f"t{i}", Mock(), vector.astype(np.float32), label, successes))
    return found


def test_what_a_direction_says_is_found_where_neighbours_say_nothing() -> None:
    given = examples(200)
    found = fitted(settings("linear"), given[:120], unlike="all")
    fresh, truth = np.stack([e.vector for e in given[120:]]), [e.successes["call"] == 1 for e in given[120:]]

    def right(mode: str) -> float:
        decisions = found.router.with_mode(mode).decide(fresh)
        return float(np.mean([(d.capability == "call") == t for d, t in zip(decisions, truth, strict=True)]))

    assert (found.router.mode, found.router.unlike, found.examples, found.judged) == ("linear", "all", 120, 120)
    assert right("linear") > 0.9
    assert right("retrieval") < 0.8
    assert found.right is not None
    assert abs(found.right - right("linear")) < 0.1, "each example without itself says how good it is"


def test_tasks_that_nothing_solves_count_for_what_is_expected_and_for_no_vote() -> None:
    given = examples(60)
    lost = [Example(f"n{i}", Mock(), e.vector, None, dict.fromkeys(CALLS, 0.0)) for i, e in enumerate(given[:20])]
    found = fitted(settings("linear"), [*given, *lost], unlike="")
    assert len(found.router.ids) == 60
    assert (found.examples, found.judged) == (80, 60)


def test_what_different_rounds_have_tried_is_put_together() -> None:
    """Nobody played all: one round's tasks know the base and one member, the next one's a member and the other."""
    given = examples(160)
    first = [replace(e, successes={c: s for c, s in e.successes.items() if c != "call"}) for e in given[:80]]
    then = [replace(e, successes={c: s for c, s in e.successes.items() if c != ""}) for e in given[80:]]
    found = fitted(settings("linear"), [*first, *then], unlike="")
    assert found.router.mode == "linear"
    fresh, truth = np.stack([e.vector for e in given]), [e.successes["call"] == 1 for e in given]
    decisions = found.router.decide(fresh)
    assert np.mean([(d.capability == "call") == t for d, t in zip(decisions, truth, strict=True)]) > 0.85


def test_labels_are_read_with_the_definitions_of_the_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What mode and threshold are chosen on and what answers later are the same lines of the prompt."""
    read: list[tuple[str, ...]] = []

    def probabilities(policy: Any, renderer: Any, candidates: Any, requests: Any) -> Any:
        read.append(tuple(c.line for c in candidates))
        return np.tile([0.9, 0.1], (len(requests), 1))

    def embedded(policy: Any, openings: Any, layers: Any) -> Any:
        return np.zeros((len(openings), 32), dtype=np.float32)

    given = [replace(e, label="call") if kept_out(e.id) else e for e in examples(60)]  # labels earn their place
    monkeypatch.setattr(router_file, "label_probabilities", probabilities)
    monkeypatch.setattr(validation, "label_probabilities", probabilities)
    monkeypatch.setattr(router_file, "embed_openings", embedded)
    monkeypatch.setattr(validation, "embed_openings", embedded)
    found = fitted(settings("auto"), given, "", definitions={"all": "Uses\nall.", "call": "Calls.", "gone": "Is gone."})
    assert set(read) == {("all: Uses all.", "call: Calls.")}
    assert [c.description for c in found.router.candidates] == ["Uses all.", "Calls."]


def test_without_successes_neighbours_vote_and_it_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "kept_out", lambda _: False)
    few = examples(LEAST_PLAYED - 1)
    with caplog.at_level(logging.WARNING, logger="trace"):
        found = fitted(settings("linear"), [*few, *examples(6, told=False)], unlike="")
    assert found.router.mode == "retrieval"
    assert "neighbours vote instead" in caplog.text


@pytest.mark.parametrize(("played", "mode"), [(LEAST_PLAYED - 1, "retrieval"), (LEAST_PLAYED, "linear")])
def test_what_is_insisted_on_makes_no_other_kind_of_router(
    monkeypatch: pytest.MonkeyPatch, played: int, mode: str
) -> None:
    """Its outcomes are made up: they are no play; and a task that was played stays one when it is insisted on."""
    monkeypatch.setattr(fitting, "kept_out", lambda _: False)
    given = examples(played)
    more = [replace(e, id=f"more {e.id}", label="all") for e in examples(10, told=False)]
    insisted = {e.id: "all" for e in [*given[:4], *more]}
    amended = [replace(e, label=insisted.get(e.id, e.label)) for e in [*given, *more]]
    modes = [fitted(settings("linear"), rows, "", ids).router.mode for rows, ids in ((given, {}), (amended, insisted))]
    assert modes == [mode, mode]


def test_the_share_that_thresholds_are_fitted_on_is_decided_by_the_id() -> None:
    ids = [f"trajectory-{i}" for i in range(2000)]
    share = [i for i in ids if kept_out(i)]
    assert share == [i for i in ids if kept_out(i)]
    assert abs(len(share) / len(ids) - CALIBRATION_SHARE) < 0.03
