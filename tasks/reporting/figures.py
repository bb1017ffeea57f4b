"""The figures of one round: what `trace-agent status --json` prints, the registry keeps and the report page shows.

Rates are in [0, 1], differences in percentage points, times in seconds. A part is None or empty when the round never
reached it; `stopped` then says why."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(_Figures):
    """A success rate with its 95 % interval clustered by task."""

    success: float = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    n: int = 0
    tasks: int = 0


class Difference(_Figures):
    """Routed minus base, paired by task. `mde` is the smallest difference that would have been found with 80 %
    power."""

    points: float
    p: float = Field(ge=0, le=1)
    mde: float
    low: float | None = None
    high: float | None = None
    tasks: int = 0


class FamilyFigures(_Figures):
    """One family of tasks on the test split; intervals are (low, high)."""

    base: float = Field(ge=0, le=1)
    routed: float = Field(ge=0, le=1)
    n: int
    base_interval: tuple[float, float] | None = None
    routed_interval: tuple[float, float] | None = None
    noop: float | None = None


class TrainingStep(_Figures):
    """Mean reward and success rate of one training step's rollouts on the capability's own scenarios, and success on
    its retention scenarios (None where there were none)."""

    step: int
    reward: float
    success: float
    retention: float | None = None


class Calibration(_Figures):
    """What the base model scored in a synthesized environment before that environment was used for training."""

    accepted: bool
    verdict: str
    mean_reward: float | None = None
    success: float | None = None
    informative: float | None = None
    version: int = 1


class SynthesisVersion(_Figures):
    """One version of an environment that a model wrote: whether it may train, the beginning of its code's hash ("" when
    the model gave none), the sandbox level it was judged in, and why it was refused."""

    number: int
    accepted: bool
    code_hash: str = ""
    sandbox: str = ""
    reasons: list[str] = []


class AnalystFigures(_Figures):
    """The language models that labelled, wrote and played users, and what they cost in all; `refused` says why
    labelling runs were left out, `too_long` counts trajectories that could not be labelled."""

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


class CapabilityFigures(_Figures):
    """One capability from selection to gate. `verdict` is the final one: the gate's verdict, `unsynthesizable`,
    `reward-misspecified`, `mastered` (nothing left to train), `no-gain` (no checkpoint was better than the start),
    `not-trainable` (no environment could teach it), or `not-selected`; `reasons` are sentences;
    `kappa` is how far labelling runs agree on it."""

    name: str
    mean_cov: float
    mean_delta: float
    runs_passed: int
    base_success: float | None = None
    adapter_success: float | None = None
    adapter: str | None = None
    verdict: str
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


class RouterFigures(_Figures):
    """How the router chose; `counts[i][j]` tasks of label i were sent to label j."""

    accuracy: float = Field(ge=0, le=1)
    labels: list[str] = []
    counts: list[list[int]] = []
    milliseconds: float | None = None

    @model_validator(mode="after")
    def _square(self) -> RouterFigures:
        if len(self.counts) != len(self.labels) or any(len(row) != len(self.labels) for row in self.counts):
            raise ValueError(
                f"confusion counts must be {len(self.labels)} x {len(self.labels)}, one row and column a label"
            )
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
    """Everything the report shows of a round. `seconds` and `tokens` are by stage and hold their sum as `total`;
    `work` splits the same seconds into model, environment, earlier (attempts at a stage that were broken off) and
    orchestration (everything else); `errors` counts episodes lost to infrastructure, which are in no denominator."""

    round: str
    target: str
    data_hash: str
    seed: int
    base: Rate | None = None
    routed: Rate | None = None
    noop: Rate | None = None
    difference: Difference | None = None
    families: dict[str, FamilyFigures] = {}
    capabilities: list[CapabilityFigures] = []
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
    provenance: Provenance = Provenance()

    def as_json(self) -> dict[str, Any]:
        """The JSON-able form that `trace-agent status --json` prints."""
        return self.model_dump(mode="json")


def headline(figures: RoundFigures) -> str:
    """The verdict in two or three sentences, from the figures alone: what improved, by how much and how surely, or that
    nothing did and why."""
    promoted = [c.name for c in figures.capabilities if c.verdict == "promoted"]
    adapters = f" Promoted: {', '.join(promoted)}." if promoted else " No adapter was promoted: the base model goes on."
    difference, base, routed = figures.difference, figures.base, figures.routed
    if difference is None or base is None or routed is None:
        return f"No before-and-after comparison was made. {why_nothing(figures)}"
    span = f" (95 % interval {difference.low:+.1f} to {difference.high:+.1f}" if difference.low is not None else " ("
    span += f"{', ' if difference.low is not None else ''}{p_phrase(difference.p)}, {difference.tasks or 'all'} tasks)"
    rates = f"from {percent(base.success)} to {percent(routed.success)}: {difference.points:+.1f} points{span}."
    if difference.p <= 0.05 and difference.points > 0:
        return f"Success on {figures.target} rose {rates}{adapters}"
    if difference.p <= 0.05 and difference.points < 0:
        return f"Success on {figures.target} fell {rates}{adapters}"
    if difference.points == 0:
        moved = f"Success on {figures.target} stayed at {percent(base.success)}{span}."
    else:
        moved = f"Success on {figures.target} went {rates} That is within noise."
    power = f" A change below {difference.mde:.1f} points could not have been seen reliably."
    return moved + power + (adapters if promoted else f" {why_nothing(figures)}")


def why_nothing(figures: RoundFigures) -> str:
    """One sentence on why no adapter is served."""
    if figures.stopped:
        return f"The round stopped early: {figures.stopped}"
    if any(c.verdict == "promoted" for c in figures.capabilities):
        return "Adapters were promoted on validation; see the capabilities below."
    chosen = [c for c in figures.capabilities if c.selected]
    if not figures.capabilities:
        return "No candidate capability was found."
    if not chosen:
        return f"None of {len(figures.capabilities)} candidates reached the selection thresholds."
    reasons = ", ".join(f"{c.name} ({c.verdict})" for c in chosen)
    return f"No adapter was promoted: {reasons}."


def percent(rate: float | None) -> str:
    """A rate as text, such as `42.5 %`."""
    return "–" if rate is None else f"{100 * rate:.1f} %"


def p_phrase(p: float) -> str:
    """`p = 0.012` or `p < 0.0001`."""
    return f"p {p_text(p)}" if p < 0.0001 else f"p = {p_text(p)}"


def p_text(p: float) -> str:
    """A p-value as text, to the digits that a permutation test gives."""
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """Seconds as `12.3 s`, `4 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"
