"""The three labels of a trajectory for a capability, and how candidates and labels of a round are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import pandas as pd

from db import CapabilityRow, LabelRow, Store, row_id

NA = "NA"


PRESENT = "PRESENT"


LACKING = "LACKING"


LABELS = (NA, PRESENT, LACKING)


class Named(Protocol):
    """A candidate capability, with the ids of trajectories that failed and passed by it."""

    @property
    def name(self) -> str: ...
    @property
    def definition(self) -> str: ...
    @property
    def failed_examples(self) -> tuple[str, ...]: ...
    @property
    def passed_examples(self) -> tuple[str, ...]: ...


def store_candidates(
    store: Store, round_id: str, analyst: str, candidates: Iterable[Named], requests: Mapping[str, str] | None = None
) -> None:
    """Store a round's candidates; `requests` has the hash of the request that named each, where a model did."""
    store.put(
        [
            CapabilityRow(
                id=row_id(round_id, c.name),
                round_id=round_id,
                name=c.name,
                definition=c.definition,
                analyst=analyst,
                examples={
                    "failed": list(c.failed_examples),
                    "passed": list(c.passed_examples),
                    **({"request": requests[c.name]} if requests else {}),
                },
            )
            for c in candidates
        ]
    )


def store_labels(store: Store, round_id: str, labels: pd.DataFrame) -> None:
    """Store labels with the columns run, trajectory_id, capability, label, weight and, where a model gave them,
    request_hash."""
    asked = labels["request_hash"] if "request_hash" in labels else [None] * len(labels)
    store.put(
        [
            LabelRow(
                round_id=round_id,
                run=int(r.run),
                trajectory_id=r.trajectory_id,
                capability_id=row_id(round_id, r.capability),
                label=r.label,
                weight=int(r.weight),
                request_hash=request,
            )
            for r, request in zip(labels.itertuples(), asked, strict=True)
        ]
    )
