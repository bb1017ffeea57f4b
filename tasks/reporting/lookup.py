"""Looking at what is stored, without the libraries that make it: `trace-agent status` has to answer at once."""

from __future__ import annotations

import logging
from typing import Any

from db import Round, RoundState, StageRow, Store
from errors import StoreError
from models.objects import HomeFiles, files_of
from settings import Settings
from tasks.reporting.figures import AT_WORK, Provenance, RoundFigures
from tasks.round.stored import in_order
from tasks.unattended.alive import as_told

logger = logging.getLogger("trace")

# In a round's folder: the report's page, the figures that it was made of, and the folder of its episodes' pages.
REPORT, FIGURES, EPISODES = "report.html", "figures.json", "episodes"


def stored_figures(store: Store, row: Round, files: HomeFiles) -> RoundFigures:
    """The figures that the round's report was made of; for an unfinished round, and where they cannot be read, the
    figures known so far."""
    path = files.fetch(f"{row.id}/{FIGURES}")
    if path.is_file():
        try:
            return RoundFigures.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning("%s cannot be read: what the database knows of the round is shown", path)
    stages = in_order(store.rows(StageRow, round_id=row.id))
    (row,) = as_told(store, [row])
    return RoundFigures(
        round=row.id,
        target=row.target,
        data_hash=row.data_hash,
        seed=row.seed,
        number=row.number,
        seconds={stage.name: stage.seconds for stage in stages if stage.seconds is not None},
        stopped=AT_WORK if row.state == RoundState.RUNNING else row.reason or f"the round is {row.state}",
        provenance=Provenance(profile=row.profile, code_version=row.code_version),
    )


def figures_by_key(settings: Settings, store: Store, key: str | None = None) -> RoundFigures:
    """Figures of the round that `key` names: a number, else an id or the beginning of one; the latest when None.

    Raises `StoreError` when no round, or more than one, is meant.
    """
    rounds = store.rows(Round)
    if not rounds:
        raise StoreError(f"there is no round in {store.url}; run 'trace-agent improve' first")
    rounds.sort(key=lambda r: r.number)
    if key:
        chosen = [r for r in rounds if key == str(r.number)] or [r for r in rounds if r.id.startswith(key)]
    else:
        chosen = rounds[-1:]
    if not chosen:
        there = "only round 1" if len(rounds) == 1 else f"rounds {rounds[0].number} to {rounds[-1].number}"
        raise StoreError(
            f"there is no round {key!r}: {store.url} has {there}; give one of these numbers, or an id or its beginning "
            "from 'trace-agent rounds'"
        )
    if len(chosen) > 1:
        which = ", ".join(f"{r.number} ({r.id})" for r in chosen)
        raise StoreError(
            f"{len(chosen)} rounds have ids that begin with {key!r}: {which}; give a number, or more of an id"
        )
    return stored_figures(store, store.round(chosen[0].id), files_of(settings))


def find_row(store: Store, key: str) -> tuple[str, dict[str, Any]] | None:
    """Table and row of the round whose number is `key`, else of what has this id or, if only one does, begins with it.
    Blobs are left out."""
    return store.row_beginning(key)
