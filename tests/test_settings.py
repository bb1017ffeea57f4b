"""Settings: where they come from, and one clear sentence for whatever is wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from db.copies import sqlite_file
from errors import ConfigurationError
from settings import PROFILES, MachineSettings, Settings, load_settings, machine_settings, writable_folder


def test_defaults_are_the_laptop_profile(settings_folder: Path) -> None:
    settings = load_settings()
    assert (settings.profile, settings.target, settings.base_model) == ("laptop", "shop", "smollm2-135m")
    assert settings.training_steps() >= 1
    assert settings.folder.is_absolute()
    assert settings.database_url == f"sqlite:///{settings.folder / 'trace.db'}"


def test_every_setting_says_what_it_is() -> None:
    """docs/1-running.md sends a reader to the two files for what each of them means."""

    def without(kind: type[BaseModel]) -> list[str]:
        found = []
        for name, field in kind.model_fields.items():
            part = field.annotation
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += [f"{name}.{inner}" for inner in without(part)]
            elif not field.description:
                found.append(name)
        return found

    assert without(Settings) == []


def test_a_home_of_any_name_is_its_own(settings_folder: Path) -> None:
    """In a plain URL the first would end at its question mark, and the last two would be one."""
    homes = [settings_folder / name for name in ("rounds?", "rounds", "a%41b", "aAb", "one#two", "ein ü")]
    for home in homes:
        settings = load_settings(home=home)
        assert sqlite_file(settings.database_url) == home.resolve() / "trace.db"
        assert sqlite_file(settings.tracking_uri) == home.resolve() / "mlflow.db"


def test_an_empty_home_is_the_default_one_and_not_the_working_folder(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `export TRACE_HOME=$DATA`, where nobody set DATA."""
    monkeypatch.setenv("TRACE_HOME", "")
    assert load_settings().folder == settings_folder.resolve() / "runs"
    assert load_settings(home=Path()).folder == settings_folder.resolve()


def test_a_file_of_settings_that_is_no_text_is_one_error(settings_folder: Path) -> None:
    (settings_folder / "trace.toml").write_bytes('target = "sh\u00f6p"'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"trace\.toml cannot be read: 'utf-8' codec .*; correct it"):
        load_settings()


