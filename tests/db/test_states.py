"""The transition table."""

from __future__ import annotations

import pytest

from db.values.states import (
    STATES_OF,
    TRANSITIONS,
    AdapterState,
    EnvironmentState,
    ReleaseState,
    RoundState,
    StageState,
    check_transition,
    is_final,
    predecessors,
)
from errors import TransitionError

FINAL = {
    RoundState: {"done", "failed", "cancelled"},
    StageState: {"done", "skipped"},
    EnvironmentState: {"rejected", "withdrawn"},
    AdapterState: {"failed"},
    ReleaseState: set(),
}


@pytest.mark.parametrize("kind", list(FINAL))
def test_every_state_has_an_entry_of_its_own_kind(kind: type) -> None:
    assert set(TRANSITIONS[kind]) == set(kind)
    assert all(type(after) is kind for following in TRANSITIONS[kind].values() for after in following)
    assert {str(state) for state in kind if is_final(state)} == FINAL[kind]


@pytest.mark.parametrize("table", list(STATES_OF))
def test_the_check_and_the_table_agree_on_all_pairs(table: str) -> None:
    kind = STATES_OF[table]
    for old in kind:
        for new in kind:
            if old == new or old in predecessors(new):
                check_transition(table, "x", old, new)
            else:
                with pytest.raises(TransitionError, match=f"from {old} to {new}"):
                    check_transition(table, "x", old, new)
