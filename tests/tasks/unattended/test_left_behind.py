"""What the doctor says of stages that their process left, by what has become of the round."""

from __future__ import annotations

from pathlib import Path

from db import RoundState, open_store
from tasks.housekeeping.stored_checks import leases


def test_a_stage_of_a_round_that_has_ended_is_owed_nothing(settings_folder: Path) -> None:
    """The process died, and the round was closed since, as another release had become live."""
    store = open_store(f"sqlite:///{settings_folder}/trace.db")
    row = store.start_round("shop", "d", 0, "night", {})
    assert store.stage(row.id, "train:refund").claim("a-machine:1", lease_seconds=1e-6)
    (left,) = leases(store)
    assert "stage train:refund of round 1 was left by a-machine:1" in left.said
    store.finish_round(row.id, RoundState.FAILED, "another release of shop became live since it began")
    assert [f.level for f in leases(store)] == ["ok"]
