"""What the router is fitted on: tasks that an adapter solved, and the diagnosis tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from tasks.routing import examples
from tasks.routing.examples import (
    EXAMPLES_PER_CAPABILITY,
    Example,
    _practised,
    diagnosed,
    joined,
    played_by_most,
    players_of,
    practised,
    successes_of,
)
from tasks.synthesis.calibration import HINT
from tasks.synthesis.starting import START

LABELS = ["trajectory_id", "capability", "label", "weight"]


def outcomes(*rows: tuple[str, str, bool], acted: str = "") -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["id", "task", "success"]).assign(acted=acted)


def test_solved_tasks_of_an_environment_are_the_adapters_and_those_for_retention_the_bases() -> None:
    rows = [
        ("a", "t1", "move", True),
        ("b", "t1", "move", True),
        ("c", "t2", "move", False),
        ("d", "t3", "cancel", True),
    ]
    frame = pd.DataFrame([*rows, ("e", "t4", "move", None)], columns=["id", "task_id", "family", "success"])
    assert practised(frame, {"move": "change_address"}, 9) == {"a": "change_address", "d": ""}
    assert practised(frame, {"move": "change_address", "cancel": "cancel_order"}, 9)["d"] == "cancel_order"


def test_adapters_are_compared_on_what_they_all_played() -> None:
    """One has played the whole diagnosis, the others every second task; an episode of one was lost."""
    tasks = ["a", "b", "c", "d", "e"]
    whole, half, lost = dict.fromkeys(tasks, 1.0), dict.fromkeys("ace", 0.0), dict.fromkeys("ac", 0.0)
    tried = {name: pd.Series(found) for name, found in {"x": whole, "y": half, "z": lost}.items()}
    assert played_by_most(tasks, tried).tolist() == [True, False, True, False, False]
    assert played_by_most(tasks, {"x": tried["x"]}).all()


def test_what_was_tried_as_a_start_or_with_advice_shows_nothing_of_an_adapter() -> None:
    groups = {"plain": None, "tried": START, "advised": HINT}
    rows = [(name, f"task-{name}", "move", True, "made", group) for name, group in groups.items()]
    frame = pd.DataFrame(rows, columns=["id", "task_id", "family", "success", "environment", "group_id"])
    made = SimpleNamespace(spec={"families": ["move"]})
    store = SimpleNamespace(trajectory_frame=lambda round_id, adapter_id: frame, row=lambda kind, id: made)
    context: Any = SimpleNamespace(store=store, round=SimpleNamespace(target="shop"))
    adapter: Any = SimpleNamespace(id="a", round_id="r", environment_id="e")
    assert _practised(context, {"change_address": "a"}, [("change_address", adapter)]) == {
        "r": {"plain": "change_address"}
    }


def test_no_capability_takes_more_examples_than_its_share() -> None:
    count = EXAMPLES_PER_CAPABILITY + 7
    frame = pd.DataFrame({"id": map(str, range(count)), "task_id": range(count), "family": "move", "success": True})
    assert len(practised(frame, {"move": "change_address"}, EXAMPLES_PER_CAPABILITY)) == EXAMPLES_PER_CAPABILITY


def test_examples_are_taken_from_all_families_alike() -> None:
    families = ["buy", "cancel", "move", "refund", "swap"]
    rows = [(f"{family}{i}", f"{family}-{i:03}", family) for family in families for i in range(100)]
    frame = pd.DataFrame(rows, columns=["id", "task_id", "family"]).assign(success=True)
    found = pd.Series(practised(frame, {"move": "change_address"}, 120)).index.str.rstrip("0123456789")
    assert found.value_counts().to_dict() == dict.fromkeys(families, 24)


def test_a_task_that_two_rounds_played_is_one_example_the_latest_with_what_both_solved() -> None:
    def example(name: str, task: str, **successes: float) -> Example:
        return Example(name, Mock(), np.zeros(2), "", successes, task)

    given = [example("a", "t1", move=1.0, base=0.0), example("b", "t2", move=1.0)]
    given += [example("c", "t1", move=0.0, refund=1.0), example("d", ""), example("e", "")]
    found = joined(given)
    assert [e.id for e in found] == ["c", "b", "d", "e"]
    assert found[0].successes == {"move": 0.5, "base": 0.0, "refund": 1.0}


def test_what_an_earlier_version_solved_of_a_task_says_nothing_where_the_last_one_played_it() -> None:
    def example(name: str, successes: dict[str, float], **players: str) -> Example:
        return Example(name, Mock(), np.zeros(2), "", successes, "t1", players)

    given = [example("a", {"": 1.0, "move": 1.0, "swap": 1.0}, move="move-1", swap="swap-1")]
    given += [example("b", {"": 0.0, "move": 1.0, "swap": 0.0}, move="move-2", swap="swap-1")]
    given += [example("c", {"": 0.5, "move": 0.0}, move="move-2")]
    frame = pd.concat([outcomes(("1", "t1", True), ("2", "t1", False)), outcomes(("3", "t2", True), acted="move")])
    frame["adapter_id"] = [None, None, "move-1"]
    tried = {"move": pd.Series({"t1": 1.0})}
    shared = {("", "t1"): "", ("move", "t2"): "move-1"}
    assert players_of(frame, tried, {"move": "move-2"}) == shared | {("move", "t1"): "move-2"}
    tried["move"]["t2"] = 0.5  # the round's own version tells it, as in `successes_of`
    assert players_of(frame, tried, {"move": "move-2"})["move", "t2"] == "move-2"
    (found,) = joined(given)
    assert found.id == "c"
    assert found.successes == {"": 0.5, "move": 0.5, "swap": 0.5}
    assert joined([*given[:1], example("d", {"swap": 0.0}, swap="swap-2")])[0].successes["swap"] == 0.0


def test_an_example_says_whose_success_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    frame = outcomes(*((f"{i}", f"t{i}", i % 2 == 0) for i in range(8)))
    frame["acted"], frame["adapter_id"] = ["", "move"] * 4, [None, "move-1"] * 4
    tried = {"move": pd.Series({f"t{i}": 1.0 for i in range(8)})}
    drawn = {i: Example(i, Mock(), rng.normal(size=4).astype(np.float32), "") for i in frame["id"]}
    monkeypatch.setattr(examples, "_embedded", lambda *_: drawn)
    found = examples._by_success(Mock(), frame, tried, {"move": "move-2"}, ["", "move"], {})
    assert found["0"].players == {"": "", "move": "move-2"}
    assert found["1"].players == {"move": "move-2"}
    assert found["0"].successes == {"": 1.0, "move": 1.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ""),
        ([("b", "move", "LACKING", 6), ("b", "move", "PRESENT", 4)], "move"),
        ([("b", "move", "LACKING", 5), ("b", "move", "NA", 5)], ""),  # as often as not
        ([("b", "move", "LACKING", 7), ("b", "swap", "LACKING", 9)], "swap"),
        ([("b", "swap", "LACKING", 9), ("b", "move", "LACKING", 9)], "move"),  # the same whatever the order
        ([("b", "untrained", "LACKING", 10)], ""),
        ([("a", "move", "LACKING", 10)], ""),  # said of an episode that succeeded
    ],
)
def test_a_failed_task_is_the_capabilitys_that_it_is_said_to_lack(
    given: list[tuple[str, str, str, int]], expected: str
) -> None:
    frame = outcomes(("a", "solved", True), ("b", "failed", False))
    labels = pd.DataFrame(given, columns=LABELS)
    assert diagnosed(frame, labels, ["move", "swap"]) == {"a": "", "b": expected}


def test_the_base_keeps_what_it_solves_in_half_of_the_trials() -> None:
    frame = outcomes(("a", "half", True), ("b", "half", False), ("c", "third", True), ("d", "third", False))
    frame = pd.concat([frame, outcomes(("e", "third", False))], ignore_index=True)
    labels = pd.DataFrame([(i, "move", "LACKING", 10) for i in "bde"], columns=LABELS)
    assert diagnosed(frame, labels, ["move"]) == {"a": "", "c": "move"}


def test_what_an_adapter_solves_stays_with_it_while_it_is_a_member() -> None:
    frame = pd.concat(
        [outcomes(("a", "moved", True), acted="move"), outcomes(("b", "paid", True), acted="refund")], ignore_index=True
    )
    none = pd.DataFrame([], columns=LABELS)
    assert diagnosed(frame, none, ["move", "refund"]) == {"a": "move", "b": "refund"}
    assert diagnosed(frame, none, ["move"]) == {"a": "move"}, "nobody knows who would solve the other one now"


def test_who_solved_which_task_has_a_column_for_every_class() -> None:
    """The base's two trials are a mean, a member's own answer counts, and what was tried afterwards counts above it."""
    frame = pd.concat(
        [
            outcomes(("a", "t1", True), ("b", "t1", False), ("c", "t2", False)),
            outcomes(("d", "t3", True), acted="move"),
            outcomes(("e", "t4", True), acted="gone"),
        ],
        ignore_index=True,
    )
    tried = {"swap": pd.Series({"t2": True, "t1": False}), "move": pd.Series({"t1": True, "t3": False})}
    found = successes_of(frame, tried, ["", "move", "swap"])
    none = np.nan
    expected = [[0.5, 1.0, 0.0], [0.0, none, 1.0], [none, 0.0, none], [none, none, none]]
    np.testing.assert_array_equal(found, np.array(expected))
