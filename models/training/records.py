"""The settings of a training, the record of each step, and which checkpoints are whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMPLETE = "complete.json"
# Nats a token, and distance of the mean ratio from 1: beyond these the trainer learns from what another model did.
GAP_ALARM, RATIO_ALARM = 0.1, 0.1
logger = logging.getLogger("trace.models")


@dataclass(frozen=True)
class TrainingSettings:
    """Hyper-parameters. Defaults are those of the embedded default; the published ones are in `profiles/gpu.toml`."""

    steps: int = 8
    groups: int = 6
    group_size: int = 8
    collections: int = 3
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-3
    schedule: str = "constant"
    clip_low: float = 0.2
    clip_high: float = 0.28
    temperature: float = 0.7
    max_tokens: int = 32
    upper_layers: int | None = 15
    micro_batch: int = 24
    solved: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class StepRecord:
    """Figures of one optimizer step. `success` and `reward` are means over the rollouts that were kept."""

    step: int
    reward: float
    success: float
    loss: float
    clip_fraction: float
    kl: float
    logprob_gap: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


def gap_alarm(record: StepRecord) -> str:
    """What is wrong between sampler and trainer, also logged; "" when they agree.

    Before the first update of a batch both are the same policy: their log-probabilities differ by rounding alone.
    """
    ratio = record.metrics.get("sampler_ratio", 1.0)
    if record.logprob_gap <= GAP_ALARM and abs(ratio - 1) <= RATIO_ALARM:
        return ""
    alarm = (
        f"step {record.step}: sampler and trainer are {record.logprob_gap:.3f} nats apart a token, ratio {ratio:.3f} "
        f"(alarm at {GAP_ALARM} and 1 +- {RATIO_ALARM}); serve the trained base in the trainer's dtype, with "
        "--logprobs-mode processed_logprobs"
    )
    logger.warning("%s", alarm)
    return alarm


def misspecified(records: Sequence[StepRecord], window: int = 3) -> str:
    """Why training must stop because reward and success part ways; "" while they do not.

    Reward up by 0.2 with success flat (less than 0.05 up), both as means over `window` steps at the ends.
    """
    if len(records) < 2 * window:
        return ""

    def mean(part: Sequence[StepRecord], name: str) -> float:
        return sum(getattr(r, name) for r in part) / len(part)

    up = {name: mean(records[-window:], name) - mean(records[:window], name) for name in ("reward", "success")}
    if up["reward"] >= 0.2 and up["success"] < 0.05:
        return f"reward-misspecified: reward rose by {up['reward']:.2f} while success rose by {up['success']:.2f}"
    return ""


def last_whole_checkpoint(output: Path) -> tuple[Path, list[StepRecord]] | None:
    """The newest checkpoint that was written to its end, with the records up to it."""
    folders = sorted(output.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for folder in folders:
        if (folder / COMPLETE).is_file():
            return folder, [StepRecord(**r) for r in json.loads((folder / COMPLETE).read_text())]
    return None
