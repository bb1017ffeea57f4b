"""All settings in one object, read from `trace.toml`, then the environment (`TRACE_...`), then what the caller gives.

A profile (`profiles/NAME.toml`) gives the defaults of a kind of machine; later sources override it. One dial, `budget`
(rollouts of a round), derives how much is trained. `docs/1-running.md` lists the few variables that are not settings.
"""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from errors import ConfigurationError

SCRIPTED_USER = "scripted"
TRANSFER = 24
PROFILES = Path(__file__).parent / "profiles"
Read = TypeVar("Read", bound=BaseSettings)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutSettings(_Part):
    """How tasks of the target are played, in diagnosis and evaluation alike."""

    trials: int = Field(2, ge=1, description="episodes per diagnosis task, each with its own seed")
    tasks: int = Field(0, ge=0, description="most tasks of a split that are played, spread over its families; 0 = all")
    temperature: float = Field(0.3, ge=0, le=2)
    max_tokens: int = Field(32, ge=1, description="longest turn")
    rows: int = Field(64, ge=1, description="episodes computed at once")


class SelectionSettings(_Part):
    """Section 3 of the method."""

    rho: float = Field(0.10, ge=0, le=1)
    delta: float = Field(0.20, ge=-1, le=1)
    runs: int = Field(10, ge=1)
    required: int = Field(8, ge=1, description="K of N")
    most: int = Field(3, ge=1, description="capabilities trained in one round")


class CalibrationSettings(_Part):
    """Section 4 of the method. `informative_alone` accepts below the success band when groups are informative."""

    seeds: int = Field(100, ge=2)
    samples: int = Field(16, ge=2)
    low: float = 0.2
    high: float = 0.6
    spread: float = 0.05
    uniform: float = 0.2
    informative: float = 0.5
    informative_alone: bool = False
    distinct: int = 100
    policy_episodes: int = 100
    retention_share: float = Field(1 / 3, ge=0, lt=1)


class TrainSettings(_Part):
    """Section 5 of the method; `steps` 0 is derived from the budget."""

    steps: int = Field(0, ge=0)
    groups: int = Field(6, ge=1)
    group_size: int = Field(8, ge=2)
    collections: int = Field(3, ge=1, description="how often groups with equal rewards are replaced")
    solved: float = Field(0.95, gt=0, le=1, description="mean success over two steps at which training ends early")
    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    schedule: Literal["constant", "linear"] = Field("constant", description="linear falls to 0 after the last step")
    temperature: float = Field(0.7, gt=0)
    upper_layers: int | None = 15
    micro_batch: int = Field(24, ge=1)
    shuffled: bool = Field(False, description="deal the advantages of a group out at random: a placebo")
    scaled: bool = Field(True, description="advantages in the standard deviations of their group, else as they are")
    delta: float = Field(0.0, ge=0, description="TRL's upper bound of the ratio where advantages are negative; 0: none")
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


class EvaluationSettings(_Part):
    """Section 7 of the method."""

    trials: int = Field(2, ge=1, description="episodes per test task")
    validation_trials: int = Field(2, ge=1, description="episodes per validation task (tasks tell more)")
    margin: float = Field(2.0, ge=0, description="points another family may fall by")
    own_tasks: int = Field(
        60, ge=0, description="most validation tasks that are drawn of the families of a capability, for power"
    )
    alpha: float = Field(0.05, gt=0, lt=1)
    fresh: int = Field(
        32, ge=4, le=10_000, description="fresh seeds that an adapter is measured on in its own environment"
    )


