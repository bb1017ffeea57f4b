"""The figures of one round: what `trace-agent status --json` prints, the registry keeps and the report page shows.

Rates are in [0, 1], differences in percentage points, times in seconds. A part is None or empty when the round never
reached it; `stopped` then says why."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# What `stopped` says of a round that some process has in hand.
AT_WORK = "the round is not over: its figures come with its report"
# What it says of a round that is over, and whose figures nobody can read any more.
GONE = (
    "the round's figures (figures.json in its folder) are gone or cannot be read; 'trace-agent history' has what the "
    "database knows"
)
# How figures that an earlier version stored name a verdict, and what it is called now.
RENAMED = {"over-budget": "postponed"}


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Ending(StrEnum):
    """How practising ended in a round whose stages are done. `mastered`: what is live solves the environments of what
    it seemed to lack; that and `nothing lacking` are good endings."""

    TRAINED = "trained"
    NOTHING_LACKING = "nothing lacking"
    MASTERED = "mastered"
    NOTHING_TRAINED = "nothing trained"


class Rate(_Figures):
    """A success rate with its 95 % interval clustered by task."""

    success: float = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    n: int = 0
    tasks: int = 0


class Difference(_Figures):
    """One side minus another, paired by task. `mde` is the smallest that would have been found with 80 % power."""

    points: float
    p: float = Field(ge=0, le=1)
    mde: float
    low: float | None = None
    high: float | None = None
    tasks: int = 0


class FamilyFigures(_Figures):
    """One family of tasks on the test split; intervals are (low, high). `routed` is what is live after the round,
    `live` what was live before it (None where that was the base). A rate is None where all episodes were lost; `n` are
    those of the side with the most. `points` are `routed` minus `base`, `gained` minus `live`, over the tasks that both
    finished (in figures of an earlier version: of the rates)."""

    base: float | None = Field(ge=0, le=1)
    routed: float | None = Field(ge=0, le=1)
    n: int
    live: float | None = None
    base_interval: tuple[float, float] | None = None
    live_interval: tuple[float, float] | None = None
    routed_interval: tuple[float, float] | None = None
    noop: float | None = None
    points: float | None = None
    gained: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_rates(cls, given: dict[str, Any]) -> dict[str, Any]:
        base, live, routed = (given.get(name) for name in ("base", "live", "routed"))
        ends = {"points": (base, routed), "gained": (live, routed)}
        return {name: None if a is None or b is None else 100 * (b - a) for name, (a, b) in ends.items()} | given


class TrainingStep(_Figures):
    """Mean reward and success rate of one training step's rollouts without advice (None where all were lost): of the
    capability's own scenarios where `retention`, the success rate on the others, stands beside; else of all."""

    step: int
    reward: float | None
    success: float | None
    retention: float | None = None


class Calibration(_Figures):
    """What the training goes on from (the champion, the round's generalist, else the base) scored in a synthesized
    environment before that was used for training; rates are None where nothing was played in it."""

    accepted: bool
    verdict: str
    mean_reward: float | None = None
    success: float | None = None
    informative: float | None = None
    version: int = 1


class SynthesisVersion(_Figures):
    """One version of an environment that a model wrote: whether it may train, the beginning of its code's hash ("" when
    the model gave none), the sandbox level it was judged in, and why it was refused; `banked`: of an earlier round."""

    number: int
    accepted: bool
    code_hash: str = ""
    sandbox: str = ""
    reasons: list[str] = []
    banked: bool = False


class AnalystFigures(_Figures):
    """The language models that labelled, wrote and played users, and what they cost in all; `refused` says why
    labelling runs were left out, `too_long` and `filtered` (of no use also alone) count trajectories without labels.
    `judge` named and judged the capabilities, `author` wrote environments ("": none did); `environments` were
    accepted, `banked` from earlier rounds, each for so many of the author's dollars, calls and tokens (None: none)."""

    model: str
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0
    stages: dict[str, float] = {}
    runs: int | None = None
    refused: list[str] = []
    too_long: int = 0
    filtered: int = 0
    judge: str = ""
    author: str = ""
    environments: int = 0
    banked: int = 0
    dollars_each: float | None = None
    calls_each: float | None = None
    tokens_each: float | None = None


class Transfer(_Figures):
    """What the adapter had brought after `step`, about a third of its training: success in its environment before and
    after, and successes of so many episodes on so many diagnosis tasks that had failed for lack of the capability."""

    step: int
    before: float
    after: float
    successes: int
    episodes: int
    tasks: int


