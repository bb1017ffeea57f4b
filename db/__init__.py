"""What happened: the SQL record of rounds, trajectories, labels, environments, adapters and verdicts."""

from db.ledger import Stage
from db.rows import (
    AdapterRow,
    CalibrationRow,
    CapabilityRow,
    CheckRow,
    ConversationRow,
    EnvironmentRow,
    EvaluationRow,
    LabelRow,
    ReplyRow,
    Round,
    RouteRow,
    SelectionRow,
    SpendRow,
    StageRow,
    StepRow,
    TrainingStepRow,
    TrajectoryRow,
    VerdictRow,
    Written,
)
from db.store import Store, open_store
from db.values.ids import row_id
from db.values.states import AdapterState, EnvironmentState, RoundState, StageState

__all__ = [
    "AdapterRow",
    "AdapterState",
    "CalibrationRow",
    "CapabilityRow",
    "CheckRow",
    "ConversationRow",
    "EnvironmentRow",
    "EnvironmentState",
    "EvaluationRow",
    "LabelRow",
    "ReplyRow",
    "Round",
    "RoundState",
    "RouteRow",
    "SelectionRow",
    "SpendRow",
    "Stage",
    "StageRow",
    "StageState",
    "StepRow",
    "Store",
    "TrainingStepRow",
    "TrajectoryRow",
    "VerdictRow",
    "Written",
    "open_store",
    "row_id",
]
