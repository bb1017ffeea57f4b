"""Which episodes are shown: whole groups in order, bounded however large the round, the telling ones first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db import Store, open_store
from tasks.episodes.groups import Outcome, compared_groups, diagnosis_groups, training_groups
from tasks.episodes.shown import MOST_CHARACTERS, MOST_TURNS, evenly, shown_episode
from tasks.round.results import TestResult
from tests.tasks.episodes.practised_rounds import ADAPTER, ASKED, CAPABILITY, Practised


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as opened:
        yield opened


def test_groups_of_a_training_stand_in_the_order_of_its_steps(store: Store) -> None:
    made = Practised(store)
    found = training_groups(store, made.round.id, ADAPTER, str)
    assert [(g.title, g.step, g.outcome) for g in found.groups] == [
        ("refund-0", 1, Outcome.NONE),
        ("refund-1", 1, Outcome.MIXED),
        ("refund-100", 2, Outcome.NONE),
        ("refund-101", 2, Outcome.MIXED),
    ]
    assert (found.total, found.left_out) == (4, 0)
    mixed = found.groups[1]
    assert mixed.mean == 0.4444, "of those without advice"
    assert [e.reward for e in mixed.episodes] == [0.0, 1 / 3, 2 / 3, 1.0]
    assert [e.note for e in mixed.episodes] == ["", "", "with advice", ""]
    assert mixed.episodes[0].turns[1].calls == ("refund(order=264)",)


def test_a_task_that_a_step_drew_twice_has_two_groups(store: Store) -> None:
    made = Practised(store, steps=0)
    for trial in range(2 * made.size):  # numbered through the step
        made.episode("p", "refund-9", 700_021, trial, float(trial >= made.size), purpose="training", adapter_id=ADAPTER)
    found = training_groups(store, made.round.id, ADAPTER, str)
    assert [(g.step, g.outcome, g.mean) for g in found.groups] == [(1, Outcome.NONE, 0.0), (1, Outcome.ALL, 1.0)]
    assert (found.total, len({g.key for g in found.groups})) == (2, 2)


def test_what_was_played_with_advice_is_shown_and_in_no_figure(store: Store) -> None:
    made = Practised(store, steps=0)
    for trial, advice in enumerate((None, None, None, "hinted")):
        given = {"purpose": "training", "adapter_id": ADAPTER, "group_id": advice}
        made.episode("p", "refund-9", 700_021, trial, 1.0 if advice else 0.0, **given)
    (group,) = training_groups(store, made.round.id, ADAPTER, str).groups
    assert (group.outcome, group.mean, len(group.episodes)) == (Outcome.NONE, 0.0, 4)


def test_what_is_shown_of_a_training_is_bounded_and_says_what_is_not(store: Store) -> None:
    made = Practised(store, steps=6, groups=2, size=9)
    found = training_groups(store, made.round.id, ADAPTER, str, most=5, each=3)
    assert (len(found.groups), found.total, found.left_out) == (5, 12, 7)
    assert (found.groups[0].step, found.groups[-1].step) == (1, 6)
    for group in found.groups:
        assert (len(group.episodes), group.left_out) == (3, 6)
        if group.outcome is Outcome.MIXED:  # from the least rewarded to the most
            assert {group.episodes[0].reward, group.episodes[-1].reward} <= {0.0, 1.0, 1 / 3, 2 / 3}
            assert {0.0, 1.0} <= {e.reward for e in group.episodes}
    assert training_groups(store, made.round.id, "no-such-adapter", str).groups == ()


def test_evidence_comes_first_in_diagnosis_and_carries_its_labels(store: Store) -> None:
    made = Practised(store)
    found = diagnosis_groups(made.stored, str, most=3)
    assert [g.title for g in found.groups] == ["refund-1", "refund-0", "status-0"]
    assert (found.total, found.left_out) == (4, 1)
    # Two of three runs call the first lacking, one of three the second.
    assert [g.episodes[0].note for g in found.groups] == ["", f"lacks {CAPABILITY}", ""]


def test_the_test_split_shows_what_changed_first_and_each_side_once(store: Store) -> None:
    made = Practised(store)
    found = compared_groups(made.stored, str)
    assert [(g.title, g.outcome) for g in found.groups] == [
        ("status-a", Outcome.FELL),
        ("refund-a", Outcome.WON),
        ("status-b", Outcome.BOTH),
    ]
    # What was live before is the base: it is not shown twice.
    assert [e.title for e in found.groups[0].episodes] == ["bare base", "live after"]
    few = compared_groups(made.stored, str, most=1)
    assert ([g.title for g in few.groups], few.left_out) == (["status-a"], 2)


def test_a_round_that_changed_nothing_has_solved_nothing_newly(store: Store) -> None:
    """Release 2 goes on: what is live after the round is what was live before it, and both solve more than the base."""
    made = Practised(store, steps=0)
    made.round = store.start_round("shop", "data-one", 8, "laptop", {})
    base = [made.episode("base", task, 1, 0, 0.0) for task in ("refund-a", "refund-b")]
    live = [made.episode("two", task, 1, 0, r) for task, r in (("refund-a", 1.0), ("refund-b", 0.0))]
    made.stage(TestResult(base_ids=base, live_ids=live, routed_ids=live, release=2))
    found = compared_groups(made.stored, str)
    assert {g.title: g.outcome for g in found.groups} == {"refund-a": Outcome.BOTH, "refund-b": Outcome.NEITHER}
    assert [e.title for e in found.groups[0].episodes] == ["bare base", "live before"]


def test_an_episode_that_was_lost_has_its_error_and_is_in_no_outcome(store: Store) -> None:
    made = Practised(store, steps=0)
    for trial in range(2):
        made.episode("p", "refund-9", 5, trial, None, purpose="training", adapter_id="lost")
    (group,) = training_groups(store, made.round.id, "lost", str).groups
    assert (group.outcome, group.mean) == (Outcome.LOST, None)
    assert group.episodes[0].error == "provider: no answer"
    assert group.episodes[0].success is None


def test_a_long_episode_keeps_its_beginning_and_its_end(store: Store) -> None:
    made = Practised(store, steps=0)
    messages = [{"role": "user", "content": f"{i} " + "x" * 5000} for i in range(100)]
    row = store.trajectory(made.episode("p", "long-1", 5, 0, 1.0, messages=messages))
    shown = shown_episode(row, str)
    assert (len(shown.turns), shown.left_out) == (MOST_TURNS, 100 - MOST_TURNS)
    assert [shown.turns[i].text.split()[0] for i in (0, 11, 12, -1)] == ["0", "11", "88", "99"]
    assert all(len(t.text) < MOST_CHARACTERS + 40 for t in shown.turns)
    assert "more characters" in shown.turns[0].text


def test_secrets_are_hidden_in_words_calls_and_checks(store: Store) -> None:
    made = Practised(store)
    row = store.trajectory(made.stored.store.trajectory_frame(made.round.id)["id"].iloc[0])
    shown = shown_episode(row, lambda text: text.replace("264", "(hidden)"))
    assert "264" not in repr(shown)
    assert ASKED.replace("264", "(hidden)") == shown.turns[0].text


@pytest.mark.parametrize(
    ("count", "most", "places"), [(3, 5, [0, 1, 2]), (10, 4, [0, 3, 6, 9]), (7, 1, [0]), (0, 3, [])]
)
def test_evenly(count: int, most: int, places: list[int]) -> None:
    assert list(evenly(count, most)) == places
