"""Looking at what is stored, without the libraries that make it: `trace-agent status` has to answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from db import Store
from db.rows import Round
from tasks.reporting.figures import Provenance, RoundFigures

TABLES = ("rounds", "trajectories", "adapters", "synthesized_environments", "capabilities", "evaluations")


def stored_figures(store: Store, row: Round, home: Path) -> RoundFigures:
    """The figures that the round's report was made of; for an unfinished round, the figures known so far."""
    path = home / row.id / "figures.json"
    if path.is_file():
        return RoundFigures.model_validate_json(path.read_text(encoding="utf-8"))
    stages = {r["name"]: r for r in store.rows("stages", round_id=row.id)}
    return RoundFigures(
        round=row.id,
        target=row.target,
        data_hash=row.data_hash,
        seed=row.seed,
        seconds={n: r["seconds"] for n, r in stages.items() if r["seconds"] is not None},
        stopped=row.reason or f"the round is {row.state}",
        provenance=Provenance(profile=row.profile, code_version=row.code_version),
    )


def find_row(store: Store, key: str) -> tuple[str, dict[str, Any]] | None:
    """Table and row whose id is `key` or, if only one does, begins with it. Blobs are left out."""
    for table in TABLES:
        found = store.query(f"SELECT id FROM {table} WHERE id LIKE :k LIMIT 2", k=f"{key}%")  # a fixed list of names
        if len(found) == 1:
            row = store.row(table, id=found["id"].iloc[0])
            assert row is not None
            return table, {k: v for k, v in row.items() if not isinstance(v, bytes)}
    return None
