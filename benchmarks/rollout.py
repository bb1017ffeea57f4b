"""How fast episodes are sampled: this project's sampler against plain `model.generate` on the same first turns.

    python -m benchmarks.rollout [--episodes 48] [--tokens 32]

Both sides answer the same prompts of the shop (one long shared prefix, a short request each) in the same process, at
the same temperature and number of tokens, with no end of turn, so that both sample equally many. `generate` runs in
the batch size given and pads on the left. Also prints what one linear layer of the model costs at decoding size in
fp32 and bf16, plain and arranged (`models/local/packed.py`). Exits with 1 when the sampler is not faster.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from environments.contract import Prompt
from environments.targets.shop.target import target
from models.local.base import embedded_folder, load_base
from models.local.packed import Packed
from models.policy import Request, Sampling


def prompts(renderer: Any, count: int) -> tuple[list[list[int]], int]:
    """First prompts of `count` test tasks, and how many leading ids they share."""
    shop, rows, shared = target(), [], 0
    tasks = list(shop.tasks("test"))
    for task in (tasks * (count // len(tasks) + 1))[:count]:
        environment = shop.environment()
        first = environment.reset(task)
        talk = renderer.start(Prompt.of(environment), first.messages)
        rows.append(talk.ids)
        shared = talk.shared
    return rows, shared


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@torch.inference_mode()
def generate(model: Any, rows: list[list[int]], tokens: int, pad: int) -> int:
    """Sample `tokens` for each row by transformers; the number of sampled tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=pad,
    )
    return int(out[:, width:].numel())


@torch.inference_mode()
def layer_rows(model: Any, repeats: int = 30, rows: int = 48) -> dict[str, float]:
    """Microseconds of the widest projection on `rows` rows, by dtype and arrangement (best of `repeats`)."""
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        w, x = weight.to(dtype), torch.randn(rows, weight.shape[1]).to(dtype)
        packed = Packed([SimpleNamespace(weight=w)])
        for name, call in (("plain", lambda w=w, x=x: F.linear(x, w)), ("arranged", lambda p=packed, x=x: p(x))):
            figures[f"{str(dtype).removeprefix('torch.')} {name}"] = 1e6 * min(seconds(call) for _ in range(repeats))
    return figures


def main() -> None:
    from transformers import AutoModelForCausalLM

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--episodes", type=int, default=48)
    arguments.add_argument("--tokens", type=int, default=32)
    given = arguments.parse_args()
    base = load_base(rows=given.episodes)
    dtype = next(base.policy.model.parameters()).dtype
    rows, shared = prompts(base.renderer, given.episodes)
    base.policy.stop_ids = frozenset()  # both sides sample the same number of tokens
    asked = [Request(f"r{i}", row, Sampling(0.7, given.tokens, seed=i), None, shared) for i, row in enumerate(rows)]
    plain = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=dtype).eval()
    base.policy.generate(asked[:2])
    generate(plain, rows[:2], 2, base.renderer.end_id)  # both are warm
    base.policy.free_buffers()
    began = base.policy.sampled_tokens
    ours = seconds(lambda: base.policy.generate(asked))
    mine = base.policy.sampled_tokens - began
    theirs = seconds(lambda: generate(plain, rows, given.tokens, base.renderer.end_id))
    total = given.tokens * len(rows)
    ratio = (mine / ours) / (total / theirs)
    print(
        f"{len(rows)} prompts of {sum(map(len, rows)) // len(rows)} ids ({shared} shared), {given.tokens} tokens each,"
    )
    print(f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads")
    print(f"sampler   {mine / ours:8.0f} tokens/s")
    print(f"generate  {total / theirs:8.0f} tokens/s")
    print(f"ratio     {ratio:8.2f}")
    for name, microseconds in layer_rows(plain).items():
        print(f"up_proj on 48 rows, {name:<18} {microseconds:8.0f} us")
    raise SystemExit(0 if ratio > 1 else 1)


if __name__ == "__main__":
    main()
