"""A made-up store of rounds and releases of the shop, small enough to know every figure of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from db import (
    EvaluationRow,
    ReleaseRow,
    ReleaseState,
    Round,
    RoundState,
    SpendRow,
    Store,
    TrajectoryRow,
    VerdictRow,
    row_id,
)
from tasks.round.results import StageResult

DATA, OTHER_DATA = "data-one", "data-two"
FAMILIES = ("refund", "set_address")


@dataclass
class Shop:
    """Writes rounds and releases of the target `shop` into a store."""

    store: Store

    def round(self, parent: ReleaseRow | None = None, data: str = DATA, profile: str = "laptop") -> Round:
        return self.store.start_round("shop", data, 7, profile, {}, "0.1.0", parent.id if parent else None)

    def stage(self, row: Round, result: StageResult, capability: str = "") -> None:
        stage = self.store.stage(row.id, ":".join([result.stage, *([capability] if capability else [])]))
        assert stage.claim()
        if result.skipped:
            stage.skip(result.skipped)
        else:
            stage.finish(result.model_dump(mode="json"))

    def release(
        self, number: int, members: Mapping[str, str], parent: ReleaseRow | None = None, of: Round | None = None,
        state: ReleaseState = ReleaseState.LIVE, **more: Any,
    ) -> ReleaseRow:  # fmt: skip
        """A release whose members are given as digests by capability."""
        row = ReleaseRow(
            id=row_id("release", "shop", number),
            target="shop",
            number=number,
            parent_id=parent.id if parent else None,
            round_id=of.id if of else None,
            base="tiny",
            data_hash=of.data_hash if of else DATA,
            members={c: {"adapter_id": f"a-{d}", "model": c, "version": "1", "sha256": d} for c, d in members.items()},
            state=state,
            **more,
        )
        self.store.put([row])
        return row

    def verdict(self, row: Round, subject: str, verdict: str, *reasons: str, **figures: float) -> None:
        self.store.put(
            [VerdictRow(round_id=row.id, subject=subject, verdict=verdict, reasons=list(reasons), **figures)]
        )

    def tested(self, row: Round, **rates: float) -> None:
        """Success on the test split by what played."""
        self.store.put(
            [
                EvaluationRow(
                    id=row_id(row.id, "test", name), round_id=row.id, split="test", subject=name, n_tasks=4, trials=2,
                    success=rate, low=max(0.0, rate - 0.1), high=min(1.0, rate + 0.1),
                )
                for name, rate in rates.items()
            ]
        )  # fmt: skip

    def spent(self, row: Round, dollars: float) -> None:
        self.store.put(
            [SpendRow(id=row_id(row.id, "spend"), round_id=row.id, stage="contrast", model="m", dollars=dollars)]
        )

    def done(self, row: Round, reason: str = "", state: RoundState = RoundState.DONE) -> None:
        self.store.finish_round(row.id, state, reason)

    def episodes(self, row: Round, who: str, wins: Sequence[Sequence[bool]], split: str = "test") -> list[str]:
        """Stored episodes of `who`, by task and trial; tasks take the families in turn."""
        rows = [
            TrajectoryRow(
                id=row_id(who, split, task, trial), round_id=row.id, purpose="evaluation", target="shop",
                data_hash=row.data_hash, environment="shop", task_id=f"t{task}", family=FAMILIES[task % 2], split=split,
                seed=0, trial=trial, policy_id=who, base="tiny", termination="done", reward=float(won), success=won,
            )
            for task, trials in enumerate(wins)
            for trial, won in enumerate(trials)
        ]  # fmt: skip
        self.store.add_trajectories(rows)
        return [r.id for r in rows]
