"""All settings in one object, read from `trace.toml`, then the environment (`TRACE_...`), then what the caller gives.

A profile (`profiles/NAME.toml`) gives the defaults of a kind of machine; later sources override it. One dial, `budget`,
derives how many steps a training makes; it does not limit a round. A name that is no setting's is refused, in a file
and in the environment; `NOT_SETTINGS` has the few variables that others read.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from errors import ConfigurationError
from settings_parts import (
    TRANSFER,
    AnalystSettings,
    CalibrationSettings,
    DeviceSettings,
    EvaluationSettings,
    LimitSettings,
    PolicySettings,
    RolloutSettings,
    SelectionSettings,
    SynthesizerSettings,
    TrainSettings,
    UnattendedSettings,
    read_toml,
    shown,
    sqlite_url,
)

SCRIPTED_USER = "scripted"
# Of a seed or a budget. Prefect keeps what a run was given, and one run with a number beyond 64 bits is enough for its
# page to show no run at all.
LARGEST = 2**31 - 1
BUDGET = "36 % of it are rollouts of a round's trainings, which gives their steps; it does not limit a round"
PROFILES = Path(__file__).parent / "profiles"
FILE = Path("trace.toml")
PREFIX = "TRACE_"
# Variables with the settings' prefix that are no settings, and the file that reads each.
NOT_SETTINGS = {
    "TRACE_COMMIT": "flows/code_version.py",
    "TRACE_LOG_JSON": "models/telemetry/logs.py",
    "TRACE_POOL": "prefect.yaml",
    "TRACE_PROJECT": "prefect.yaml",
    "TRACE_CANARY": "tests/environments/sandbox/test_sandbox.py",
    "TRACE_SCREENSHOTS": "tests/integration/test_mlflow_pages.py",
    "TRACE_TEST_STEP": "tests/tasks/shards/many_target.py",
    "TRACE_VLLM_PYTHON": "tests/integration/vllm_servers.py",
}
Read = TypeVar("Read", bound=BaseSettings)
_ALIKE = 0.7  # difflib's ratio, from which one name may be meant by another

# A round is found again by what decides its figures (`Settings.identity`). Three kinds of settings are left out of it.
# How a language model is reached and what it may cost:
_TRANSPORT = (
    "api_base", "api_key_variable", "concurrency", "attempts", "backoff_seconds", "deadline_seconds", "max_calls",
    "max_total_tokens", "max_dollars", "prompt_price", "sampled_price",
)  # fmt: skip
# Fields that are younger than the first rounds, with the value that those were played with: at that value a field is
# left out, so that rounds which were stored without it are found all the same.
_BEFORE: dict[str, dict[str, object]] = {
    "train": {
        "shuffled": False, "scaled": True, "delta": 0.0, "transfer": TRANSFER, "micro_batch_tokens": None,
        "carry": False, "generalist": 0, "demonstrations": 0, "recall_rate": None,
        "recall_steps": 0, "carry_rate": None, "focus": False, "patience": 0,
        "shown": 0, "practice": 0,
    },
    "evaluation": {"routing": 0},
}  # fmt: skip
# Where things are stored and computed, what a round may take and whom it tells.
_RUNNER = ("runner", "runner_address", "runner_workers")
_PLACES = ("home", "files", "database", "tracking", "traces", "policy", "limits", "devices", "unattended", *_RUNNER)


class MachineSettings(BaseSettings):
    """What belongs to a machine and not to a round: where models and data lie, how generated code is confined, who may
    call the gateway. None of it is part of a round's identity, and profiles do not set it.

    `Settings` has all of these fields. Code below the stages that is called without `Settings` uses
    `machine_settings()`, which reads the same variables and the same `trace.toml`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="ignore", frozen=True)

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
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_toml(FILE))


