"""What a training of a round takes of memory: a line of the plan, and a refusal of what can never fit.

    memory: a training takes at most about 5.4 GiB (weights 0.6, adapter 0.2, activations 3.8) of 23.5 on this machine

Told is the peak with conversations as long as the settings allow. Refused is only what would not fit with the shortest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.contract import Target
from errors import ConfigurationError
from models.local.model_files import EMBEDDED
from models.training.memory import Batch, Peak, Shape, expected_peak, memory_there
from models.training.records import TrainingSettings
from settings import Settings
from tasks.operations.devices import check_processes, training_processes
from tasks.round.preflight import check_trainings
from tasks.round.target_prompt import first_opening

# The embedded model's configuration, which is read before its file is converted.
EMBEDDED_CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
# Characters of English and JSON in a token, and how many tokens an environment answers a sampled one with, about.
CHARACTERS, ANSWERED = 3.5, 1.0


def config_of(name: str) -> Mapping[str, Any]:
    """The configuration of a base model, as `config.json` has it."""
    if name == EMBEDDED:
        return EMBEDDED_CONFIG
    file = Path(name) / "config.json"
    if file.is_file():
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    from transformers import AutoConfig

    loaded: Mapping[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    return loaded


def check_training(settings: Settings) -> None:
    """Raise `ConfigurationError` for a training that the machine can never make: at once with others that it has to
    wait for, rows that its processes cannot share, or more memory than there is even with conversations of a single
    turn."""
    check_trainings(settings)
    check_processes(settings)
    turn = settings.rollout.max_tokens
    least, there = _peak(settings, turn, 0), _there(settings)
    if least.gib > there:
        raise ConfigurationError(
            f"{_said(settings, f' of {settings.base_model}')} at least {least.text()}, and {_device()} has "
            f"{there:.1f} GiB; {'set devices.trainings = 1, ' if _together(settings) > 1 else ''}"
            "take a smaller base_model, a smaller train.micro_batch_tokens (or train.micro_batch), "
            "devices.recompute = true or fewer train.upper_layers, devices.shard = true on several GPUs, or set "
            "devices.memory_gib to what there is if this is wrong"
        )


def memory_text(settings: Settings, target: Target) -> str:
    """What a training takes at most, or those that are made at once and share the memory, in one sentence."""
    prompt, messages = first_opening(target)
    said = json.dumps([dict(t) for t in prompt.tools]) + prompt.instructions
    said += "".join(m.content for m in (*prompt.examples, *messages))
    environment = target.environment()
    steps = environment.max_steps
    environment.close()
    answers = round(steps * settings.rollout.max_tokens * (1 + ANSWERED))
    peak, there = _peak(settings, answers, round(len(said) / CHARACTERS)), _there(settings)
    text = f"{_said(settings)} at most about {peak.text()} of {there:.1f} on {_device()}"
    if peak.gib > there:
        text += "; long conversations may not fit: set train.micro_batch_tokens, or devices.recompute"
    return text


def _peak(settings: Settings, answers: int, opening: int) -> Peak:
    """The peak with rows of so many tokens behind an opening, in all processes that share the memory."""
    from models.local.dtypes import fast_dtype

    config, t = config_of(settings.base_model), settings.train
    train = TrainingSettings(rank=t.rank, upper_layers=t.upper_layers, recompute=settings.devices.recompute)
    context = int(config.get("max_position_embeddings") or 2**20)
    opening = min(opening, context)
    row = max(1, min(answers, context - opening))
    rows = min(t.micro_batch, t.groups * t.group_size)
    tokens = rows * row
    if t.micro_batch_tokens is not None:
        tokens = max(row, t.micro_batch_tokens)
        rows = max(1, tokens // row)
    width = (
        fast_dtype(settings.cache).itemsize
        if settings.dtype == "auto"
        else {"float32": 4, "bfloat16": 2}[settings.dtype]
    )
    batch, local = Batch(rows, tokens, row, opening), settings.policy.backend == "local"
    parts = training_processes(settings) if settings.devices.shard else 1
    peak = expected_peak(Shape.of(config), train, batch, width, _kind(), local, parts)
    many = _together(settings) * training_processes(settings) if _kind() == "cpu" else 1
    return Peak(*(many * size for size in (peak.weights, peak.adapter, peak.activations, peak.libraries)))


def _together(settings: Settings) -> int:
    """How many trainings at once share the memory; on GPUs each has its own."""
    return settings.devices.trainings if _kind() == "cpu" else 1


def _said(settings: Settings, of: str = "") -> str:
    many = _together(settings)
    return f"a training{of} takes" if many == 1 else f"{many} trainings{of} at once take"


def _there(settings: Settings) -> float:
    return settings.devices.memory_gib or memory_there(_kind(), settings.devices.sleep)


def _kind() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device() -> str:
    return "the GPU" if _kind() == "cuda" else "this machine"
