"""What each stage stores: a typed result, JSON in the ledger, read back as the same type.

A stage reads the results of earlier ones from the store (`StoredRound` in `stored.py`), so only ids travel between
stages. Fields have defaults only where a stage that was skipped has nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

# How a training ended that was none of GRPO: an adapter that learnt from successes.
LEARNT = "learnt"


class StageResult(BaseModel):
    """What every stage stores. `skipped` says why there was nothing to do; "" means that the stage was done.

    `model_seconds` and `environment_seconds` are what the last attempt spent in each, `earlier_seconds` the sum of the
    attempts before it, `peak_gib` the peak memory of the process that finished it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: ClassVar[str]

    skipped: str = ""
    earlier_seconds: float = 0.0
    model_seconds: float = 0.0
    environment_seconds: float = 0.0
    peak_gib: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the next stage has anything to do with it."""
        return not self.skipped


class RolloutResult(StageResult):
    """`trajectories` are the ids of all diagnosis episodes, `lost` of them without a reward (infrastructure errors);
    `success` is the share of the others that succeeded. `release` is the number of what played (0: the base)."""

    stage: ClassVar[str] = "rollout"
    release: int = 0
    trajectories: list[str]
    lost: int
    success: float

    @property
    def scored(self) -> int:
        """How many episodes have a reward."""
        return len(self.trajectories) - self.lost


class ContrastResult(StageResult):
    """Names of the candidate capabilities, and how many labels they got; `left_out` are kinds of checks that can name
    none, and why. The rest is a language model's: which, how many of its runs were complete, why others were refused,
    which trajectories were too long, or (`filtered`) refused by it or without a usable reply also alone, which
    (`unread`) were refused when candidates were looked for, and Fleiss' kappa."""

    stage: ClassVar[str] = "contrast"
    analyst: str
    candidates: list[str]
    labels: int
    left_out: dict[str, str] = {}
    model: str = ""
    runs: int | None = None
    refused: dict[str, str] = {}
    too_long: list[str] = []
    filtered: list[str] = []
    unread: list[str] = []
    kappa: float | None = None
    kappa_by_capability: dict[str, float | None] = {}
    spend: dict[str, float] = {}


class SelectResult(StageResult):
    """Selected capabilities that can be trained, in order, at the end the generalist; `unfit`: others, and why not."""

    stage: ClassVar[str] = "select"
    selected: list[str]
    unfit: dict[str, str] = {}


class SynthesizeResult(StageResult):
    """The environment's id when it passed validation, else the reasons. `versions` counts those that were written;
    `file` and `sandbox` are a written environment's; `bank` is the id of the module of the bank that it is ("": it was
    written for this round), `passed_over` says why others of the bank were not taken (by the begin of their hash).
    `same_as` is the capability whose training this one's would be once more ("": there is none)."""

    stage: ClassVar[str] = "synthesize"
    accepted: bool
    reasons: list[str] = []
    environment: str = ""
    versions: int = 1
    file: str = ""
    sandbox: str = ""
    spend: dict[str, float] = {}
    bank: str = ""
    passed_over: dict[str, str] = {}
    same_as: str = ""

    @property
    def goes_on(self) -> bool:
        return self.accepted


class CalibrateResult(StageResult):
    """Figures of the policy in the environment (see `tasks.synthesis.calibration`), and whether it may train;
    `mastered` when it may not because every sample succeeded. `hinted` is success with advice, where it never succeeded
    without (None: not tried), and training gives advice too. `level` is the difficulty that the figures are of and that
    training begins at (None: there are no levels)."""

    stage: ClassVar[str] = "calibrate"
    accepted: bool
    reason: str
    mean_reward: float
    success_rate: float
    std_reward: float
    all_success: float
    all_zero: float
    informative: float
    low: float
    high: float
    mastered: bool = False
    hinted: float | None = None
    level: int | None = None

    @property
    def goes_on(self) -> bool:
        return self.accepted

    @property
    def played(self) -> bool:
        """Whether anything was played for the figures: a generalist without parts has none, and its are zeros. The
        upper end of an interval is above zero whatever was played, also where nothing succeeded."""
        return self.high > 0


class CheckpointFigures(BaseModel):
    """A checkpoint on the fresh seeds that one is chosen on: its step (0: what training began from), success and mean
    reward on the capability's own scenarios, and success on retention scenarios (None without any); `forgets` when
    that is below the start's by an 80 % interval."""

    step: int
    success: float
    low: float
    high: float
    reward: float
    retention: float | None = None
    forgets: bool = False


