"""What happened: the SQL record of rounds, trajectories, labels, environments, adapters and verdicts."""

from db.ids import row_id
from db.ledger import Stage, StageRow
from db.rows import CheckRow, Round, StepRow, TrajectoryRow, Written
from db.states import AdapterState, EnvironmentState, RoundState, StageState
from db.store import Store, open_store

__all__ = [
    "AdapterState",
    "CheckRow",
    "EnvironmentState",
    "Round",
    "RoundState",
    "Stage",
    "StageRow",
    "StageState",
    "StepRow",
    "Store",
    "TrajectoryRow",
    "Written",
    "open_store",
    "row_id",
]
