"""The queries and tables of docs/2-database.md, against a small filled store on both databases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from store_examples import failure, trajectory

from db import (
    AdapterRow,
    AdapterState,
    CalibrationRow,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    LabelRow,
    Round,
    RoundState,
    SelectionRow,
    SpendRow,
    Store,
    TrainingStepRow,
    VerdictRow,
)
from db.schema import TABLES

TEXT = (Path(__file__).parents[2] / "docs" / "2-database.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)

# For each of the ten queries: what the filled store answers, as rows of a few telling columns.
EXPECTED: list[tuple[list[str], list[list[object]]]] = [
    (["number", "state", "reason"], [[1, "done", "promoted 1"]]),
    (["adapter_id", "episodes", "success"], [[None, 4, 0.25], ["a1", 1, 1.0]]),
    (["error_boundary", "episodes", "example"], [["provider", 1, "502 from the provider"]]),
    (["kind", "required", "failed"], [["cancel_order", 3, 3], ["look_up_first", 3, 0]]),
    (["name", "rank", "runs_passed"], [["cancel_order", 1, 9], ["refund_order", None, 2]]),
    (["trajectory_id", "name", "votes"], [["t2", "cancel_order", 2], ["t1", "cancel_order", 1]]),
    (
        ["name", "version", "state", "reason"],
        [["cancel_order", 1, "rejected", "too hard"], ["cancel_order", 2, "accepted", "ok"]],
    ),
    (
        ["name", "version", "step", "reward"],
        [["cancel_order", 1, 0, 0.1], ["cancel_order", 2, 0, 0.2], ["cancel_order", 2, 1, 0.6]],
    ),
    (
        ["subject", "name", "verdict", "state"],
        [["cancel_order", "cancel_order", "promote", "champion"], ["release", None, "promote", None]],
    ),
    (["stage", "calls", "dollars"], [["contrast", 3, 0.75], ["train", 1, 0.0]]),
]


@pytest.fixture
def filled(store: Store, round_: Round) -> Store:
    r: dict[str, Any] = {"round_id": round_.id}
    store.add_trajectories(
        [trajectory(round_.id, f"t{i}", success=i == 0, reward=float(i == 0)) for i in range(4)]
        + [failure(round_.id, "e1")]
        + [
            trajectory(
                round_.id, "v1", purpose="evaluation", split="validation", adapter_id="a1", success=True, reward=1.0
            )
        ]
    )
    capabilities = [CapabilityRow(id=n[0], name=n, analyst="checks", **r) for n in ("cancel_order", "refund_order")]
    labels = [("t1", 0, "LACKING", 1), ("t2", 0, "LACKING", 2), ("t2", 1, "LACKING", 1), ("t0", 0, "PRESENT", 5)]
    selections = [
        SelectionRow(capability_id="c", selected=True, rank=1, mean_delta=0.5, runs_passed=9, runs=10, **r),
        SelectionRow(capability_id="r", selected=False, mean_delta=0.1, runs_passed=2, runs=10, **r),
    ]
    environments = [
        EnvironmentRow(id=f"env{v}", capability_id="c", kind="generators", version=v, state=EnvironmentState(s), **r)
        for v, s in ((1, "rejected"), (2, "accepted"))
    ]
    k: dict[str, Any] = {"policy_id": "base1", "seeds": 100, "samples": 16}
    calibrations = [
        CalibrationRow(id="k1", environment_id="env1", accepted=False, reason="too hard", **k),
        CalibrationRow(id="k2", environment_id="env2", accepted=True, reason="ok", success_rate=0.4, **k),
    ]
    # That of the first version did not carry over: it was never registered, and nobody judged it.
    adapters = [
        AdapterRow(
            id=f"a{v - 1}", capability_id="c", environment_id=f"env{v}", base="small", state=s,
            registered_version=registered, **r,
        )
        for v, s, registered in ((1, AdapterState.TRAINING, None), (2, AdapterState.CHAMPION, "1"))
    ]  # fmt: skip
    verdicts = [
        VerdictRow(subject="cancel_order", capability_id="c", verdict="promote", points=12.0, mde=5.0, **r),
        VerdictRow(subject="release", verdict="promote", points=6.0, mde=5.0, **r),
    ]
    spend = [("1", "contrast", 1, 0.25), ("2", "contrast", 2, 0.5), ("3", "train", 1, 0.0)]
    store.put(
        [
            *capabilities,
            *(LabelRow(trajectory_id=t, run=n, capability_id="c", label=v, weight=w, **r) for t, n, v, w in labels),
            *selections,
            *environments,
            *calibrations,
            *adapters,
            *(
                TrainingStepRow(adapter_id=a, step=n, reward=w)
                for a, n, w in (("a1", 1, 0.6), ("a1", 0, 0.2), ("a0", 0, 0.1))
            ),
            *verdicts,
            *(SpendRow(id=i, stage=s, model="m", calls=c, dollars=d, **r) for i, s, c, d in spend),
        ]
    )
    store.finish_round(round_.id, RoundState.DONE, "promoted 1")
    return store


def test_there_are_ten_queries() -> None:
    assert len(QUERIES) == len(EXPECTED) == 10


def test_every_query_answers_its_question(filled: Store, round_: Round) -> None:
    for query, (columns, rows) in zip(QUERIES, EXPECTED, strict=True):
        given = {"round": round_.id} if ":round" in query else {}
        frame = filled.query(query, **given)[columns].astype(object)
        found = frame.where(frame.notna(), None).to_numpy().tolist()
        assert found == rows, query


@pytest.mark.parametrize("table", list(TABLES))
def test_every_table_and_column_is_described(table: str) -> None:
    section = TEXT.split(f"\n### {table}\n")[1].split("\n### ")[0]
    described = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    assert described == TABLES[table].columns.keys()
