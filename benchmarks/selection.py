"""Selection at scale: 100,000 trajectories x 20 capabilities x 10 runs (20 million labels).

python -m benchmarks.selection
"""

from __future__ import annotations

import resource
import time

import numpy as np
import pandas as pd

from tasks.mining.checks_analyst import bootstrap_labels, label_matrix
from tasks.mining.selection import select


def example(trajectories: int, capabilities: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Checks, one a trajectory and capability, and outcomes."""
    rng = np.random.default_rng(0)
    passed = rng.random(trajectories) < 0.5
    ids = pd.Series([f"t{i:06d}" for i in range(trajectories)])
    outcomes = pd.DataFrame({"trajectory_id": ids, "task_id": np.arange(trajectories) // 4, "passed": passed})
    rows = np.repeat(np.arange(trajectories), capabilities)
    kinds = np.tile(np.arange(capabilities), trajectories)
    lacking = rng.random(len(rows)) < np.where(passed[rows], 0.2, 0.2 + 0.4 * (kinds % 2))
    checks = pd.DataFrame(
        {
            "trajectory_id": ids.to_numpy()[rows],
            "kind": pd.Categorical.from_codes(kinds, categories=[f"capability_{c:02d}" for c in range(capabilities)]),
            "required": rng.random(len(rows)) < 0.5,
            "passed": ~lacking,
        }
    )
    return checks, outcomes


def figures() -> dict[str, float]:
    """Labels and selection as a multiple (processor time) of drawing as many numbers with NumPy and counting them once;
    best of three. Counting alone waits for memory, which made the yardstick three times as long on a busy machine."""
    runs, trajectories, capabilities = 10, 50_000, 20
    checks, outcomes = example(trajectories, capabilities)
    cells = np.tile(checks["required"].to_numpy(dtype=np.int64), runs)
    ours, yardstick = [], []
    for seed in range(3):
        began = time.process_time()
        select(label_matrix(checks, outcomes, runs, seed), n=runs)
        counted = time.process_time()
        np.bincount(cells, weights=np.random.default_rng(seed).random(len(cells)), minlength=6)
        ours.append(counted - began)
        yardstick.append(time.process_time() - counted)
    return {"labels and selection / draw and bincount": min(ours) / min(yardstick)}


def main(trajectories: int = 100_000, capabilities: int = 20, runs: int = 10) -> None:
    checks, outcomes = example(trajectories, capabilities)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    labels = bootstrap_labels(checks, outcomes, runs, seed=0)
    labelled = time.perf_counter()
    chosen = select(labels, n=runs)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"labels            {len(labels):,} ({labels.memory_usage().sum() / 2**20:.0f} MiB)")
    print(f"bootstrap_labels  {labelled - start:.2f} s")
    print(f"select            {done - labelled:.2f} s")
    print(f"total             {done - start:.2f} s, {sum(c.selected for c in chosen)} of {len(chosen)} selected")
    print(f"peak memory       {peak / 2**20:.2f} GiB (inputs alone {before / 2**20:.2f} GiB)")


if __name__ == "__main__":
    main()
