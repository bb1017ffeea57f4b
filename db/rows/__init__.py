"""The rows that the store takes and gives: one frozen dataclass per table, its fields the table's columns."""

from db.rows.adapters import AdapterRow, EvaluationRow, RouteRow, TrainingStepRow, VerdictRow
from db.rows.capabilities import GENERALIST, CalibrationRow, CapabilityRow, EnvironmentRow, LabelRow, SelectionRow
from db.rows.contract import Row, row_from, values_of
from db.rows.conversations import ConversationRow, ReplyRow
from db.rows.methods import EpisodeChargeRow, MethodAccountRow
from db.rows.releases import BarredRow, DrawnTaskRow, GatePlanRow, LookRow, ReleaseRow
from db.rows.rounds import PROCESS, Round, SpendRow, StageRow
from db.rows.shards import ShardRow
from db.rows.trajectories import CheckRow, StepRow, TrajectoryRow, Written

# Every table but trajectories, steps and checks, which are read and written together.
SMALL_TABLES: tuple[type[Row], ...] = (
    Round,
    StageRow,
    CapabilityRow,
    LabelRow,
    SelectionRow,
    EnvironmentRow,
    CalibrationRow,
    AdapterRow,
    TrainingStepRow,
    EvaluationRow,
    VerdictRow,
    RouteRow,
    ConversationRow,
    ReplyRow,
    SpendRow,
    ReleaseRow,
    BarredRow,
    LookRow,
    DrawnTaskRow,
    GatePlanRow,
    MethodAccountRow,
    EpisodeChargeRow,
    ShardRow,
)

__all__ = [
    "GENERALIST",
    "PROCESS",
    "SMALL_TABLES",
    "AdapterRow",
    "BarredRow",
    "CalibrationRow",
    "CapabilityRow",
    "CheckRow",
    "ConversationRow",
    "DrawnTaskRow",
    "EnvironmentRow",
    "EpisodeChargeRow",
    "EvaluationRow",
    "GatePlanRow",
    "LabelRow",
    "LookRow",
    "MethodAccountRow",
    "ReleaseRow",
    "ReplyRow",
    "Round",
    "RouteRow",
    "Row",
    "SelectionRow",
    "ShardRow",
    "SpendRow",
    "StageRow",
    "StepRow",
    "TrainingStepRow",
    "TrajectoryRow",
    "VerdictRow",
    "Written",
    "row_from",
    "values_of",
]