class PolicySettings(_Part):
    """Where turns are sampled. `vllm` needs servers (docs/6-serving.md); `url` may name several, separated by commas.
    Only `backend` is part of what a round is: the rest says where things are."""

    backend: Literal["local", "vllm"] = "local"
    url: str = "http://127.0.0.1:8000"
    model: str = Field("base", description="the name that the base is served under")
    api_key_env: str = Field("", description="the variable that holds the servers' key")
    concurrency: int = Field(64, ge=1, le=1024, description="turns in flight")
    seconds: float = Field(300.0, gt=0, description="longest wait for one turn")
    lora_folder: Path | None = Field(
        None, description="where adapters are put for the servers; under home if not given"
    )
    server_folder: str = Field("", description="that folder as the servers see it, if elsewhere")
    max_lora_rank: int = Field(16, ge=1, description="the servers' --max-lora-rank")

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers."""
        return tuple(url.strip() for url in self.url.split(",") if url.strip())


class AnalystSettings(_Part):
    """Stages 2 and 4 by a language model (docs/5-synthesis.md). `checks` needs none of it.

    The N runs and K are `selection.runs` and `selection.required`, with either analyst. A cap of 0 is no cap; caps hold
    for the round, the calls of a simulated user included. The key is named, never given: `api_key_variable` is the name
    of an environment variable.
    """

    kind: Literal["checks", "llm"] = "checks"
    model: str = Field("", description="LiteLLM's name of a model, such as openai/NAME or hosted_vllm/NAME")
    api_base: str = Field("", description="address of a server of your own, up to /v1")
    api_key_variable: str = Field("", description="name of the environment variable that holds the key")
    structured: Literal["schema", "object", "text"] = Field("schema", description="how a schema is asked for")
    max_tokens: int = Field(8192, ge=16, description="longest reply")
    temperature: float = Field(0.8, gt=0, le=2, description="of raters, judges and writers")
    send_temperature: bool = Field(True, description="off for models that take no temperature")
    blind: bool = Field(True, description="raters do not see the outcome")
    candidates: int = Field(10, ge=1, le=10)
    batch: int = Field(4, ge=1, description="trajectories labelled in one request")
    trajectory_tokens: int = Field(2000, ge=100, description="most that one trajectory is compacted to")
    concurrency: int = Field(4, ge=1)
    attempts: int = Field(5, ge=1, description="tries of a call that fails for a while")
    backoff_seconds: float = Field(1.0, ge=0)
    deadline_seconds: float = Field(120.0, gt=0, description="of one call, with all its tries")
    max_calls: int = Field(0, ge=0)
    max_total_tokens: int = Field(0, ge=0)
    max_dollars: float = Field(0.0, ge=0)
    prompt_price: float | None = Field(None, ge=0, description="dollars per million tokens; LiteLLM's table otherwise")
    sampled_price: float | None = Field(None, ge=0)


class SynthesizerSettings(_Part):
    """Stage 4: composed from the target's own generators, or written by a language model as modules: the analyst's, or
    another one, so that who writes an environment is not who judged that it is needed. That one has an address, a key
    and prices of its own; everything else, the caps among it, is the analyst's."""

    kind: Literal["generators", "llm"] = "generators"
    versions: int = Field(5, ge=1, le=5, description="attempts before a capability is unsynthesizable")
    model: str = Field("", description="LiteLLM's name of the model that writes; empty: analyst.model")
    api_base: str = Field("", description="address of a server of your own, up to /v1")
    api_key_variable: str = Field("", description="name of the environment variable that holds the key")
    prompt_price: float | None = Field(None, ge=0, description="dollars per million tokens; LiteLLM's table otherwise")
    sampled_price: float | None = Field(None, ge=0)


class LimitSettings(_Part):
    """The most that one round may take, all of its runs together; 0 is no limit. Dollars are `analyst.max_dollars`.
    What a limit stops is gone on with by the same command and a larger limit (docs/8-unattended.md)."""

    rollouts: int = Field(0, ge=0, description="episodes")
    tokens: int = Field(0, ge=0, description="tokens read and sampled, those of language models included")
    hours: float = Field(0.0, ge=0, description="hours at work")
    disk_gib: float = Field(0.0, ge=0, description="GiB of the round's own files")
    idle_minutes: float = Field(60.0, ge=0, description="without any progress after which a hanging run ends itself")
    training_minutes: float = Field(
        0.0, ge=0, description="longest training of a capability, which then has a process of its own"
    )


class UnattendedSettings(_Part):
    """What a round and the daily watch do by themselves, and whom they tell. The webhook's address is a secret: the
    environment variable that holds it is named, never the address."""

    approve: bool = Field(False, description="a person approves in Prefect's UI before a release is promoted")
    approval_hours: float = Field(24.0, gt=0, description="how long a round waits for that")
    roll_back: bool = Field(False, description="the watch rolls a release back that has fallen significantly")
    watch_tasks: int = Field(48, ge=4, description="fresh tasks that the watch plays")
    webhook_variable: str = Field("", description="name of the variable with the webhook's address")
    webhook_format: Literal["json", "slack"] = Field("json", description="slack: the field text alone")


