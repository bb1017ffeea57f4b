"""What `make bench` calls worse."""

from __future__ import annotations

import json

import pytest

from benchmarks.regression import BASELINE, compare, suite, table, updated

STORED = {"store: insert": {"ratio": 2.0, "tolerance": 0.25}, "start: help": {"ratio": 8.0, "tolerance": 0.5}}


@pytest.mark.parametrize(
    ("ratio", "worse", "verdict"),
    [
        (2.0, False, "as before"),
        (2.49, False, "as before"),
        (2.52, True, "WORSE by 26%"),
        (1.61, False, "as before"),
        (1.59, False, "better: store it with --update"),
        (float("nan"), True, "WORSE by nan%"),
        (0.0, True, "WORSE by -100%"),
    ],
)
def test_a_ratio_may_grow_by_its_tolerance(ratio: float, worse: bool, verdict: str) -> None:
    (only,) = compare({"store: insert": ratio}, STORED, ["store"])
    assert (only.worse, only.verdict) == (worse, verdict)


def test_a_figure_that_is_missing_is_worse_and_a_new_one_is_not() -> None:
    found = {c.name: c for c in compare({"store: other": 3.0}, STORED, ["store"])}
    assert list(found) == ["store: insert", "store: other"]  # `start` was not asked for
    assert (found["store: insert"].worse, found["store: insert"].verdict) == (True, "NOT MEASURED")
    assert (found["store: other"].worse, found["store: other"].verdict) == (False, "new: store it with --update")


def test_the_table_shows_every_figure() -> None:
    text = table(compare({"store: insert": 3.0, "start: help": 8.0}, STORED, ["store", "start"]))
    assert text.splitlines()[1:] == [
        "start: help          8        8       50%  as before",
        "store: insert        2        3       25%  WORSE by 50%",
    ]


def test_an_update_keeps_tolerances_and_what_was_not_measured() -> None:
    assert updated({"store: insert": 1.23456, "store: new": 4.0}, STORED) == {
        "start: help": {"ratio": 8.0, "tolerance": 0.5},
        "store: insert": {"ratio": 1.23, "tolerance": 0.25},
        "store: new": {"ratio": 4.0, "tolerance": 0.35},
    }


def test_the_stored_baseline_is_that_of_the_suite() -> None:
    """Every benchmark with figures has stored ones, and none is stored that no benchmark offers."""
    stored = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert {name.partition(":")[0] for name in stored} == set(suite())
    assert all(entry["ratio"] > 0 and 0 < entry["tolerance"] <= 1 for entry in stored.values())
