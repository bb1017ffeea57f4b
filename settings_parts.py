"""The parts of the settings (`settings.py`): fields that belong together, with defaults and what they mean."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from errors import ConfigurationError

TRANSFER = 24
# Above this a ratio is clipped where the advantage is positive (1 + `TrainingSettings.clip_high`).
CLIPPED = 1.28


def _names_a_variable(value: str) -> str:
    if value and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", value):
        raise PydanticCustomError(
            "no_variable", "it holds no variable's name; put the key into a variable and its name here"
        )
    return value


# What is no name is most likely the key itself: no error shows the value (`settings._read`).
VariableName = Annotated[str, AfterValidator(_names_a_variable)]


def shown_variable(name: str) -> str:
    """The name as errors about a variable that is not set show it. Some keys are letters and digits alone, and such a
    key may stand where its variable's name belongs: what is not in capitals is not shown."""
    return repr(name) if name == name.upper() else "(not shown, as it may be a key)"


def read_toml(path: Path) -> dict[str, Any]:
    """What a file sets; nothing where there is none. Raises `ConfigurationError` with the file's name for one that
    cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}; correct it and start again") from None


def shown(value: object) -> str:
    """A value as an error shows it: not at all where it may hold a password, as an address does between // and @."""
    return "(not shown)" if re.search(r"//.*@|password", repr(value), re.IGNORECASE) else repr(value)


def sqlite_url(file: Path) -> str:
    """The URL of a SQLite file, as SQLAlchemy reads it: a `?` in the path would end a plain one, and %41 be an A. The
    rest stays as it is, for MLflow makes the folder that a URL names without reading it as one (an empty one then).
    Raises `ConfigurationError` for a path that is no UTF-8, as a URL has to be."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the path of {str(file)!r} is no UTF-8, so no database can lie there; give another folder with --home"
        ) from None
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"


class Part(BaseModel):
    """A part of the settings, or the parameters of a run: a misspelt name in it is refused, not passed over."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutSettings(Part):
    """How tasks of the target are played, in diagnosis and evaluation alike."""

    trials: int = Field(2, ge=1, description="episodes per diagnosis task, each with its own seed")
    tasks: int = Field(0, ge=0, description="most tasks of a split that are played, spread over its families; 0 = all")
    temperature: float = Field(0.3, ge=0, le=2, description="of sampling; a training has its own")
    max_tokens: int = Field(32, ge=1, description="longest turn")
    rows: int = Field(64, ge=1, description="episodes computed at once")


class SelectionSettings(Part):
    """Section 3 of the method."""

    rho: float = Field(0.10, ge=0, le=1, description="least share of failed episodes that lack the capability")
    delta: float = Field(
        0.20,
        ge=-1,
        le=1,
        description="least lead of failed over successful ones in how many of those it concerns lack it",
    )
    runs: int = Field(10, ge=1, description="labelling runs (N)")
    required: int = Field(8, ge=1, description="runs that have to reach rho and delta (K of N)")
    most: int = Field(3, ge=1, description="capabilities trained in one round")


class CalibrationSettings(Part):
    """Section 4 of the method. `informative_alone` accepts below the success band when groups are informative."""

    # At most as many seeds as one round's are from the next one's.
    seeds: int = Field(100, ge=2, le=100_000, description="scenarios that are played")
    samples: int = Field(16, ge=2, description="episodes of each scenario: a group")
    low: float = Field(0.2, ge=0, le=1, description="the band: least success, and least mean reward")
    high: float = Field(0.6, ge=0, le=1, description="the band: most success, and most mean reward")
    spread: float = Field(0.05, ge=0, description="least standard deviation of the rewards")
    uniform: float = Field(
        0.2, ge=0, le=1, description="most groups all of whose episodes succeed; and most that earn nothing"
    )
    informative: float = Field(0.5, ge=0, le=1, description="least share of groups whose rewards differ")
    informative_alone: bool = Field(False, description="below the band informative groups and one success are enough")
    distinct: int = Field(
        100, ge=0, description="different scenarios that an environment needs, of twice as many seeds"
    )
    policy_episodes: int = Field(100, ge=1, description="episodes of each scripted policy that checks an environment")
    retention_share: float = Field(1 / 3, ge=0, lt=1, description="share of scenarios that keep what is known")

    @model_validator(mode="after")
    def _band(self) -> CalibrationSettings:
        if self.low > self.high:
            raise PydanticCustomError(
                "empty_band",
                f"calibration.low = {self.low:g} is above calibration.high = {self.high:g}, so no environment "  # type: ignore[arg-type]
                "could be trained on; lower the one or raise the other",
            )
        return self