class TransferFigures(BaseModel):
    """The early check of a training (`tasks.synthesis.transfer`), after `step`: success on fresh scenarios of its
    environment before and after, and how many of the `episodes` on so many diagnosis `tasks` that lacked the capability
    succeeded. `verdict` is empty unless nothing carries over; `practised` and `tried` are ids of trajectories."""

    step: int
    before: float
    after: float
    episodes: int
    tasks: int
    successes: int
    verdict: str = ""
    practised: list[str] = []
    tried: list[str] = []


class StartFigures(BaseModel):
    """Weights that a training could begin from (`tasks.synthesis.starting`): the capability whose `adapter` (id) they
    are, both "" for the base, and success on fresh own and retention scenarios together, success on each kind (None
    without any), and mean reward; `forgets` when success on retention is below the base's by an 80 % interval, `worse`
    when success on all of them is. `chosen` is what training began from."""

    capability: str = ""
    adapter: str = ""
    success: float
    own: float | None = None
    retention: float | None = None
    reward: float
    forgets: bool = False
    worse: bool = False
    chosen: bool = False


class TrainResult(StageResult):
    """The adapter's id and digest, the steps done, and MLflow's run.

    `ending` says how training ended (see `models.training.grpo`), `verdict` what is wrong with its environment ("" for
    nothing). `chosen` is the step whose weights it has, by `choice`, which is empty where there was only one; 0 when no
    step was made, or none is better than what training began from. The last attempt spent `choosing_seconds` on it.
    `start` is the digest of the adapter that was trained on, "" for one that began from zero; `began` says why it was
    not the champion, where there was one that could not be. `before` is the id of what a generalist practised from,
    also where nothing of its practice is kept, and then `unkept` says why; "" for any other training. `starts` are the
    weights that were compared for it (none where there was no choice), `keeps` the families that were added to
    retention for what was chosen. `level` is the level of difficulty of the last step (None: the environment has none),
    `transfer` what the early check came to (None: there was none).
    """

    stage: ClassVar[str] = "train"
    adapter: str
    sha256: str
    steps: int
    run: str
    ending: str
    chosen: int
    verdict: str = ""
    choice: list[CheckpointFigures] = []
    choosing_seconds: float = 0.0
    start: str = ""
    began: str = ""
    before: str = ""
    unkept: str = ""
    starts: list[StartFigures] = []
    keeps: list[str] = []
    level: int | None = None
    transfer: TransferFigures | None = None

    @property
    def goes_on(self) -> bool:
        return not self.unused

    def in_words(self, learnt: str) -> str:
        """What it was trained by, in words; `learnt` tells of the conversations that it learnt from."""
        steps = "step" if self.steps == 1 else "steps"
        return f"{self.steps} {steps} from {learnt}" if self.learnt else f"{self.steps} GRPO {steps}"

    def began_from(self, capability: str) -> str:
        """What the training for `capability` began from, in words: zero, its champion, another's adapter, or
        what a generalist has learnt."""
        if not self.start:
            return "zero"
        if self.before:
            return "what it has learnt"
        other = next((s.capability for s in self.starts if s.chosen and s.capability != capability), "")
        return f"the adapter for {other}" if other else "its champion"

    @property
    def learnt(self) -> bool:
        """Whether it learnt from what had succeeded, and from reference solutions, without GRPO: as the generalist."""
        return self.ending == LEARNT

    @property
    def goes_back(self) -> bool:
        """Whether its environment taught the wrong thing, and goes back for another version."""
        return self.verdict.startswith(("reward-misspecified", "does-not-transfer"))

    @property
    def unused(self) -> str:
        """Why the adapter is not used; "" where it is."""
        if self.verdict or self.chosen:
            return self.verdict
        if self.ending == "budget" and not self.steps:
            return "the budget of episodes did not pay for a first step"
        if self.steps:
            return "every checkpoint is worse on fresh seeds than what training began from"
        return "mastered: every episode of the first step succeeded, so there is nothing to train"


def starts_text(figures: Sequence[StartFigures], keeps: Sequence[str] = ()) -> str:
    """The comparison in a line: success of each, what was chosen first, and the families that are kept for it."""
    ranked = sorted(figures, key=lambda f: not f.chosen)
    each = [f"{f.capability or 'base'} {100 * f.success:.0f} %{' (forgets)' if f.forgets else ''}" for f in ranked]
    told = f"begins from {each[0]}" + (f"; compared with {', '.join(each[1:])}" if each[1:] else "")
    return told + (f"; also keeps {', '.join(keeps)}" if keeps else "")