class Settings(MachineSettings):
    """Everything a round depends on, and what `MachineSettings` adds. `training_steps` is what the budget derives."""

    model_config = SettingsConfigDict(extra="forbid")

    target: str = Field("shop", description="what to improve on (docs/4-targets.md)")
    target_user: str = Field(SCRIPTED_USER, description="who plays the simulated user: scripted, or litellm:MODEL")
    profile: str = Field("laptop", description="the file in profiles/ whose values stand in for these defaults")
    seed: int = Field(0, ge=0, le=LARGEST, description="another seed gives other draws")
    budget: int = Field(2400, ge=1, le=LARGEST, description=BUDGET)
    base_model: str = Field("smollm2-135m", description="the embedded model, a folder, or a Hugging Face id")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the base; auto: what is faster here")
    calls: Literal["compact", "json"] = Field("compact", description="how tools and calls are written for a model")
    home: Path = Field(Path("runs"), description="folder of rounds, and of store and registry without URLs")
    files: str = Field("", description="where the home's files are put for others: s3://BUCKET/PREFIX, file:///FOLDER")
    database: str = Field("", description="URL of the store; empty: trace.db in home")
    tracking: str = Field("", description="MLflow's server or database; empty: mlflow.db in home")
    runner: Literal["process", "dask", "ray"] = Field(
        "process", description="where shards of a stage's episodes are played (docs/10-scale.md)"
    )
    runner_address: str = Field("", description="of the Dask scheduler or Ray head; empty: a cluster on this machine")
    runner_workers: int = Field(2, ge=1, le=1024, description="worker processes of a cluster on this machine")
    traces: int = Field(2, ge=0, le=16, description="episodes of each GRPO group that MLflow shows as traces; 0: none")
    router: Literal["linear", "retrieval", "label", "both", "auto", "off"] = Field("auto", description="how it decides")
    policy: PolicySettings = PolicySettings()
    rollout: RolloutSettings = RolloutSettings()
    selection: SelectionSettings = SelectionSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    train: TrainSettings = TrainSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    analyst: AnalystSettings = AnalystSettings()
    synthesizer: SynthesizerSettings = SynthesizerSettings()
    limits: LimitSettings = LimitSettings()
    devices: DeviceSettings = DeviceSettings()
    unattended: UnattendedSettings = UnattendedSettings()

    @field_validator("target_user", "home", mode="before")
    @classmethod
    def _empty_is_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[str(info.field_name)].default if value == "" else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = InitSettingsSource(settings_cls, read_toml(FILE))
        name = str(init_settings().get("profile") or env_settings().get("profile") or file().get("profile") or "laptop")
        path = PROFILES / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.toml")))
            raise ConfigurationError(f"profile {name!r} does not exist; choose from {known}")
        chosen = InitSettingsSource(settings_cls, {"profile": name})  # an empty TRACE_PROFILE names none
        return chosen, init_settings, env_settings, file, InitSettingsSource(settings_cls, read_toml(path))

    @property
    def folder(self) -> Path:
        """Where rounds, the database and the registry of the embedded default lie (absolute)."""
        return self.home.expanduser().resolve()

    @property
    def database_url(self) -> str:
        return self.database or sqlite_url(self.folder / "trace.db")

    @property
    def tracking_uri(self) -> str:
        return self.tracking or sqlite_url(self.folder / "mlflow.db")

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

    @property
    def open_episodes(self) -> int:
        """Episodes that a process has open at once: twice what samples at once, so that environments overlap."""
        sampled = self.policy.concurrency if self.policy.backend == "vllm" else 0
        return 2 * max(self.rollout.rows, sampled)

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

    def identity(self, whole: bool = False) -> dict[str, Any]:
        """What decides a round's figures, JSON-able: everything but where things are stored, how the analyst is
        reached, and what may be spent. `whole`: also fields that have the value of `_BEFORE`."""
        given = self.model_dump(mode="json", exclude={*_PLACES, *MachineSettings.model_fields})
        analyst = given["analyst"] if self.asks_a_model else {"kind": self.analyst.kind}
        synthesizer = given["synthesizer"]
        if not (self.author and synthesizer["model"]):  # no model writes, or the analyst's does
            synthesizer = {name: synthesizer[name] for name in ("kind", "versions")}
        given["analyst"] = {name: value for name, value in analyst.items() if name not in _TRANSPORT}
        given["synthesizer"] = {name: value for name, value in synthesizer.items() if name not in _TRANSPORT}
        backend = {"policy": {"backend": self.policy.backend}}
        if whole:
            return given | backend
        for part, fields in _BEFORE.items():
            for name, before in fields.items():
                if given[part][name] == before:
                    del given[part][name]
        # As in `_BEFORE`: the first rounds had the scripted user and the model in this process.
        if self.target_user == SCRIPTED_USER:
            del given["target_user"]
        return given if self.policy.backend == "local" else given | backend


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
    if settings.runner == "process" and settings.runner_address:
        raise ConfigurationError(
            f"runner_address = {shown(settings.runner_address)} with runner = 'process', which needs none; set runner "
            "to dask or ray, or leave the address out"
        )
    settings.training_steps()
    return settings


def machine_settings() -> MachineSettings:
    """The machine's settings, for code that is called without `Settings`. Raises `ConfigurationError`."""
    return _read(MachineSettings)


