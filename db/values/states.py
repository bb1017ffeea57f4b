"""The states of rounds, stages, shards, environments, adapters and releases, and the one table of allowed moves.

A state without an entry on the right is final. The store checks every move against this table (`TransitionError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from errors import StoreError, TransitionError


class RoundState(StrEnum):
    """One run of the loop. `interrupted` can be resumed; the other three ends are final."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StageState(StrEnum):
    """One stage of a round. `failed` may be claimed again (another attempt); `done` and `skipped` are final."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class ShardState(StrEnum):
    """Episodes that one worker plays. `running` is `pending` again when its worker gives it back."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


class EnvironmentState(StrEnum):
    """One version of a synthesized environment: `checked` passed the model-free checks, `accepted` the calibration too;
    `withdrawn` was accepted, and training then showed that its reward teaches the wrong thing."""

    DRAFT = "draft"
    CHECKED = "checked"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"


class AdapterState(StrEnum):
    """One adapter: `registered` is a challenger in the registry; a `retired` champion can come back (rollback). A
    `rejected` one becomes champion only by hand, with the release that holds it."""

    TRAINING = "training"
    TRAINED = "trained"
    REGISTERED = "registered"
    REJECTED = "rejected"
    CHAMPION = "champion"
    RETIRED = "retired"
    FAILED = "failed"


class ReleaseState(StrEnum):
    """One release: `live` answers users, one a target. A `rolled-back` or `refused` one becomes live only by hand."""

    CANDIDATE = "candidate"
    LIVE = "live"
    RETIRED = "retired"
    ROLLED_BACK = "rolled-back"
    REFUSED = "refused"


# By kind first: members of two kinds with the same text are equal to Python, and would share a key.
TRANSITIONS: Mapping[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]] = {
    RoundState: {
        RoundState.RUNNING: frozenset(
            {RoundState.INTERRUPTED, RoundState.DONE, RoundState.FAILED, RoundState.CANCELLED}
        ),
        # Interrupted to done: a second process left the round and said so, while the first one went on to its end.
        RoundState.INTERRUPTED: frozenset(
            {RoundState.RUNNING, RoundState.DONE, RoundState.FAILED, RoundState.CANCELLED}
        ),
        RoundState.DONE: frozenset(),
        RoundState.FAILED: frozenset(),
        RoundState.CANCELLED: frozenset(),
    },
    StageState: {
        StageState.PENDING: frozenset({StageState.RUNNING, StageState.SKIPPED}),
        # Running to running is the takeover of an expired lease: the ledger alone makes that move.
        StageState.RUNNING: frozenset({StageState.RUNNING, StageState.DONE, StageState.FAILED, StageState.SKIPPED}),
        StageState.FAILED: frozenset({StageState.RUNNING, StageState.SKIPPED}),
        StageState.DONE: frozenset(),
        StageState.SKIPPED: frozenset(),
    },
    ShardState: {
        ShardState.PENDING: frozenset({ShardState.RUNNING}),
        ShardState.RUNNING: frozenset({ShardState.RUNNING, ShardState.PENDING, ShardState.DONE}),
        ShardState.DONE: frozenset(),
    },
    EnvironmentState: {
        EnvironmentState.DRAFT: frozenset({EnvironmentState.CHECKED, EnvironmentState.REJECTED}),
        EnvironmentState.CHECKED: frozenset({EnvironmentState.ACCEPTED, EnvironmentState.REJECTED}),
        EnvironmentState.ACCEPTED: frozenset({EnvironmentState.WITHDRAWN}),
        EnvironmentState.REJECTED: frozenset(),
        EnvironmentState.WITHDRAWN: frozenset(),
    },
    AdapterState: {
        AdapterState.TRAINING: frozenset({AdapterState.TRAINED, AdapterState.FAILED}),
        AdapterState.TRAINED: frozenset({AdapterState.REGISTERED, AdapterState.REJECTED, AdapterState.FAILED}),
        AdapterState.REGISTERED: frozenset({AdapterState.CHAMPION, AdapterState.REJECTED, AdapterState.RETIRED}),
        AdapterState.CHAMPION: frozenset({AdapterState.RETIRED}),
        AdapterState.RETIRED: frozenset({AdapterState.CHAMPION}),
        AdapterState.REJECTED: frozenset({AdapterState.CHAMPION}),
        AdapterState.FAILED: frozenset(),
    },
    ReleaseState: {
        ReleaseState.CANDIDATE: frozenset({ReleaseState.LIVE, ReleaseState.REFUSED}),
        ReleaseState.LIVE: frozenset({ReleaseState.RETIRED, ReleaseState.ROLLED_BACK}),
        ReleaseState.RETIRED: frozenset({ReleaseState.LIVE}),
        ReleaseState.ROLLED_BACK: frozenset({ReleaseState.LIVE}),
        ReleaseState.REFUSED: frozenset({ReleaseState.LIVE}),
    },
}

STATES_OF: Mapping[str, type[StrEnum]] = {
    "rounds": RoundState,
    "stages": StageState,
    "shards": ShardState,
    "synthesized_environments": EnvironmentState,
    "adapters": AdapterState,
    "releases": ReleaseState,
}


def is_final(state: StrEnum) -> bool:
    """Whether nothing may follow `state`."""
    return not TRANSITIONS[type(state)][state]


def predecessors(state: StrEnum) -> frozenset[StrEnum]:
    """The states from which `state` may be reached in one move."""
    return frozenset(s for s, following in TRANSITIONS[type(state)].items() if state in following)


def parse_state(table: str, value: str) -> StrEnum:
    """`value` as a state of `table`; `StoreError` names the allowed ones."""
    kind = STATES_OF.get(table)
    if kind is None:
        raise StoreError(f"table {table!r} has no state column; tables with states: {', '.join(sorted(STATES_OF))}")
    try:
        return kind(value)
    except ValueError:
        raise StoreError(f"{value!r} is no state of {table}; use one of {', '.join(kind)}") from None


def check_transition(table: str, row_id: str, old: str, new: str) -> None:
    """Raise `TransitionError` unless the row may go from `old` to `new`. Staying where it is is always allowed."""
    before, after = parse_state(table, old), parse_state(table, new)
    if before == after:
        return
    allowed = TRANSITIONS[type(before)][before]
    if after not in allowed:
        following = ", ".join(sorted(allowed)) or "nothing: it is final"
        raise TransitionError(
            f"{table} row {row_id!r} cannot go from {before!s} to {after!s}; after {before!s} may come {following}"
        )
