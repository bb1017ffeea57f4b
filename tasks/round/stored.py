"""What the store holds of a round, read back: the results of its stages as their own types, and its spending."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from db import GENERALIST, Round, StageRow, StageState, Store
from db.values.states import is_final
from errors import StoreError
from tasks.round.results import KINDS, RolloutResult, StageResult

R = TypeVar("R", bound=StageResult)


def in_order(stages: Iterable[StageRow]) -> list[StageRow]:
    """Stages as they began; those that did not begin come last."""
    return sorted(stages, key=lambda row: (row.started_at is None, row.started_at, row.name))


@dataclass(frozen=True)
class StoredRound:
    """What the store holds of a round: its row, the results of its stages, and its spending."""

    store: Store
    round: Round

    def found(self, kind: type[R], *of: str) -> R | None:
        """The stored result of a stage (of a capability), or None while it is not done. Raises `StoreError` for one
        that another version stored in another form."""
        name = ":".join([kind.stage, *of])
        row = next(iter(self.store.rows(StageRow, round_id=self.round.id, name=name)), None)
        if row is None or not is_final(StageState(row.state)):
            return None
        stored = dict(row.result or {})
        if row.state == StageState.SKIPPED:
            stored = {"skipped": stored["reason"]}
        try:
            return kind.model_validate(stored)
        except ValidationError as problem:
            wrong = ".".join(map(str, problem.errors()[0]["loc"]))
            raise StoreError(
                f"stage {name!r} of round {self.round.number} was stored by another version ({wrong} does not fit); "
                "start a round again: another one begins, and what was played is not played again"
            ) from None

    def goes_on(self, kind: type[StageResult], *of: str) -> bool | None:
        """Whether a stage (of a capability) is done and has something for the next one; None while it is not done."""
        found = self.found(kind, *of)
        return None if found is None else found.goes_on

    def result(self, kind: type[R], *of: str) -> R:
        """The stored result of a stage. Raises `StoreError` while the stage is not done."""
        found = self.found(kind, *of)
        if found is None:
            name = ":".join([kind.stage, *of])
            raise StoreError(f"stage {name!r} of round {self.round.number} is not done; run 'trace-agent improve'")
        return found

    def diagnosis(self) -> RolloutResult:
        """The rollout that is mined: of the generalist, where the round made that first, else of what is live. Raises
        `StoreError` while there is none."""
        return self.found(RolloutResult, GENERALIST) or self.result(RolloutResult)

    def unreadable(self) -> str:
        """Why the round cannot go on: a result that another version stored in another form; "" when all can be read."""
        for row in self.store.rows(StageRow, round_id=self.round.id):
            stage, _, capability = row.name.partition(":")
            try:
                if stage in KINDS:
                    self.found(KINDS[stage], *([capability] if capability else []))
            except StoreError as problem:
                return str(problem)
        return ""

    def spent(self) -> dict[str, float]:
        """Calls, tokens, dollars and seconds that the round's language models have cost, simulated users included."""
        return {name: round(float(value), 6) for name, value in self.store.spent(self.round.id).items()}
