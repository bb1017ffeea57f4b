"""Which server gets a session's next request: it keeps to one, moves when that is lost, and lost ones are tried."""

from __future__ import annotations

from collections import Counter

import pytest

from models.vllm import balance as rules
from models.vllm.balance import FIRST_PAUSE, LONGEST_PAUSE, SLACK, Balance

ABC = ("a", "b", "c")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def placed(balance: Balance, count: int = 60) -> dict[str, str | None]:
    """Sessions that all ask at once."""
    found = {}
    for i in range(count):
        chosen = balance.choose(f"s{i}", ABC)
        assert chosen
        balance.circuits[chosen].busy += 1
        found[f"s{i}"] = chosen
    return found


def test_new_sessions_go_to_the_least_busy_and_keep_to_it() -> None:
    balance = Balance(ABC)
    first = placed(balance)
    assert Counter(first.values()) == {"a": 20, "b": 20, "c": 20}
    for circuit in balance.circuits.values():
        circuit.busy = 0
    assert {s: balance.choose(s, ABC) for s in first} == first
    # Also one at a time, when none is busy, they do not all go to the first.
    quiet = Balance(ABC)
    assert len({quiet.choose(f"s{i}", ABC) for i in range(20)}) == 3


def test_only_the_sessions_of_a_lost_server_move_and_they_stay_where_they_went() -> None:
    balance = Balance(ABC)
    first = placed(balance)
    balance.open("b")
    moved = {s: balance.choose(s, ABC) for s in first}
    assert "b" not in moved.values()
    assert {s for s in first if moved[s] != first[s]} == {s for s in first if first[s] == "b"}
    balance.answered("b")
    assert {s: balance.choose(s, ABC) for s in first} == moved
    assert balance.choose("new", ABC) in ABC


def test_a_session_leaves_a_server_with_far_more_to_do_than_another() -> None:
    balance = Balance(("a", "b"))
    home = balance.choose("s", ("a", "b"))
    assert home
    balance.circuits[home].busy = SLACK
    assert balance.choose("s", ("a", "b")) == home
    balance.circuits[home].busy = SLACK + 1
    assert balance.choose("s", ("a", "b")) != home


def test_three_failures_in_a_row_are_too_many_and_an_answer_ends_the_row() -> None:
    balance = Balance(ABC)
    assert [balance.failed("a") for _ in range(3)] == [False, False, True]
    balance.answered("a")
    assert [balance.failed("a") for _ in range(3)] == [False, False, True]


def test_an_open_circuit_is_tried_by_one_request_after_a_pause_that_doubles() -> None:
    clock = Clock()
    balance = Balance(ABC, clock)
    balance.open("a")
    assert {balance.choose(f"s{i}", ABC, trials=True) for i in range(20)} == {"b", "c"}
    clock.now = FIRST_PAUSE
    assert balance.choose("s", ABC) != "a"  # not without trials
    assert [balance.choose(f"s{i}", ABC, trials=True) for i in range(5)].count("a") == 1
    pauses = []
    for _ in range(8):
        balance.open("a")
        pauses.append(balance.circuits["a"].pause)
    assert pauses[:3] == [2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    balance.answered("a")
    assert balance.used == list(ABC)
    assert balance.circuits["a"].pause == 0


def test_none_is_chosen_where_none_is_used_and_requests_without_a_session_spread() -> None:
    balance = Balance(("a", "b"))
    balance.open("a")
    assert balance.choose("s", ("a",)) is None
    balance.answered("a")
    first = balance.choose("", ("a", "b"))
    assert first
    balance.circuits[first].busy = 1
    assert balance.choose("", ("a", "b")) != first


def test_the_session_that_asked_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = Balance(("a", "b"))
    monkeypatch.setattr(rules, "SESSIONS", 2)
    for session in ("one", "two", "one", "three"):
        balance.choose(session, ("a", "b"))
    assert list(balance._homes) == ["one", "three"]
    balance.forget("one")
    assert list(balance._homes) == ["three"]