# How the analyst is reached and what it may cost decides no figure: a round goes on when they are changed.
_TRANSPORT = (
    "api_base", "api_key_variable", "concurrency", "attempts", "backoff_seconds", "deadline_seconds", "max_calls",
    "max_total_tokens", "max_dollars", "prompt_price", "sampled_price",
)  # fmt: skip


# How rounds were trained before there was a choice: they are found under the same settings.
_TRAINED_BEFORE = {"shuffled": False, "scaled": True, "delta": 0.0, "transfer": TRANSFER}
# Where things are stored, what a round may take and whom it tells decide none either.
_PLACES = ("home", "database", "tracking", "traces", "policy", "limits", "unattended")


class MachineSettings(BaseSettings):
    """What belongs to a machine and not to a round: where models and data lie, how generated code is confined, who may
    call the gateway. None of it is part of a round's identity, and profiles do not set it.

    `Settings` has all of these fields. Code below the stages that is called without `Settings` uses
    `machine_settings()`, which reads the same variables and the same `trace.toml`.
    """

    model_config = SettingsConfigDict(env_prefix="TRACE_", env_nested_delimiter="__", extra="ignore", frozen=True)

    sandbox: Literal["", "container", "bubblewrap", "process"] = Field(
        "", description="level that confines generated code; empty: the strongest that works here"
    )
    sandbox_image: str = Field("", description="image with python3 for the level container")
    cache: str = Field("", description="folder for converted models; empty: trace-agent in the user's cache folder")
    gateway_keys: SecretStr = Field(SecretStr(""), description="keys of the gateway, commas between")
    metrics_port: int = Field(0, ge=0, le=65_535, description="a round's process answers /metrics there; 0: nowhere")
    toolsandbox: str = Field("", description="a checkout of ToolSandbox; empty: the installed package")
    tau2_tasks: str = Field("", description="a folder with other task files of tau2; empty: the package's own")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, Path("trace.toml"))


