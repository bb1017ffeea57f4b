"""What a draw costs on the model's own logits, by temperature.

    python -m benchmarks.drawing [--rows 48] [--turns 5]

Logits are those of the embedded model after first prompts of the shop's test tasks. Prints milliseconds of a draw for
all rows (the best of some turns) at temperatures 1 and 0.3, with torch's threads as they are set, and the ratio: a
draw at a low temperature must cost no more, although some words then have no weight. Exits with 1 when it costs half as
much again.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from benchmarks.rollout import prompts
from models.local.base import load_base
from models.local.drawing import draw

TEMPERATURES = (1.0, 0.3)


@torch.inference_mode()
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=48)
    arguments.add_argument("--turns", type=int, default=5)
    given = arguments.parse_args()
    base = load_base(rows=given.rows)
    rows, shared = prompts(base.renderer, given.rows)
    hidden = base.policy.forward_rows([row[shared - 1 :] for row in rows], rows[0][: shared - 1])
    last = torch.tensor([len(row) - shared + 1 for row in rows]).cumsum(0) - 1
    logits = base.policy.head(hidden[last])
    uniform = np.random.default_rng(0).random(len(rows)).tolist()
    best = dict.fromkeys(TEMPERATURES, float("inf"))
    for _ in range(given.turns):
        for temperature in TEMPERATURES:
            began = time.perf_counter()
            draw(logits, [temperature] * len(rows), uniform)
            best[temperature] = min(best[temperature], time.perf_counter() - began)
    print(f"{len(rows)} rows of {logits.shape[1]} words, {torch.get_num_threads()} threads")
    for temperature, seconds in best.items():
        below = ((logits.float() - logits.float().amax(1, keepdim=True)) / temperature < -87).float().mean()
        print(f"temperature {temperature}: {1000 * seconds:.1f} ms; {100 * below:.0f} % of the words below exp(-87)")
    ratio = best[0.3] / best[1.0]
    print(f"ratio {ratio:.2f}")
    raise SystemExit(0 if ratio < 1.5 else 1)


if __name__ == "__main__":
    main()
