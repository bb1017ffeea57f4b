"""Looking at what is stored, without the libraries that make it: `trace-agent status` has to answer at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from db import Round, RoundState, StageRow, StageState, Store
from errors import StoreError
from models.objects import HomeFiles, files_of
from settings import Settings
from tasks.releases.lookup import release_of_round
from tasks.reporting.figures import AT_WORK, GONE, Provenance, RoundFigures, SelectionRule
from tasks.round.results import ContrastResult, ReportResult
from tasks.round.stored import StoredRound, in_order
from tasks.unattended.alive import as_told

logger = logging.getLogger("trace")

# In a round's folder: the report's page, the figures that it was made of, and the folder of its episodes' pages.
REPORT, FIGURES, EPISODES = "report.html", "figures.json", "episodes"


def stored_figures(store: Store, row: Round, files: HomeFiles) -> RoundFigures:
    """The figures that the round's report was made of, with what its release is by now; for an unfinished round, and
    where they cannot be read, what the database says at once."""
    path = files.fetch(f"{row.id}/{FIGURES}")
    if path.is_file():
        try:
            found = RoundFigures.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning("%s cannot be read: what the database knows of the round is shown", path)
        else:
            return _by_now(store, found)
    stages = in_order(store.rows(StageRow, round_id=row.id))
    (row,) = as_told(store, [row])
    return RoundFigures(
        round=row.id,
        target=row.target,
        data_hash=row.data_hash,
        seed=row.seed,
        number=row.number,
        seconds={stage.name: stage.seconds for stage in stages if stage.seconds is not None},
        stopped=_why_not(row, stages),
        collected=False,
        provenance=Provenance(
            profile=row.profile, code_version=row.code_version, base_model=str(row.config.get("base_model", ""))
        ),
        **_so_far(StoredRound(store, row)),
    )


def _by_now(store: Store, figures: RoundFigures) -> RoundFigures:
    """The figures with what has become of the round's release since: a later one may have taken its place."""
    made, now = figures.release, release_of_round(store, figures.round)
    if made is None or now is None or now.number != made.number:
        return figures
    return figures.model_copy(update={"release": made.model_copy(update={"state": str(now.state)})})


def _why_not(row: Round, stages: Sequence[StageRow]) -> str:
    """Why a round's figures are not there."""
    reported = any(stage.name == ReportResult.stage and stage.state == StageState.DONE for stage in stages)
    if reported or (row.state == RoundState.DONE and not row.reason):  # one that was dry says so
        return GONE
    return AT_WORK if row.state == RoundState.RUNNING else row.reason or f"the round is {row.state}"


def _selection(row: Round) -> SelectionRule:
    """The rule that the round was begun with; what an earlier version did not store is as it is today."""
    asked, today = row.config.get("selection", {}), SelectionRule()
    return SelectionRule(
        rho=asked.get("rho", today.rho),
        delta=asked.get("delta", today.delta),
        k=asked.get("required", today.k),
        n=asked.get("runs", today.n),
        analyst=row.config.get("analyst", {}).get("kind", today.analyst),
    )


def _so_far(stored: StoredRound) -> dict[str, Any]:
    """The rule of selection, and what the store says of releases and capabilities; not that where another version
    stored it in another form."""
    # Here: a round that has its figures is told of without the libraries that these load.
    from tasks.reporting.before_after import before_after, release_figures
    from tasks.reporting.capabilities import capabilities_of

    rule = _selection(stored.round)
    try:
        around, contrast = before_after(stored), stored.found(ContrastResult)
        found: dict[str, Any] = {
            "capabilities": capabilities_of(stored, around.renewed if around else frozenset()),
            "release": release_figures(stored),
            "selection": rule.model_copy(update={"kappa": contrast.kappa if contrast else None}),
        }
        found |= {"before": around.before, "after": around.after} if around else {}
    except StoreError as problem:
        logger.warning("what round %d has done so far is not shown: %s", stored.round.number, problem)
        return {"selection": rule}
    return found


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
