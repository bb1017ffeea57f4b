"""The memory that a training is expected to take: against measured peaks, and with what it must grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import SHAPES
from models.training import memory
from models.training.learner import HEAD_ROWS
from models.training.lora import lora_config
from models.training.memory import GIB, Batch, Shape, expected_peak
from models.training.records import TrainingSettings
from tasks.operations.training_memory import EMBEDDED_CONFIG

LAPTOP = TrainingSettings(upper_layers=15)
SHAPE = Shape.of(EMBEDDED_CONFIG)

# `python -m benchmarks.gpu train embedded --layers 15 --samples --steps 1` with these, in fp32: peak GiB.
MEASURED = [
    (Batch(8, 2400, 300, 1200), False, 4.69),
    (Batch(4, 1200, 300, 1200), False, 4.02),
    (Batch(4, 1200, 300, 600), True, 3.0),
]

# `python -m benchmarks.gpu train qwen3-0.6b` and `train qwen3-4b --recompute` on an H200, in bf16: peak GiB that torch
# had allocated, so without CUDA's context.
ON_GPU = [("qwen3-0.6b", Batch(8, 16_384, 2_048, 0), False, 34.29), ("qwen3-4b", Batch(8, 16_384, 2_048, 0), True, 14.97)]


@pytest.mark.parametrize(("batch", "recompute", "gib"), MEASURED)
def test_it_is_within_a_factor_of_what_was_measured(batch: Batch, recompute: bool, gib: float) -> None:
    found = expected_peak(SHAPE, replace(LAPTOP, recompute=recompute), batch, 4, "cpu").gib
    assert gib / 1.3 < found < 1.3 * gib


@pytest.mark.parametrize(("name", "batch", "recompute", "gib"), ON_GPU)
def test_on_a_gpu_it_is_within_a_factor_of_what_was_measured(
    name: str, batch: Batch, recompute: bool, gib: float
) -> None:
    shape = Shape.of(SHAPES[name])
    settings = TrainingSettings(rank=16, upper_layers=None, recompute=recompute)
    peak = expected_peak(shape, settings, batch, 2, "cuda", False)
    assert gib / 1.3 < peak.gib - peak.libraries / GIB < 1.3 * gib


@pytest.mark.parametrize(
    "config",
    [
        EMBEDDED_CONFIG,
        {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": False},
        {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": True}
        | {"num_experts": 8, "moe_intermediate_size": 48},
    ],
)
def test_weights_and_adapter_are_those_of_the_model(config: dict[str, object]) -> None:
    """The few weights of norms and routers apart."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shape = Shape.of(model.config.to_dict())
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    if shape.experts == 1:
        from peft import get_peft_model

        peft = get_peft_model(model, lora_config(replace(LAPTOP, rank=4, upper_layers=None), model))
        learnt = sum(p.numel() for p in peft.parameters() if p.requires_grad)
        assert shape.layers * shape.adapter(4) == learnt


def test_it_counts_with_what_the_pass_holds() -> None:
    assert memory.HEAD_ROWS == HEAD_ROWS


def test_a_long_conversation_takes_in_proportion_and_recomputing_a_fraction() -> None:
    long, longer = Batch(1, 15_000, 15_000, 500), Batch(1, 30_000, 30_000, 500)
    kept = [expected_peak(SHAPE, LAPTOP, b, 2, "cuda").activations for b in (long, longer)]
    assert 1.9 < kept[1] / kept[0] < 2.0, "no attention weights, which would grow with the square"
    again = expected_peak(SHAPE, replace(LAPTOP, recompute=True), longer, 2, "cuda").activations
    assert again < 0.25 * kept[1]


def test_a_process_that_does_not_sample_holds_less() -> None:
    batch = Batch(8, 2400, 300, 1200)
    alone, both = (expected_peak(SHAPE, LAPTOP, batch, 4, "cpu", sampling) for sampling in (False, True))
    assert alone.weights < both.weights
    assert alone.adapter < both.adapter