class CapabilityFigures(_Figures):
    """One capability from selection to gate. `verdict` is the final one: `promoted` or `refused` with the release that
    was to bring it, the gate's verdict on the adapter alone, `unsynthesizable`, `reward-misspecified`,
    `does-not-transfer`, `training-failed` (its groups taught nothing, its weights came apart, or a written module lost
    every episode that was to measure it), `mastered` (nothing left to train), `no-gain` (no checkpoint was better than
    the start), `not-trainable` (no environment could teach it), `postponed` (selected, and left to another round, as
    this one trained as many as it may, or another for the same families), or `not-selected`; `reasons` are sentences.

    `mean_cov` and `mean_delta` are None of the generalist, which no rule selects. `alone` is the gate's verdict on the
    adapter alone, with `points` and `adjusted_p` on its own families. `ending` says how training ended, `chosen` which
    step's weights were taken (0: none's), `renewed` that the live release had a version of it; `kappa` is how far
    labelling runs agree on it, `transfer` what the early check came to (None: there was none), `passed_over` why
    modules of the bank were not taken (by hash), `begun` what was begun from, `learnt` what without GRPO."""

    name: str
    mean_cov: float | None
    mean_delta: float | None
    runs_passed: int
    base_success: float | None = None
    adapter_success: float | None = None
    adapter: str | None = None
    verdict: str
    alone: str = ""
    renewed: bool = False
    ending: str = ""
    chosen: int | None = None
    selected: bool = True
    definition: str = ""
    reasons: list[str] = []
    steps: list[TrainingStep] = []
    calibration: Calibration | None = None
    points: float | None = None
    adjusted_p: float | None = None
    version: str | None = None
    link: str | None = None
    champion: str | None = None
    kappa: float | None = None
    versions: list[SynthesisVersion] = []
    transfer: Transfer | None = None
    begun: str = ""
    learnt: str = ""
    passed_over: dict[str, str] = {}

    @field_validator("verdict")
    @classmethod
    def _of_today(cls, verdict: str) -> str:
        return RENAMED.get(verdict, verdict)


class ReleaseFigures(_Figures):
    """The candidate release that the round made: number and state, the gate's verdict on it as a whole ("" before the
    gate) with reasons, points and p on validation against what was live, and what it has by name: `new` capabilities,
    `renewed` ones (another version) and those `kept`; `left` are families that fell, answered as before."""

    number: int
    state: str = ""
    verdict: str = ""
    reasons: list[str] = []
    points: float | None = None
    p: float | None = None
    mde: float | None = None
    new: list[str] = []
    renewed: list[str] = []
    kept: list[str] = []
    left: list[str] = []


class HistoryRow(_Figures):
    """One round of a target, or one release that no round made (`round` None): what it made and what it came to.

    `candidate` is the number of the release that it made (None: none) and `state` that release's state today; `after`
    the number of the one that was live when the round ended (0: the bare base; None: not known, as in rounds from
    before there were releases). `verdict` is the gate's, or how the round ended without one; `verdicts` those on
    capabilities. `test` and `base` are rates on the test split of what was live after it and of the bare base; their
    `n` are finished episodes (in rounds of earlier versions planned ones). Figures compare on one `data_hash` and
    `base_model`. `seconds` is working time. `members` are the versions of its release as the gateway names them, by
    capability, `barred` those whose adapter may not be promoted automatically, `left` families answered as before."""

    round: int | None = None
    round_id: str = ""
    candidate: int | None = None
    after: int | None = None
    when: str = ""
    data_hash: str = ""
    base_model: str = ""
    state: str = ""
    new: list[str] = []
    renewed: list[str] = []
    gone: list[str] = []
    left: list[str] = []
    members: dict[str, str] = {}
    barred: list[str] = []
    test: Rate | None = None
    base: Rate | None = None
    verdict: str = ""
    verdicts: dict[str, str] = {}
    reason: str = ""
    seconds: float | None = None
    dollars: float = 0.0

    @property
    def name(self) -> str:
        """What the row is called: the round's number, or the release's."""
        return str(self.round) if self.round is not None else f"r{self.candidate}"

    @property
    def change(self) -> str:
        """What its release brings and, where that is not live, what became of it; without a release, the reason."""
        if self.candidate is None:
            return self.reason
        parts = (("new", self.new), ("renewed", self.renewed), ("gone", self.gone), ("answered as before", self.left))
        brought = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        state = "" if self.state in ("", "live") else f" ({self.state})"
        why = f" ({self.reason})" if self.reason and self.round is None else ""
        return f"release {self.candidate}{state}: {brought or 'the same adapters'}{why}"