class TrainSettings(Part):
    """Section 5 of the method; `steps` 0 is derived from the budget."""

    steps: int = Field(0, ge=0, description="optimizer steps of a training; 0: derived from budget")
    groups: int = Field(6, ge=1, description="groups of a step, each on one scenario")
    group_size: int = Field(8, ge=2, description="rollouts of a group")
    collections: int = Field(3, ge=1, description="how often groups with equal rewards are replaced")
    patience: int = Field(
        0, ge=0, description="how often more where none could be learnt from yet, before the training ends"
    )
    solved: float = Field(0.95, gt=0, le=1, description="mean success over two steps at which training ends early")
    rank: int = Field(16, ge=1, description="of the LoRA adapter")
    alpha: int = Field(32, ge=1, description="its scale: what it adds is multiplied by alpha / rank")
    learning_rate: float = Field(1e-3, gt=0, description="of a training that begins from the base")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="linear falls to 0 with the steps, or the episodes that are paid for"
    )
    temperature: float = Field(0.7, gt=0, description="of sampling in a training")
    upper_layers: int | None = Field(15, ge=0, description="layers that are adapted, from the last down; 0: all")
    micro_batch: int = Field(
        24, ge=1, description="rows of a backward pass; on a CPU more of them where they are short"
    )
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="tokens of a backward pass behind the shared prefix, instead of rows"
    )
    shuffled: bool = Field(False, description="deal the advantages of a group out at random: a placebo")
    scaled: bool = Field(True, description="advantages in the standard deviations of their group, else as they are")
    delta: float = Field(
        0.0,
        ge=0,
        description=f"TRL's upper bound of the ratio where advantages are negative, above {CLIPPED}; 0: none",
    )
    candidates: int = Field(3, ge=1, description="checkpoints, the last among them, of which one is chosen")
    hints: float = Field(
        0.5,
        ge=0,
        le=0.5,
        description="share of a group's rollouts with advice where the policy never succeeds; 0: none",
    )
    transfer: int = Field(
        TRANSFER,
        ge=0,
        description="most episodes on diagnosis tasks that lack the capability, after a third of training; 0: none",
    )
    choosing: int = Field(
        16, ge=2, le=10_000, description="fresh scenarios that choose it; half as many again are for retention"
    )
    carry: bool = Field(
        False,
        description="begin from whichever weights do best on the environment: the base, the champion, other adapters",
    )
    carry_rate: float | None = Field(
        None, gt=0, description="learning rate of a training that goes on from an adapter; none: learning_rate"
    )
    focus: bool = Field(
        False,
        description="draw a capability's families by what calibration found to be learnt in each, instead of alike",
    )
    generalist: int = Field(
        0,
        ge=0,
        description="passes in which one more adapter, the generalist, learns from all that has succeeded; 0: none",
    )
    demonstrations: int = Field(
        0,
        ge=0,
        le=10_000,
        description="conversations of each family that it learns from, with reference solutions for what has not "
        "succeeded; it is then made first, and other trainings go on from it; 0: from successes alone, last",
    )
    shown: int = Field(
        0, ge=0,
        description="episodes of each family that what is live does not master, played with advice, of which a "
        "generalist is made first, twice over, or once behind what learnt demonstrations, beside them; 0: none",
    )  # fmt: skip
    practice: int = Field(
        0, ge=0, description="steps of GRPO in which one that is made first then practises what it half knows; 0: none"
    )
    recall_rate: float | None = Field(
        None, gt=0, description="learning rate where nothing but successes is learnt from; none: learning_rate"
    )
    recall_steps: int = Field(
        0, ge=0, description="least steps of that: passes are added until there are as many; 0: the passes alone"
    )

    @property
    def carries(self) -> bool:
        """Whether a round's trainings may begin from one another, and so come one after another."""
        return self.carry or self.generalist_first

    @property
    def generalist_first(self) -> bool:
        """Whether a first round makes its generalist before it looks for what is lacking: from demonstrations, or from
        what it is shown with advice."""
        return bool(self.generalist and (self.demonstrations or self.shows))

    @property
    def practises(self) -> bool:
        """Whether one that is made first practises then."""
        return bool(self.practice and self.generalist_first)

    @property
    def shows(self) -> bool:
        """Whether what is made first is shown scenarios with advice."""
        return bool(self.shown and self.hints)

    @field_validator("delta")
    @classmethod
    def _above_the_clip(cls, value: float) -> float:
        if 0 < value <= CLIPPED:
            raise PydanticCustomError(
                "below_the_clip",
                f"so low a bound cuts what positive advantages teach, too, whose ratio is clipped at {CLIPPED}, and "  # type: ignore[arg-type]
                f"below 1 nothing is learnt; give more than {CLIPPED}, or 0 for none",
            )
        return value

    @field_validator("upper_layers")
    @classmethod
    def _none_is_all(cls, value: int | None) -> int | None:
        """TOML has no word for nothing."""
        return value or None


