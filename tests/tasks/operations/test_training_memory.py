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
from models.training.memory import Shape
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
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (6 * 2**30, 7 * 2**30))
    monkeypatch.setattr(flow, "preflight", lambda settings: None)
    monkeypatch.setattr(flow, "opened", lambda *_: pytest.fail("a round was opened"))
    given = ImproveParameters(base_model=str(folder), home=settings_folder / "home")
    said = r"a training of .*4b takes at least .* the GPU has 6\.0 GiB free of 7\.0 GiB; take a smaller"
    with pytest.raises(ConfigurationError, match=said):
        flow.improve.fn(given)


def test_what_a_configuration_leaves_out_is_what_its_architecture_has(tmp_path: Path) -> None:
    """Gemma's words are tied, and its files do not say so: counted twice, trainings were refused that fit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    counted = sum(weight.numel() for weight in model.parameters())
    assert Shape.of(config_of(str(tmp_path))).parameters == pytest.approx(counted, rel=0.001)


@pytest.mark.parametrize(
    ("shape", "lacking"),
    [
        ({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4}, "intermediate_size"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, "hidden_size, num_hidden_layers, num_attention_heads, int"),
    ],
)
def test_a_base_that_names_its_sizes_otherwise_is_refused_by_name(
    settings_folder: Path, shape: dict[str, Any], lacking: str
) -> None:
    folder = settings_folder / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    said = rf"training of .*other \(type {shape['model_type']}\) takes .* has no {lacking}.*; give a base_model"
    with pytest.raises(ConfigurationError, match=said):
        flow.check_machine(load_settings(base_model=str(folder), dtype="float32", devices={"memory_gib": 64}))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpus((6, 80), (70, 80))` are the GPUs that are seen, and how many GiB of each are free; those that were looked
    at."""
    looked = list[int]()

    def seen(*found: tuple[int, int]) -> list[int]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
        monkeypatch.setattr("torch.cuda.mem_get_info", look)
        sizes[:] = found
        return looked

    def look(gpu: int) -> tuple[int, ...]:
        looked.append(gpu)
        return tuple(size * 2**30 for size in sizes[gpu])

    sizes: list[tuple[int, int]] = []
    return seen


ALONE = {"carry": False, "demonstrations": 0}


def test_a_gpu_that_is_mostly_taken_is_said_to_be(settings_folder: Path, gpus: Any) -> None:
    gpus((1, 80))
    taken = r"has 1\.0 GiB free of 80\.0 GiB \(another process has 79\.0: .*devices\.sleep = true\)\); take"
    with pytest.raises(ConfigurationError, match=taken):
        check_training(load_settings(train={"micro_batch_tokens": 100_000}))
    assert " of 1.0 GiB free of 80.0 on the GPU" in memory_text(load_settings(), target())


def test_only_the_gpus_of_the_trainings_are_looked_at(settings_folder: Path, gpus: Any) -> None:
    """The third is another user's."""
    looked = gpus((70, 80), (70, 80), (0, 80), (70, 80))
    check_training(load_settings(devices={"processes": 2}))
    assert looked == [0, 1]
    looked.clear()
    check_training(load_settings(devices={"processes": 1}))
    assert looked == [0]
    looked.clear()
    with pytest.raises(ConfigurationError, match=r"has 0\.0 GiB free"):
        check_training(load_settings(train=ALONE, devices={"trainings": 2, "processes": 1}))
    assert looked == [0, 2]


def test_a_training_apart_lies_beside_what_the_round_s_process_holds(settings_folder: Path, gpus: Any) -> None:
    """The base is loaded twice on the first GPU; the other has it once, and in parts it is not there at all."""
    folder = settings_folder / "4b"
    folder.mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    (folder / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    served = {"backend": "vllm", "url": "http://127.0.0.1:1"}
    given: dict[str, Any] = {"base_model": str(folder), "dtype": "bfloat16", "policy": served, "train": ALONE}
    apart = {"limits": {"training_minutes": 30}, "devices": {"processes": 1}}
    gpus((14, 16))
    check_training(load_settings(**given))
    with pytest.raises(ConfigurationError, match=r"own process will hold 8\.1, as limits\.training_minutes"):
        check_training(load_settings(**given, **apart))
    gpus((14, 16), (14, 16))
    for devices, free in (({"processes": 2}, 14 - 8.1), ({"processes": 2, "shard": True}, 14.0)):
        there = training_memory._there(load_settings(**given, devices=devices))
        assert there.free == pytest.approx(free, abs=0.05)
    check_training(load_settings(**given, limits=apart["limits"], devices={"processes": 1, "memory_gib": 14}))


def test_a_gpu_s_store_of_keys_and_values_is_counted(settings_folder: Path, gpus: Any) -> None:
    """Rows that sample at once, each with room for the longest conversation, which has at most the context."""
    gpus((70, 80))
    sizes = []
    for rows in (1, 64):
        settings = load_settings(dtype="bfloat16", rollout={"rows": rows, "max_tokens": 500}, train={"micro_batch": 1})
        sizes.append(training_memory._peak(settings, 7000, 1000, rows).sampling)
    assert sizes[1] - sizes[0] == 63 * 8192 * 2 * 30 * 3 * 64 * 2
    gpus((3, 80))
    with pytest.raises(ConfigurationError, match=r"sampling 5\.\d\).*fewer rollout\.rows"):
        check_training(
            load_settings(rollout={"max_tokens": 8000}, train={"micro_batch": 1}, devices={"recompute": True})
        )
