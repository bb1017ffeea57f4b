"""A base whose weights are spread over the processes of a training: what is refused, and where it is parted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errors import ConfigurationError, PolicyError
from flows.compare_methods import CompareParameters, check
from flows.train_apart import spec_of
from models.local.decoder import PartedDecoder
from models.policy import PolicyIdentity
from models.training import ranks as processes_here
from models.training.ranks import Ranks
from settings import load_settings
from tasks.operations import training_memory
from tasks.operations.devices import check_processes
from tasks.operations.training_memory import check_training
from tasks.round import context as module
from tasks.round.context import Context

SERVED = {"backend": "vllm", "url": "http://127.0.0.1:1"}
PARTED = {"policy": SERVED, "devices": {"shard": True, "processes": 2}}


@pytest.mark.parametrize(
    ("policy", "processes", "words"),
    [
        (SERVED, 1, r"devices\.shard = true and 1 process trains, .* set devices\.processes to 2 or more"),
        ({}, 2, r"policy\.backend = 'local': .* cannot sample; sample on vLLM servers"),
        (SERVED, 5, "32 rows cannot be shared by 5 processes"),
    ],
)
def test_parts_need_processes_and_servers(
    settings_folder: Path, policy: dict[str, Any], processes: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_training(load_settings(policy=policy, devices={"shard": True, "processes": processes}))
    check_processes(load_settings(**PARTED))


def test_a_comparison_trains_in_one_process_and_says_so(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_DEVICES__SHARD", "true")
    with pytest.raises(ConfigurationError, match=r"one process makes all trainings.*devices\.shard = false"):
        check(CompareParameters(budget=5000, seeds=[0], out=settings_folder / "out"))


def test_parts_make_room_for_a_base_that_no_process_could_hold(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 32B model on GPUs of 24 GiB."""
    shape = {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64}
    shape |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    monkeypatch.setattr(training_memory, "config_of", lambda name: shape)
    monkeypatch.setattr(training_memory, "_kind", lambda: "cuda")
    given: dict[str, Any] = {"profile": "gpu", "policy": SERVED, "dtype": "bfloat16", "train": {"micro_batch": 1}}
    devices = {"memory_gib": 24, "processes": 8, "recompute": True}
    with pytest.raises(ConfigurationError, match=r"weights 6\d\.\d.*devices\.shard = true"):
        check_training(load_settings(**given, devices=devices))
    check_training(load_settings(**given, devices={**devices, "shard": True}))


@pytest.mark.parametrize(
    ("count", "shard", "expected"),
    [(2, True, ["proven", "parted"]), (1, True, ["proven"]), (2, False, ["proven"])],
)
def test_it_is_parted_in_a_job_after_what_needs_the_whole_of_it(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, shard: bool, expected: list[str]
) -> None:
    seen: list[str] = []
    opened = SimpleNamespace(policy=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "open_backend", lambda settings, base: opened)
    monkeypatch.setattr(module, "check_adapters", lambda settings, base, opened: seen.append("proven"))
    monkeypatch.setattr(processes_here, "part_base", lambda base: seen.append("parted"))
    monkeypatch.setattr(processes_here, "ranks", lambda: Ranks(0, count))
    asked: list[Any] = []
    base = SimpleNamespace(identity=PolicyIdentity("base", "1"))

    def load(*how: Any) -> Any:
        asked.append(how)
        return base

    monkeypatch.setattr(module, "load_base", load)
    settings = load_settings(policy=SERVED, devices={"shard": shard, "processes": 2})
    store: Any = SimpleNamespace(rows=lambda kind, **where: [])
    context = Context(settings, store, SimpleNamespace(id="r"))  # type: ignore[arg-type]
    assert context.backend is opened
    assert seen == expected
    assert asked[0][-1] is shard, "it lies in the machine's memory, or on the GPU"


def test_the_other_processes_hold_it_in_the_machines_memory_too(settings_folder: Path) -> None:
    settings = load_settings(**PARTED)
    job = spec_of(SimpleNamespace(settings=settings, round=SimpleNamespace(id="r")), "refund")  # type: ignore[arg-type]
    assert job["base"]["host"] is True
    assert settings.identity() == load_settings(policy=SERVED).identity()


def test_what_has_a_part_says_that_it_does_not_sample() -> None:
    decoder: Any = PartedDecoder()
    with pytest.raises(PolicyError, match="holds a part of the base's weights"):
        decoder.head(None)