class RouterFigures(_Figures):
    """How the router chose: `sent` is the share of test tasks that an adapter answered, `counts[i][j]` tasks whose
    family is tagged with label i were sent to label j, `accuracy` is the share on the diagonal (None where no task's
    label is known). The router goes by what solves a task, not by tags. Of the candidate's router: `right` is the share
    sent right of the `calibration` examples that were kept out to choose its `mode` and its `threshold`, the
    probability below which it abstains (of a linear one: of all, each without itself); `unlike` is the adapter that
    answers a task unlike all examples ("": the base)."""

    sent: float | None = Field(default=None, ge=0, le=1)
    accuracy: float | None = Field(default=None, ge=0, le=1)
    right: float | None = Field(default=None, ge=0, le=1)
    calibration: int = 0
    mode: str = ""
    threshold: float | None = None
    unlike: str = ""
    labels: list[str] = []
    counts: list[list[int]] = []
    milliseconds: float | None = None

    @model_validator(mode="after")
    def _square(self) -> RouterFigures:
        size = len(self.labels)
        if len(self.counts) != size or any(len(row) != size for row in self.counts):
            raise ValueError(f"confusion counts must be {size} x {size}, one row and column a label")
        return self


class SelectionRule(_Figures):
    """Thresholds of the selection: coverage, contrast, and K of N runs."""

    rho: float = 0.10
    delta: float = 0.20
    k: int = 8
    n: int = 10
    analyst: str = "checks"
    kappa: float | None = None


class Provenance(_Figures):
    """What the figures were made with."""

    base_model: str = ""
    base_revision: str = ""
    code_version: str = ""
    finished: str = ""
    profile: str = ""
    packages: dict[str, str] = {}
    tracking: str = ""


class RoundFigures(_Figures):
    """Everything the report shows of a round. `seconds` are by stage, as they began and without the report itself, and
    `tokens` by the purpose of episodes; both hold their sum as `total`. `work` splits the same seconds into model,
    environment, earlier (attempts at a stage that were broken off) and orchestration (everything else); `errors` counts
    episodes lost to infrastructure, which are in no denominator.

    `before` and `after` are the numbers of the releases that were live when the round began and when it ended (0: the
    bare base; None in figures from before there were releases), `live` and `routed` their success on the test split
    and `gain` the difference; `difference` is that of base and `routed`. `looks` counts the rounds that looked at the
    test split. `ending` is an `Ending`, "" in a round that is not done. `data_before` is the
    hash of the target's data in the round before, where it was another. `collected` is False where the report has not
    collected the figures, or they are gone: then they are what the database says at once, without those of episodes."""

    round: str
    target: str
    data_hash: str
    seed: int
    number: int | None = None
    before: int | None = None
    after: int | None = None
    data_before: str = ""
    ending: str = ""
    base: Rate | None = None
    live: Rate | None = None
    routed: Rate | None = None
    noop: Rate | None = None
    difference: Difference | None = None
    gain: Difference | None = None
    looks: int = 0
    families: dict[str, FamilyFigures] = {}
    capabilities: list[CapabilityFigures] = []
    release: ReleaseFigures | None = None
    history: list[HistoryRow] = []
    router: RouterFigures | None = None
    seconds: dict[str, float] = {}
    work: dict[str, float] = {}
    tokens: dict[str, int] = {}
    peak_gib: float | None = None
    errors: int = 0
    selection: SelectionRule = SelectionRule()
    analyst: AnalystFigures | None = None
    warnings: list[str] = []
    stopped: str | None = None
    collected: bool = True
    provenance: Provenance = Provenance()

    @property
    def promoted(self) -> list[str]:
        """The capabilities that the round made live."""
        return [c.name for c in self.capabilities if c.verdict == "promoted"]

    def as_json(self) -> dict[str, Any]:
        """The JSON-able form that `trace-agent status --json` prints."""
        return self.model_dump(mode="json")


def percent(rate: float | None) -> str:
    """A rate as text, such as `42.5 %`."""
    return "–" if rate is None else f"{100 * rate:.1f} %"


def two(value: float | None) -> str:
    """A figure with two decimals."""
    return "–" if value is None else f"{value:.2f}"


def release_name(number: int | None) -> str:
    """A release as it is called in sentences: `release 3`, or `the bare base`."""
    return f"release {number}" if number else "the bare base"


def duration(seconds: float) -> str:
    """Seconds as `12.3 s`, `4 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"