class EvaluationSettings(Part):
    """Section 7 of the method."""

    trials: int = Field(2, ge=1, description="episodes per test task")
    validation_trials: int = Field(2, ge=1, description="episodes per validation task (tasks tell more)")
    margin: float = Field(2.0, ge=0, description="points another family may fall by")
    own_tasks: int = Field(
        60, ge=0, description="most validation tasks that are drawn of the families of a capability, for power"
    )
    routing: int = Field(
        0, ge=0, description="diagnosis tasks that each new adapter plays for the router, at equal distances; 0: all"
    )
    alpha: float = Field(0.05, gt=0, lt=1, description="level of significance of the gate")
    fresh: int = Field(
        32, ge=4, le=10_000, description="fresh seeds that an adapter is measured on in its own environment"
    )

    def routed(self, diagnosis: int) -> int:
        """How many of so many diagnosis tasks a new adapter plays for the router."""
        return min(diagnosis, self.routing or diagnosis)


class PolicySettings(Part):
    """Where turns are sampled. `vllm` needs servers (docs/6-serving.md); `url` may name several, separated by commas.
    Only `backend` is part of what a round is: the rest says where things are."""

    backend: Literal["local", "vllm"] = Field("local", description="this process samples, or vLLM servers")
    url: str = Field("http://127.0.0.1:8000", description="addresses of the servers, with commas between")
    model: str = Field("base", description="the name that the base is served under")
    api_key_env: VariableName = Field("", description="the variable that holds the servers' key")
    concurrency: int = Field(64, ge=1, le=1024, description="turns in flight")
    seconds: float = Field(300.0, gt=0, description="longest wait for one turn")
    stall_seconds: float = Field(
        60.0, gt=0, description="without work after which a server that turns wait on loses them to the others"
    )
    lora_folder: Path | None = Field(
        None, description="where adapters are put for the servers; under home if not given"
    )
    server_folder: str = Field("", description="that folder as the servers see it, if elsewhere")
    max_lora_rank: int = Field(16, ge=1, description="the servers' --max-lora-rank")

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers."""
        return tuple(url.strip() for url in self.url.split(",") if url.strip())


class AnalystSettings(Part):
    """Stages 2 and 4 by a language model (docs/5-synthesis.md). `checks` needs none of it.

    The N runs and K are `selection.runs` and `selection.required`, with either analyst. A cap of 0 is no cap; caps hold
    for the round, the calls of a simulated user included. The key is named, never given: `api_key_variable` is the name
    of an environment variable.
    """

    kind: Literal["checks", "llm"] = Field("checks", description="who says what is lacking: checks, or a model")
    model: str = Field("", description="LiteLLM's name of a model, such as openai/NAME or hosted_vllm/NAME")
    api_base: str = Field("", description="address of a server of your own, up to /v1")
    api_key_variable: VariableName = Field("", description="name of the environment variable that holds the key")
    structured: Literal["schema", "object", "text"] = Field("schema", description="how a schema is asked for")
    max_tokens: int = Field(8192, ge=16, description="longest reply")
    temperature: float = Field(0.8, gt=0, le=2, description="of raters, judges and writers")
    send_temperature: bool = Field(True, description="off for models that take no temperature")
    blind: bool = Field(True, description="raters do not see the outcome")
    candidates: int = Field(10, ge=1, le=10, description="capabilities that it names at most")
    batch: int = Field(4, ge=1, description="trajectories labelled in one request")
    trajectory_tokens: int = Field(2000, ge=100, description="most that one trajectory is compacted to")
    concurrency: int = Field(4, ge=1, description="calls at once")
    attempts: int = Field(5, ge=1, description="tries of a call that fails for a while")
    backoff_seconds: float = Field(1.0, ge=0, description="wait before the second try; it doubles with each")
    deadline_seconds: float = Field(120.0, gt=0, description="of one call, with all its tries")
    max_calls: int = Field(0, ge=0, description="cap of a round; 0: none")
    max_total_tokens: int = Field(0, ge=0, description="cap of a round, read and sampled; 0: none")
    max_dollars: float = Field(0.0, ge=0, description="cap of a round; 0: none")
    prompt_price: float | None = Field(
        None, ge=0, description="dollars per million tokens that are read; none: LiteLLM's table"
    )
    sampled_price: float | None = Field(None, ge=0, description="the same of sampled tokens")


class SynthesizerSettings(Part):
    """Stage 4: composed from the target's own generators, or written by a language model as modules: the analyst's, or
    another one, so that who writes an environment is not who judged that it is needed. That one has an address, a key
    and prices of its own; everything else, the caps among it, is the analyst's."""

    kind: Literal["generators", "llm"] = Field("generators", description="who makes environments: llm is a model")
    versions: int = Field(5, ge=1, le=5, description="attempts before a capability is unsynthesizable")
    model: str = Field("", description="LiteLLM's name of the model that writes; empty: analyst.model")
    api_base: str = Field("", description="address of a server of your own, up to /v1")
    api_key_variable: VariableName = Field("", description="name of the environment variable that holds the key")
    prompt_price: float | None = Field(
        None, ge=0, description="dollars per million tokens that are read; none: LiteLLM's table"
    )
    sampled_price: float | None = Field(None, ge=0, description="the same of sampled tokens")


