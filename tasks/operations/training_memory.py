"""What a training of a round takes of memory: a line of the plan, and a refusal of what can never fit.

    memory: a training takes at most about 5.4 GiB (weights 0.6, adapter 0.2, activations 3.8) of 23.5 on this machine

Told is the peak with conversations as long as the settings allow. Refused is only what would not fit with the shortest.
Of a GPU counts what is free before the round has loaded anything, less what the round's own process will hold of it
while the training is made in another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from environments.contract import Target
from errors import ConfigurationError
from models.local.model_files import EMBEDDED
from models.training.memory import Batch, Memory, Peak, Shape, expected_peak, memory_there, resident
from models.training.records import TrainingSettings
from settings import Settings
from tasks.operations.devices import check_processes, training_processes, visible_gpus
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
# The share of a GPU from which on it is said that other processes have it.
MUCH = 0.2


def config_of(name: str) -> Mapping[str, Any]:
    """The configuration of a base model. What its `config.json` leaves out is what the class of its architecture has:
    Gemma's ties its words, Llama's does not."""
    if name == EMBEDDED:
        return EMBEDDED_CONFIG
    from transformers import AutoConfig

    loaded: Mapping[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    return loaded


def check_training(settings: Settings) -> None:
    """Raise `ConfigurationError` for a training that the machine can never make: at once with others that it has to
    wait for, rows that its processes cannot share, or more memory than there is even with conversations of a single
    turn."""
    check_trainings(settings)
    check_processes(settings)
    turn, t = settings.rollout.max_tokens, settings.train
    least, there = _peak(settings, turn, 0, t.groups * t.group_size), _there(settings)
    if least.gib > there.free:
        raise ConfigurationError(
            f"{_said(settings, f' of {settings.base_model}')} at least {least.text()}, and {_device()} has "
            f"{_has(there)}; {'set devices.trainings = 1, ' if _together(settings) > 1 else ''}"
            "take a smaller base_model, a smaller train.micro_batch_tokens (or train.micro_batch), "
            f"{'fewer rollout.rows, ' if least.sampling > least.activations else ''}"
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
    opening = round(len(said) / CHARACTERS)
    peak, there = _peak(settings, answers, opening, settings.rollout.rows), _there(settings)
    free = f"{there.free:.1f}" if there.free == there.total else f"{there.free:.1f} GiB free of {there.total:.1f}"
    text = f"{_said(settings)} at most about {peak.text()} of {free} on {_device()}"
    if peak.gib > there.free:
        text += "; long conversations may not fit: set train.micro_batch_tokens, or devices.recompute"
    return text


def made_apart(settings: Settings) -> bool:
    """Whether the trainings of a round are made in other processes than its own (`flows/train_apart.py`)."""
    several = settings.devices.trainings > 1 or training_processes(settings) > 1
    return several or bool(settings.limits.training_minutes)


def _peak(settings: Settings, answers: int, opening: int, playing: int) -> Peak:
    """The peak with rows of so many tokens behind an opening, in all processes that share the memory. A sampler of the
    process itself plays so many episodes at once, if it has rows for them."""
    from models.local.kv_cache import room_for

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
    width, local = _width(settings), settings.policy.backend == "local"
    stored = min(settings.rollout.rows, playing) * room_for(row, context)
    parts = training_processes(settings) if settings.devices.shard else 1
    batch = Batch(rows, tokens, row, opening, stored)
    peak = expected_peak(Shape.of(config, settings.base_model), train, batch, width, _kind(), local, parts)
    return peak.times(_together(settings) * training_processes(settings) if _kind() == "cpu" else 1)


def _width(settings: Settings) -> int:
    """Bytes of a number of the base."""
    from models.local.dtypes import fast_dtype

    if settings.dtype == "auto":
        return fast_dtype(settings.cache).itemsize
    return {"float32": 4, "bfloat16": 2}[settings.dtype]


def _together(settings: Settings) -> int:
    """How many trainings at once share the memory; on GPUs each has its own."""
    return settings.devices.trainings if _kind() == "cpu" else 1


def _said(settings: Settings, of: str = "") -> str:
    many = _together(settings)
    return f"a training{of} takes" if many == 1 else f"{many} trainings{of} at once take"


def _there(settings: Settings) -> Memory:
    """What a training may take. Made in another process on a GPU, it lies beside what the round's process has loaded by
    then; a base in parts is in the machine's memory there."""
    if given := settings.devices.memory_gib:
        return Memory(given, given)
    own = 0
    if _kind() == "cuda" and made_apart(settings) and not settings.devices.shard:
        own = resident(Shape.of(config_of(settings.base_model), settings.base_model), _width(settings))
    return memory_there(_kind(), settings.devices.sleep, _gpus(settings), own)


def _gpus(settings: Settings) -> list[int]:
    """The GPUs on which trainings are made, as this process counts them: of each training's share one for each of its
    processes. To look at one takes some of its memory."""
    import torch

    many = settings.devices.trainings
    each = len(visible_gpus()) // many
    found = [each * share + one for share in range(many) for one in range(training_processes(settings))]
    return [gpu for gpu in found if gpu < torch.cuda.device_count()] or [0]


def _has(there: Memory) -> str:
    """What there is, and who has the rest."""
    if there.free == there.total:
        return f"{there.free:.1f} GiB"
    notes = []
    if there.own:
        notes.append(
            f"the round's own process will hold {there.own:.1f}, as limits.training_minutes, devices.trainings or "
            "several processes have the training made beside it"
        )
    if there.others > MUCH * there.total:
        notes.append(
            f"another process has {there.others:.1f}: give a server a smaller share or a GPU of its own, or let it "
            "sleep while a training needs the memory (devices.sleep = true)"
        )
    text = f"{there.free:.1f} GiB free of {there.total:.1f} GiB"
    return f"{text} ({'; '.join(notes)})" if notes else text


def _kind() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device() -> str:
    return "the GPU" if _kind() == "cuda" else "this machine"