class RegisterResult(StageResult):
    """The version in the registry; success on fresh seeds of the base, of the champion that it was trained on from
    (None where there was none) and of the adapter; `liveness` is the largest change of a log-probability of the probe,
    in nats. `skipped` says why an adapter could not be measured, and was not registered."""

    stage: ClassVar[str] = "register"
    version: str = ""
    served_name: str = ""
    base_success: float = 0.0
    champion_success: float | None = None
    adapter_success: float = 0.0
    liveness: float = 0.0


class ChallengeResult(StageResult):
    """Each new adapter alone against the live release on validation: trajectory ids, the gate's verdict by capability
    and those that passed. `further` tasks of families were drawn, so that the gains seen on fresh seeds could be found.
    `look` counts the looks at this split, `alpha` is what this one may spend, `plan` the hash of the stored rules."""

    stage: ClassVar[str] = "challenge"
    further: dict[str, int] = {}
    live_ids: list[str] = []
    alone_ids: dict[str, list[str]] = {}
    verdicts: dict[str, str] = {}
    passed: list[str] = []
    look: int = 0
    alpha: float = 0.0
    plan: str = ""


class RouteResult(StageResult):
    """The candidate release that was assembled (its id), and the router fitted for it: version and mode, how many
    examples of each label ("none": no adapter), how many more the threshold was fitted on, the share of those that it
    sends right, and how many episodes new adapters `tried` on diagnosis tasks."""

    stage: ClassVar[str] = "route"
    candidate: str = ""
    threshold: float = 0.0
    calibration: int = 0
    right: float | None = None
    tried: int = 0
    version: str = ""
    mode: str = ""
    examples: int = 0
    labels: dict[str, int] = {}


class SuccessRate(BaseModel):
    """A success rate with its 95 % interval, clustered by task, over `n` finished episodes of `tasks` tasks (0 where an
    earlier version did not count them)."""

    success: float
    low: float
    high: float
    n: int = 0
    tasks: int = 0


class EvaluateResult(StageResult):
    """The validation split: trajectory ids and success of base, live release, candidate (`routed`) and no-op; ids alone
    on the `further` tasks, and of what settled whether a family fell. `left` says why families fell with the first
    router: the `candidate` that counts leaves them to what answers them today."""

    stage: ClassVar[str] = "evaluate"
    further_live_ids: list[str] = []
    further_routed_ids: list[str] = []
    settled_live_ids: list[str] = []
    settled_routed_ids: list[str] = []
    candidate: str = ""
    left: dict[str, str] = {}
    base_ids: list[str] = []
    live_ids: list[str] = []
    routed_ids: list[str] = []
    noop_ids: list[str] = []
    base: SuccessRate | None = None
    live: SuccessRate | None = None
    routed: SuccessRate | None = None
    noop: SuccessRate | None = None

    def sides(self) -> dict[str, list[str]]:
        """Trajectory ids by what played: base, live, routed, noop."""
        return {"base": self.base_ids, "live": self.live_ids, "routed": self.routed_ids, "noop": self.noop_ids}

    def rates(self) -> dict[str, SuccessRate | None]:
        """Success by what played."""
        return {"base": self.base, "live": self.live, "routed": self.routed, "noop": self.noop}


class GateResult(StageResult):
    """What the candidate brought to the live release when it was promoted (capabilities), its number, and all verdicts:
    by capability, and the candidate's as a whole under `release`."""

    stage: ClassVar[str] = "gate"
    promoted: list[str] = []
    verdicts: dict[str, str] = {}
    release: int = 0


class TestResult(EvaluateResult):
    """The test split, which reports and decides nothing: the base, the release that was live before the round, and the
    one that is live after it (`routed`, number `release`; 0: the base). `looks` counts the rounds that looked at it."""

    stage: ClassVar[str] = "test"
    __test__: ClassVar[bool] = False  # pytest would take the class for a test
    release: int = 0
    looks: int = 0


class ReportResult(StageResult):
    """Where the page is in the home (absolute in rounds of before); why nothing was trained ("": something was)."""

    stage: ClassVar[str] = "report"
    page: str
    reason: str = ""


KINDS: dict[str, type[StageResult]] = {
    kind.stage: kind
    for kind in (
        RolloutResult, ContrastResult, SelectResult, SynthesizeResult, CalibrateResult, TrainResult, RegisterResult,
        ChallengeResult, RouteResult, EvaluateResult, GateResult, TestResult, ReportResult,
    )
}  # fmt: skip
