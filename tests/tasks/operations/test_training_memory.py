"""What a training takes is told before a round, and refused where it can never fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.targets.shop.target import target
from errors import ConfigurationError
from flows import improve as flow
from flows.improve import ImproveParameters
from settings import load_settings
from tasks.operations import training_memory
from tasks.operations.devices import check_gpu
from tasks.operations.training_memory import EMBEDDED_CONFIG, check_training, config_of, memory_text


def test_the_embedded_model_is_that_of_the_table(embedded_config: dict[str, Any]) -> None:
    for name, value in EMBEDDED_CONFIG.items():
        assert embedded_config[name] == value, name


@pytest.fixture
def embedded_config() -> dict[str, Any]:
    from models.local.base import embedded_folder

    found: dict[str, Any] = json.loads((embedded_folder() / "config.json").read_text())
    return found


def test_the_plan_has_a_line_of_it(settings_folder: Path) -> None:
    text = memory_text(load_settings(devices={"memory_gib": 64}, dtype="float32"), target())
    assert text.startswith("a training takes at most about ")
    assert text.endswith(" of 64.0 on this machine")
    small = memory_text(load_settings(devices={"memory_gib": 2}, dtype="float32"), target())
    assert "long conversations may not fit: set train.micro_batch_tokens" in small


def test_what_cannot_fit_is_refused_with_the_value_and_what_to_do(settings_folder: Path) -> None:
    check_training(load_settings(devices={"memory_gib": 8}))
    with pytest.raises(
        ConfigurationError, match=r"takes at least \d\.\d GiB .* has 1\.0 GiB; take a smaller base_model"
    ):
        check_training(load_settings(devices={"memory_gib": 1}))
    with pytest.raises(ConfigurationError, match="micro_batch_tokens"):
        check_training(load_settings(devices={"memory_gib": 8}, train={"micro_batch_tokens": 100_000}))
    with pytest.raises(ConfigurationError, match="rows cannot be shared by 5 processes"):
        check_training(load_settings(devices={"processes": 5}))


def test_trainings_at_once_take_their_memory_each(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told and refused; on GPUs each has a memory of its own."""
    monkeypatch.setattr("models.local.base.cores_here", lambda: 8)

    def peak(trainings: int, there: float = 64) -> str:
        alone = {"carry": False, "demonstrations": 0}
        devices = {"memory_gib": there, "trainings": trainings}
        settings = load_settings(devices=devices, dtype="float32", train=alone)
        check_training(settings)
        return memory_text(settings, target())

    one, two = peak(1), peak(2)
    assert two.startswith("2 trainings at once take at most about ")
    sizes = [float(text.partition("about ")[2].partition(" GiB")[0]) for text in (one, two)]
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=0.11)
    peak(1, 4)
    with pytest.raises(
        ConfigurationError, match=r"2 trainings of smollm2-135m at once take .*; set devices\.trainings = 1"
    ):
        peak(2, 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    peak(2, 4)
    assert peak(2).startswith("a training takes ")


def test_a_gpu_that_is_not_there_is_missed_before_anything_is_played(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for profile in ("gpu-small", "gpu", "cluster"):
        with pytest.raises(ConfigurationError, match=f"profile {profile} trains on a GPU, and this process sees none"):
            check_gpu(load_settings(profile=profile))
        check_gpu(load_settings(profile=profile, devices={"cpu": True}))
    check_gpu(load_settings(profile="laptop"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_gpu(load_settings(profile="gpu"))


def test_a_gpu_too_small_is_refused_before_anything_is_played(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 4B model on a card of 6 GiB, of which torch tells."""
    shape = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    folder = settings_folder / "4b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    assert config_of(str(folder))["hidden_size"] == 2560
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (6 * 2**30, 8 * 2**30))
    monkeypatch.setattr(flow, "preflight", lambda settings: None)
    monkeypatch.setattr(flow, "opened", lambda *_: pytest.fail("a round was opened"))
    given = ImproveParameters(base_model=str(folder), home=settings_folder / "home")
    with pytest.raises(ConfigurationError, match=r"a training of .*4b takes at least .* the GPU has 6\.0 GiB"):
        flow.improve.fn(given)
    assert training_memory.memory_there("cuda", alone=True) == 8.0