def _read(kind: type[Read], **given: Any) -> Read:
    """Settings of a kind; one `ConfigurationError` for what is wrong, which shows no key and no password."""
    try:
        _check_variables()
        return kind(**given)
    except ValidationError as problem:
        first = problem.errors()[0]
        where, value, unknown = ".".join(map(str, first["loc"])), first.get("input"), first["type"] == "extra_forbidden"
        # What has a wrong name may be anything, a password as well; and a variable's name may be the key itself.
        named = any(word in where.lower() for word in ("key", "variable"))
        hidden = named or (unknown and not isinstance(value, int | float))
        said = f"setting {where} = {'(not shown)' if hidden else shown(value)}"
        if unknown:
            mend = _mend(closest_setting(where), "take it out")
            raise ConfigurationError(f"{said}{_holder(where)} does not exist; {mend}") from None
        raise ConfigurationError(f"{said}: {first['msg']}; correct it and start again") from None
    except SettingsError as problem:
        part = str(problem).partition('"')[2].partition('"')[0]  # its own words name no variable
        raise ConfigurationError(
            f"environment variable {variable_of(part)} = (not shown) is no JSON; correct it and start again"
        ) from None


@functools.cache
def setting_names() -> tuple[str, ...]:
    """Every setting, with a dot behind its part, and the parts themselves."""

    def names(kind: type[BaseModel], before: str) -> Iterator[str]:
        for name, field in kind.model_fields.items():
            yield before + name
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from names(field.annotation, f"{before}{name}.")

    return tuple(names(Settings, ""))


def variable_of(setting: str) -> str:
    """The environment variable of a setting: `train.steps` is `TRACE_TRAIN__STEPS`."""
    return PREFIX + setting.replace(".", "__").upper()


def closest_setting(name: str) -> str:
    """The setting that a misspelt one most likely means: the most alike of its part, the one so called in another part,
    or the most alike of all; "" where none is like it."""
    part, _, last = name.rpartition(".")
    split = [(known, *known.rpartition(".")[::2]) for known in setting_names()]
    own = difflib.get_close_matches(last, [tail for _, head, tail in split if head == part], n=1, cutoff=_ALIKE)
    if own:
        return f"{part}.{own[0]}" if part else own[0]
    moved = [known for known, _, tail in split if tail == last]
    # In a part that is right its name makes everything look alike.
    others = moved or [known for known, _, _ in split if part not in setting_names()]
    return "".join(difflib.get_close_matches(name, others, n=1, cutoff=0 if moved else _ALIKE))


def _mend(meant: str, away: str) -> str:
    hint = f"did you mean {meant}? Correct it" if meant else "correct its name (docs/1-running.md, settings.py)"
    return f"{hint}, or {away}"


def _holder(name: str) -> str:
    """Which file has this setting, as words; "" where it was given otherwise."""
    for file in (FILE, *sorted(PROFILES.glob("*.toml"))):
        held: Any = read_toml(file)
        for part in name.split("."):
            held = held.get(part) if isinstance(held, dict) else None
        if held is not None:
            return f" in {file.name}"
    return ""


def _check_variables() -> None:
    """Raise `ConfigurationError` for a variable with the settings' prefix that nothing reads: it is misspelt."""
    known = {*map(variable_of, setting_names()), *NOT_SETTINGS}
    unknown = [name for name in sorted(os.environ) if name.upper().startswith(PREFIX) and name.upper() not in known]
    for name in unknown:
        if name in _named_by_settings() or _of_kubernetes(name):  # it holds a key, or tells of a service
            continue
        meant = "".join(difflib.get_close_matches(name.upper(), NOT_SETTINGS, n=1, cutoff=0.9))
        close = closest_setting(name[len(PREFIX) :].lower().replace("__", "."))
        mend = _mend(meant or (variable_of(close) if close else ""), "unset it")
        raise ConfigurationError(f"environment variable {name} = (not shown) is no setting; {mend}")


def _named_by_settings() -> set[str]:
    """What variables and `trace.toml` name: among it the variables that hold keys, whatever they are called."""

    def texts(held: object) -> Iterator[str]:
        if isinstance(held, dict):
            for value in held.values():
                yield from texts(value)
        elif isinstance(held, str):
            yield held

    return {value for name, value in os.environ.items() if name.startswith(PREFIX)} | set(texts(read_toml(FILE)))


def _of_kubernetes(name: str) -> bool:
    """Whether Kubernetes made the variable, for a service that is called trace or trace-something."""
    ends = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
    return any(f"{name.rpartition(end)[0]}_SERVICE_HOST" in os.environ for end in ends)


def writable_folder(folder: Path) -> Path:
    """Create `folder` and prove that a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:  # containers share process numbers
            probe.write(b"probe")
    except OSError as problem:
        raise ConfigurationError(
            f"{folder} cannot be written ({problem.strerror}); give another folder with --home or free space"
        ) from None
    return folder