class LimitSettings(Part):
    """The most that one round may take, all of its runs together; 0 is no limit. Dollars are `analyst.max_dollars`.
    The same command with a larger limit resumes what a limit has stopped (docs/9-unattended.md)."""

    rollouts: int = Field(0, ge=0, description="episodes")
    tokens: int = Field(0, ge=0, description="tokens read and sampled, those of language models included")
    hours: float = Field(0.0, ge=0, description="hours at work")
    disk_gib: float = Field(0.0, ge=0, description="GiB of the round's own files")
    idle_minutes: float = Field(60.0, ge=0, description="without any progress after which a hanging run ends itself")
    training_minutes: float = Field(
        0.0, ge=0, description="longest training of a capability, which then has a process of its own"
    )


class DeviceSettings(Part):
    """What trains, and what it may take (docs/10-scale.md). It decides no figure beyond rounding."""

    processes: int = Field(0, ge=0, description="processes that train together; 0: one for each visible GPU")
    trainings: int = Field(
        1, ge=1, description="capabilities that are trained at once, each in processes of its own on its share"
    )
    cpu: bool = Field(False, description="a profile for GPUs trains on the processor, where there is none")
    shard: bool = Field(False, description="each process that trains holds a part of the base's weights; needs vLLM")
    recompute: bool = Field(False, description="gradient checkpointing: less memory for a third more time")
    sleep: bool = Field(False, description="vLLM servers sleep in backward passes: they share a GPU with the training")
    memory_gib: float = Field(0.0, ge=0, description="memory for a training; 0: what the GPU, or the machine, has")


class UnattendedSettings(Part):
    """What a round and the daily watch do by themselves, and whom they tell. The webhook's address is a secret: the
    environment variable that holds it is named, never the address."""

    approve: bool = Field(False, description="a person approves in Prefect's UI before a release is promoted")
    approval_hours: float = Field(24.0, gt=0, description="how long a round waits for that")
    roll_back: bool = Field(False, description="the watch rolls a release back that has fallen significantly")
    watch_tasks: int = Field(48, ge=4, description="fresh tasks that the watch plays")
    webhook_variable: VariableName = Field("", description="name of the variable with the webhook's address")
    webhook_format: Literal["json", "slack"] = Field("json", description="slack: the field text alone")