class Settings(MachineSettings):
    """Everything a round depends on, and what `MachineSettings` adds. `training_steps` is what the budget derives."""

    model_config = SettingsConfigDict(extra="forbid")

    target: str = "shop"
    target_user: str = Field(SCRIPTED_USER, description="who plays the simulated user: scripted, or litellm:MODEL")
    profile: str = "laptop"
    seed: int = Field(0, ge=0)
    budget: int = Field(2400, ge=1, description="rollouts of one round")
    base_model: str = Field("smollm2-135m", description="the embedded model, a folder, or a Hugging Face id")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    calls: Literal["compact", "json"] = "compact"
    home: Path = Path("runs")
    database: str = ""
    tracking: str = ""
    traces: int = Field(2, ge=0, le=16, description="episodes of each GRPO group that MLflow shows as traces; 0: none")
    router: Literal["retrieval", "label", "both", "auto", "off"] = "auto"
    policy: PolicySettings = PolicySettings()
    rollout: RolloutSettings = RolloutSettings()
    selection: SelectionSettings = SelectionSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    train: TrainSettings = TrainSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    analyst: AnalystSettings = AnalystSettings()
    synthesizer: SynthesizerSettings = SynthesizerSettings()
    limits: LimitSettings = LimitSettings()
    unattended: UnattendedSettings = UnattendedSettings()

    @field_validator("target_user")
    @classmethod
    def _empty_is_scripted(cls, value: str) -> str:
        return value or SCRIPTED_USER

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls, Path("trace.toml"))
        name = str(init_settings().get("profile") or env_settings().get("profile") or file().get("profile") or "laptop")
        path = PROFILES / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.toml")))
            raise ConfigurationError(f"profile {name!r} does not exist; choose from {known}")
        return init_settings, env_settings, file, TomlConfigSettingsSource(settings_cls, path)

    @property
    def folder(self) -> Path:
        """Where rounds, the database and the registry of the embedded default lie (absolute)."""
        return self.home.expanduser().resolve()

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.folder / 'trace.db'}"

    @property
    def tracking_uri(self) -> str:
        return self.tracking or f"sqlite:///{self.folder / 'mlflow.db'}"

    @property
    def asks_a_model(self) -> bool:
        """Whether any stage of a round needs a language model besides the one that is trained."""
        return "llm" in (self.analyst.kind, self.synthesizer.kind)

    @property
    def judge(self) -> str:
        """The model that names, labels and judges capabilities; "" where none does."""
        return self.analyst.model if self.analyst.kind == "llm" else ""

    @property
    def author(self) -> str:
        """The model that writes environments; "" where none does."""
        return (self.synthesizer.model or self.analyst.model) if self.synthesizer.kind == "llm" else ""

    @property
    def lora_folder(self) -> Path:
        """Where adapters are put for vLLM servers to read (absolute)."""
        given = self.policy.lora_folder
        return self.folder / "served" if given is None else given.expanduser().resolve()

    def training_steps(self) -> int:
        """Optimizer steps per capability: what is given, or 36 % of the budget shared among the capabilities.

        Raises `ConfigurationError` when that is not one whole batch of groups.
        """
        batch = self.train.groups * self.train.group_size
        steps = self.train.steps or math.floor(0.36 * self.budget / (self.selection.most * batch))
        if steps < 1:
            need = math.ceil(self.selection.most * batch / 0.36)
            raise ConfigurationError(
                f"budget {self.budget} cannot fill one batch of {self.train.groups} groups x "
                f"{self.train.group_size} rollouts for {self.selection.most} capabilities; "
                f"give at least {need}, or fewer capabilities or smaller groups"
            )
        return steps

    def identity(self) -> dict[str, Any]:
        """What decides a round's figures, JSON-able: everything but where things are stored, how the analyst is
        reached, and what may be spent."""
        given = self.model_dump(mode="json", exclude={*_PLACES, *MachineSettings.model_fields})
        kept = given["analyst"] if self.asks_a_model else {"kind": self.analyst.kind}
        given["analyst"] = {name: value for name, value in kept.items() if name not in _TRANSPORT}
        made = given["synthesizer"]
        kept_of = made if self.author and made["model"] else {name: made[name] for name in ("kind", "versions")}
        given["synthesizer"] = {name: value for name, value in kept_of.items() if name not in _TRANSPORT}
        for name, before in _TRAINED_BEFORE.items():
            if given["train"][name] == before:
                del given["train"][name]
        # The scripted user and the local model are what rounds had before there was a choice: they are found under the
        # same settings.
        if self.target_user == SCRIPTED_USER:
            del given["target_user"]
        return given if self.policy.backend == "local" else given | {"policy": {"backend": self.policy.backend}}


def load_settings(**given: Any) -> Settings:
    """Settings with `given` on top (None values are left out); one clear `ConfigurationError` for what is wrong."""
    settings = _read(Settings, **{k: v for k, v in given.items() if v is not None})
    if settings.selection.required > settings.selection.runs:
        raise ConfigurationError(
            f"selection.required = {settings.selection.required} of only {settings.selection.runs} runs; lower it"
        )
    if settings.policy.backend == "vllm" and settings.train.rank > settings.policy.max_lora_rank:
        raise ConfigurationError(
            f"train.rank = {settings.train.rank} is above policy.max_lora_rank = {settings.policy.max_lora_rank}, the "
            "servers' --max-lora-rank; lower the one or raise the other (and start the servers with it)"
        )
    settings.training_steps()
    return settings


def machine_settings() -> MachineSettings:
    """The machine's settings, for code that is called without `Settings`. Raises `ConfigurationError`."""
    return _read(MachineSettings)


def _read(kind: type[Read], **given: Any) -> Read:
    """Settings of a kind; one `ConfigurationError` for what is wrong, which shows no key."""
    try:
        return kind(**given)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        value = "(not shown)" if "key" in where.lower() else repr(first.get("input"))
        raise ConfigurationError(f"setting {where} = {value}: {first['msg']}; correct it and start again") from None
    except SettingsError as problem:
        raise ConfigurationError(f"{problem}; correct that variable and start again") from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigurationError(f"trace.toml cannot be read: {problem}; correct it and start again") from None


def writable_folder(folder: Path) -> Path:
    """Create `folder` and prove that a file can be written there."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as problem:
        raise ConfigurationError(
            f"{folder} cannot be written ({problem.strerror}); give another folder with --home or free space"
        ) from None
    return folder
