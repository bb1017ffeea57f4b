"""Trainer and sampler on random weights of a model's shape; `benchmarks/gpu.sh` runs all of it within nine minutes.

    python -m benchmarks.gpu train qwen3-0.6b [--tokens 16384] [--rows 8] [--prefix 0] [--steps 3] [--recompute]
    python -m benchmarks.gpu sample qwen3-0.6b [--adapters 1 4 16] [--turns 64] [--length 128]

`train` prints seconds of an optimizer step (forward, backward, AdamW) on one micro-batch, tokens/s, and the peak of
memory beside the expected one (`models/training/memory.py`); without autocast, which the trainer is without, too.
`sample` prints tokens/s of this project's own sampler, its turns spread over so many adapters. The shape `embedded` has
the embedded model's weights; `tiny` is for a try.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from models.adapters.deltas import lora_deltas
from models.local.attention import NAME
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity, Request, Sampling
from models.training.forward import StepPrefix, by_tokens, token_logprobs
from models.training.learner import make_learner
from models.training.lora import lora_config
from models.training.memory import GIB, Batch, Shape, expected_peak
from models.training.records import TrainingSettings

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": _QWEN3
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"vocab_size": 1000, "num_key_value_heads": 2, "head_dim": 16},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(shape: str, dtype: str) -> Any:
    """The model, on the device, frozen."""
    if shape == "embedded":
        from models.local.base import load_base

        return load_base(dtype=dtype).policy.model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=NAME)
    return model.eval().requires_grad_(False)


def policy_of(model: Any, rows: int) -> LocalPolicy:
    kind = str(model.dtype).removeprefix("torch.")
    return LocalPolicy(model, PolicyIdentity("random", "1", kind, "", ""), frozenset({0}), rows)


def peak_gib() -> float:
    """Peak memory so far: what the GPU had allocated, else what the process had."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def clock() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Figures of optimizer steps on random rows of equal length."""
    from peft import get_peft_model

    model = model_of(given.shape, given.dtype)
    policy = policy_of(model, given.rows)
    settings = TrainingSettings(rank=16, upper_layers=given.layers, recompute=given.recompute)
    torch.manual_seed(0)
    peft = get_peft_model(model, lora_config(settings, model))
    peft.train()
    if given.samples:  # a process that samples, too, holds its weights arranged, with the adapter in them
        policy.load_deltas("training", "0", lora_deltas(peft))
        policy.generate([Request("s", [5, 6, 7], Sampling(1.0, 4, 0), "training")])
        policy.free_buffers()
    learnt = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-5)
    length = given.tokens // given.rows
    draws = torch.Generator().manual_seed(0)
    rows = torch.randint(4, model.config.vocab_size, (given.rows, given.prefix + length), generator=draws).tolist()
    rows = [rows[0][: given.prefix] + row[given.prefix :] for row in rows]
    wanted = [list(range(given.prefix + 1, given.prefix + length)) for _ in rows]
    learner = make_learner(peft.get_base_model(), policy.decoder, given.recompute)
    seconds = []
    for _ in range(given.steps):
        began = clock()
        prefix = StepPrefix(learner, rows[0][: given.prefix]) if given.prefix else None
        for part in by_tokens([length] * given.rows, given.tokens):
            taken = [rows[i] for i in part], given.prefix, [wanted[i] for i in part]
            torch.cat([chosen for chosen, _ in token_logprobs(learner, *taken, 1.0, prefix)]).sum().backward()
        if prefix:
            prefix.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock() - began)
    tokens = given.prefix + given.rows * length
    batch = Batch(given.rows, given.rows * length, length, given.prefix)
    shape = Shape.of(model.config.to_dict())
    expected = expected_peak(shape, settings, batch, model.dtype.itemsize, DEVICE, given.samples)
    least = expected.gib - expected.libraries / GIB * (DEVICE == "cuda")  # CUDA's context is not in torch's figure
    return {
        "shape": given.shape, "device": DEVICE, "dtype": str(model.dtype), "tokens": tokens,
        "step_seconds": round(min(seconds), 3), "tokens_per_second": round(tokens / min(seconds)),
        "peak_gib": round(peak_gib(), 2), "expected_gib": round(least, 2), "expected": expected.text(),
        "learner": type(learner).__name__, "recompute": given.recompute,
    }  # fmt: skip


def sample(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Figures of sampling with turns spread over 1, 4 and more adapters, each as soon as it is there."""
    from peft import get_peft_model

    model = model_of(given.shape, given.dtype)
    policy = policy_of(model, given.turns)
    peft = get_peft_model(model, lora_config(TrainingSettings(upper_layers=given.layers), model))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.01)
    deltas = lora_deltas(peft)
    peft.unload()
    for adapters in given.adapters:
        for number in range(len(policy.adapters), adapters):
            policy.load_deltas(f"a{number}", str(number), deltas)
        draws = torch.Generator().manual_seed(0)
        prompts = torch.randint(4, model.config.vocab_size, (given.turns, 64), generator=draws).tolist()
        requests = [
            Request(f"{adapters}-{i}", prompt, Sampling(1.0, given.length, i), f"a{i % adapters}")
            for i, prompt in enumerate(prompts)
        ]
        warm = [replace(r, session=f"warm-{r.session}", sampling=Sampling(1.0, 2, 0)) for r in requests]
        policy.generate(warm)  # what is made once, for the first turns of a kind, is no figure of sampling
        for request in warm:
            policy.release(request.session)
        began = clock()
        done = policy.generate(requests)
        seconds = clock() - began
        tokens = sum(len(g.ids) for g in done)
        yield {
            "shape": given.shape, "adapters": adapters, "tokens": tokens,
            "tokens_per_second": round(tokens / seconds), "peak_gib": round(peak_gib(), 2),
        }  # fmt: skip
        for request in requests:
            policy.release(request.session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "sample"))
    parser.add_argument("shape", choices=(*SHAPES, "embedded"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16" if DEVICE == "cuda" else "float32"
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=None, help="upper layers that learn; all if not given")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--samples", action="store_true", help="train: the process samples, too")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    for figures in [train(given)] if given.what == "train" else sample(given):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