def test_a_profile_that_cannot_be_read_is_named(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("settings.PROFILES", settings_folder)
    (settings_folder / "mine.toml").write_text("budget = = 3")
    with pytest.raises(ConfigurationError, match=r"mine\.toml cannot be read: Invalid value .*; correct it"):
        load_settings(profile="mine")


@pytest.mark.parametrize("profile", sorted(p.stem for p in PROFILES.glob("*.toml")))
def test_every_profile_is_sound(settings_folder: Path, profile: str) -> None:
    assert load_settings(profile=profile).profile == profile


@pytest.mark.parametrize("profile", ["gpu-small", "gpu", "cluster"])
def test_profiles_of_gpus_have_the_published_settings_and_a_rate_for_lora(settings_folder: Path, profile: str) -> None:
    settings = load_settings(profile=profile)
    train = settings.train
    assert (train.rank, train.alpha, train.upper_layers, train.temperature) == (16, 16, None, 1.0)
    assert (settings.calls, settings.policy.backend, settings.dtype) == ("json", "vllm", "bfloat16")
    assert 10 <= settings.training_steps() <= 40, "the published iterations"
    assert 2e-5 <= train.learning_rate <= 2e-4, "ten times what all weights take, which is 2e-6 to 2e-5"
    assert load_settings(profile=profile, train={"upper_layers": 8}).train.upper_layers == 8
    assert load_settings(**settings.identity() | {"profile": profile}).identity() == settings.identity()


def test_the_caller_beats_the_environment_beats_the_file_beats_the_profile(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_settings().budget
    Path("trace.toml").write_text(f"budget = {profile + 1}\nseed = 5\n[rollout]\ntrials = 3\n")
    assert (load_settings().budget, load_settings().seed, load_settings().rollout.trials) == (profile + 1, 5, 3)
    monkeypatch.setenv("TRACE_BUDGET", str(profile + 2))
    monkeypatch.setenv("TRACE_ROLLOUT__TRIALS", "4")
    assert (load_settings().budget, load_settings().rollout.trials) == (profile + 2, 4)
    assert load_settings(budget=profile + 3).budget == profile + 3


def test_profile_named_by_the_environment(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_PROFILE", "smoke")
    assert load_settings() == load_settings(profile="smoke")
    monkeypatch.setenv("TRACE_PROFILE", "")
    assert load_settings().identity() == load_settings(profile="laptop").identity()
    Path("trace.toml").write_text('profile = "night"')
    assert load_settings() == load_settings(profile="night")


def test_what_was_added_later_is_part_of_a_round_only_where_it_is_set(settings_folder: Path) -> None:
    given = load_settings(profile="smoke").identity()
    assert "transfer" not in given["train"], "rounds from before the setting are found again"
    assert load_settings(train={"transfer": 8}).identity()["train"]["transfer"] == 8
    assert "carry" not in given["train"]
    assert load_settings(train={"carry": True}).identity()["train"]["carry"] is True
    assert "micro_batch_tokens" not in given["train"]
    assert load_settings(train={"micro_batch_tokens": 9}).identity()["train"]["micro_batch_tokens"] == 9


def test_who_writes_environments_is_part_of_a_round_and_how_it_is_reached_is_not(settings_folder: Path) -> None:
    alone = load_settings(analyst={"model": "m"}, synthesizer={"kind": "llm"}).identity()
    assert alone["synthesizer"] == {"kind": "llm", "versions": 5}
    given = {"kind": "llm", "model": "w", "api_base": "http://a/v1", "api_key_variable": "K", "prompt_price": 1.0}
    other = load_settings(analyst={"model": "m"}, synthesizer=given).identity()
    assert other["synthesizer"] == {"kind": "llm", "versions": 5, "model": "w"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"profile": "huge"}, "'huge'.*laptop"),
    ({"budget": 0}, "budget = 0"),
    ({"budget": 5}, "budget 5 cannot fill.*at least"),
    ({"budget": "many"}, "budget = 'many'"),
    ({"seed": -1}, "seed = -1"),
    ({"seed": 2**64}, "seed = 18446744073709551616"),
    ({"budget": 2**64}, "budget = 18446744073709551616"),
    ({"dtype": "int8"}, "dtype = 'int8'"),
    ({"calls": "xml"}, "calls = 'xml'"),
    ({"rollout": {"temperature": 3}}, "rollout.temperature = 3"),
    ({"rollout": {"speed": 3}}, "rollout.speed"),
    ({"colour": "red"}, "colour"),
    ({"selection": {"required": 9, "runs": 3}}, "required = 9 of only 3"),
    ({"calibration": {"low": 0.95}}, "calibration.low = 0.95 is above calibration.high = 0.9"),
    ({"calibration": {"high": 60}}, "calibration.high = 60"),
    ({"analyst": {"kind": "oracle"}}, "analyst.kind = 'oracle'"),
    ({"analyst": {"temperature": 0}}, "analyst.temperature = 0"),
    ({"analyst": {"api_key": "secret"}}, r"analyst\.api_key = \(not shown\)"),
    ({"databse": "postgresql://trace:secret@db/trace"}, r"databse = \(not shown\)"),
    ({"policy": {"url": ["http://me:secret@a:8000"]}}, r"policy\.url = \(not shown\): Input should be a valid string"),
    ({"policy": {"url": ["http://a:8000"]}}, r"policy\.url = \['http://a:8000'\]: Input"),
    ({"policy": "http://me:sec/r et@a:8000"}, r"policy = \(not shown\): Input"),
    ({"database": ["host=db password=secret"]}, r"database = \(not shown\): Input"),
    ({"runner_address": "tcp://me:secret@a:8786"}, r"runner_address = \(not shown\) with runner = 'process'"),
    ({"sandbox": "chroot"}, "sandbox = 'chroot'"),
    ({"synthesizer": {"versions": 6}}, "synthesizer.versions = 6"),
    ({"metrics_port": 70_000}, "metrics_port = 70000"),
    ({"traces": 17}, "traces = 17"),
    ({"train": {"upper_layers": -1}}, "train.upper_layers = -1"),
    ({"train": {"micro_batch_tokens": 0}}, "train.micro_batch_tokens = 0"),
    ({"train": {"delta": 0.9}}, r"train.delta = 0\.9.*give more than 1\.28, or 0 for none"),
    ({"train": {"delta": 1.28}}, r"train.delta = 1\.28.*give more than 1\.28, or 0 for none"),
    ({"devices": {"processes": -1}}, "devices.processes = -1"),
    ({"devices": {"trainings": 0}}, "devices.trainings = 0"),
    ({"devices": {"trainings": -2}}, "devices.trainings = -2"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_what_is_wrong_is_said_with_its_value(settings_folder: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_settings(**given)


def test_a_broken_file_and_a_broken_variable(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("trace.toml").write_text("budget = \n")
    with pytest.raises(ConfigurationError, match=r"trace\.toml cannot be read"):
        load_settings()
    Path("trace.toml").write_text("budgets = 3\n")
    with pytest.raises(ConfigurationError, match="budgets"):
        load_settings()
    Path("trace.toml").unlink()
    monkeypatch.setenv("TRACE_ROLLOUT", "not json")
    with pytest.raises(ConfigurationError, match=r"variable TRACE_ROLLOUT = \(not shown\) is no JSON"):
        load_settings()


def test_the_budget_it_asks_for_suffices(settings_folder: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(budget=5)
    need = int(str(raised.value).split("at least ")[1].split(",")[0])
    assert load_settings(budget=need).training_steps() == 1
    with pytest.raises(ConfigurationError):
        load_settings(budget=need - 1)


def test_identity_leaves_places_out(settings_folder: Path) -> None:
    one, other = (Settings(home=Path(p), database=d) for p, d in (("a", ""), ("b", "postgresql://x/y")))
    assert one.identity() == other.identity()
    assert load_settings(files="s3://bucket/prefix").identity() == load_settings().identity()
    assert load_settings(traces=0).identity() == load_settings(traces=16).identity(), (
        "what MLflow shows decides nothing"
    )
    elsewhere = {"processes": 4, "cpu": True, "recompute": True, "sleep": True, "memory_gib": 8}
    assert load_settings(devices=elsewhere).identity() == load_settings().identity(), "a round moves to another machine"
    assert one.identity() != Settings(seed=1).identity()


def test_who_plays_the_user_is_part_of_a_round(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = load_settings().identity()
    assert "target_user" not in scripted, "rounds from before the setting are found again"
    monkeypatch.setenv("TRACE_TARGET_USER", "")
    assert load_settings().identity() == scripted
    monkeypatch.setenv("TRACE_TARGET_USER", "litellm:openai/gpt-4.1")
    assert load_settings().target_user == "litellm:openai/gpt-4.1"
    assert load_settings().identity() == scripted | {"target_user": "litellm:openai/gpt-4.1"}
    assert load_settings(**load_settings().identity()).target_user == "litellm:openai/gpt-4.1"


@pytest.mark.parametrize(
    ("given", "digest"),
    [
        ({}, "b0431d1887b7dae4"),
        ({"profile": "dry"}, "39333a9baf7395df"),
        ({"profile": "gpu"}, "f378c6c687cfc0f2"),
    ],
)
def test_identity_is_byte_for_byte_what_stored_rounds_have(
    settings_folder: Path, given: dict[str, Any], digest: str
) -> None:
    """Another identity is another round: what was begun could not go on. These changed when `train.candidates`,
    `train.choosing`, `evaluation.own_tasks` and `train.hints` came (which checkpoint is taken, how many tasks the gate
    has and what is trained with advice decide a round's figures), when the laptop's budget doubled, when profile `gpu`
    got all layers, calls as JSON and a rate for LoRA, when the laptop's round began with a generalist, when it drew
    families by what is left to learn, when its generalist learnt in 36 steps at least, when
    a quarter of informative groups was enough to train, when trainings behind it became gentler and patient, and
    when it practised."""
    machine = {"sandbox": "process", "sandbox_image": "python:3.11", "cache": "/m", "gateway_keys": "k" * 20}
    for settings in (load_settings(**given), load_settings(**given, **machine, toolsandbox="/x", tau2_tasks="/y")):
        assert hashlib.sha256(json.dumps(settings.identity()).encode()).hexdigest()[:16] == digest


def test_every_knob_of_the_machine_is_a_setting_and_read_by_either_name(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "sandbox": "process",
        "sandbox_image": "python:3.11",
        "cache": "/m",
        "toolsandbox": "/t",
        "tau2_tasks": "/u",
    }
    assert {*given, "gateway_keys", "metrics_port"} == set(MachineSettings.model_fields) <= set(Settings.model_fields)
    monkeypatch.delenv("TRACE_CACHE", raising=False)
    Path("trace.toml").write_text('budget = 2000\ncache = "/file"\nsandbox = "bubblewrap"\n')
    assert (machine_settings().cache, machine_settings().sandbox) == ("/file", "bubblewrap")
    for name, value in given.items():
        monkeypatch.setenv(f"TRACE_{name.upper()}", value)
    for settings in (load_settings(), machine_settings()):
        assert {name: getattr(settings, name) for name in given} == given
    monkeypatch.setenv("TRACE_SANDBOX", "chroot")
    with pytest.raises(ConfigurationError, match="sandbox = 'chroot'"):
        machine_settings()


def test_no_key_is_ever_printed(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "a-key-that-nobody-may-read"
    monkeypatch.setenv("TRACE_GATEWAY_KEYS", key)
    settings = load_settings()
    assert settings.gateway_keys.get_secret_value() == key
    shown = [
        repr(settings),
        str(settings),
        settings.model_dump_json(),
        repr(settings.model_dump()),
        repr(vars(settings)),
    ]
    assert all(key not in text for text in [*shown, json.dumps(settings.identity())])
    monkeypatch.delenv("TRACE_GATEWAY_KEYS")
    Path("trace.toml").write_text(f'gateway_keys = ["{key}"]\n')
    with pytest.raises(ConfigurationError, match="gateway_keys") as raised:
        load_settings()
    assert key not in str(raised.value)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert writable_folder(tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        writable_folder(tmp_path / "file" / "below")
    if os.getuid() == 0:
        with pytest.raises(ConfigurationError, match="/proc/trace-agent cannot be written"):
            writable_folder(Path("/proc/trace-agent"))
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ConfigurationError, match="cannot be written"):
            writable_folder(tmp_path / "locked" / "below")


def test_a_folder_is_proved_by_several_at_once(tmp_path: Path) -> None:
    """As by processes of containers that share it and have one number."""
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: writable_folder(tmp_path), range(400))) == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_how_a_model_is_reached_and_what_it_may_cost_is_no_part_of_a_round(settings_folder: Path) -> None:
    plain = load_settings()
    assert plain.identity()["analyst"] == {"kind": "checks"}
    assert not plain.asks_a_model
    assert load_settings(analyst={"model": "openai/any"}).identity() == plain.identity()
    asked = {"kind": "llm", "model": "openai/any"}
    one = load_settings(analyst=asked | {"max_dollars": 1.0, "concurrency": 2, "api_base": "http://a/v1"})
    assert one.identity() == load_settings(analyst=asked | {"max_dollars": 9.0}).identity()
    assert one.identity() != load_settings(analyst=asked | {"model": "openai/other"}).identity()
    assert one.identity() != load_settings(analyst=asked, synthesizer={"kind": "llm"}).identity()


def test_a_stored_round_takes_its_address_from_where_it_goes_on(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_settings(analyst={"kind": "llm", "model": "openai/any", "batch": 7}).identity()
    monkeypatch.setenv("TRACE_ANALYST__API_BASE", "http://here/v1")
    monkeypatch.setenv("TRACE_ANALYST__BATCH", "2")
    again = load_settings(**stored)
    assert (again.analyst.api_base, again.analyst.batch, again.analyst.model) == ("http://here/v1", 7, "openai/any")
