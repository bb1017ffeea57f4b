"""GRPO on a LoRA adapter: TRL's trainer, our rollouts, and a forward pass that computes a shared prefix once.

One optimizer step, in this order:
1. The actor publishes the adapter as it is now (`models/training/actors.py`).
2. `Rollouts.collect` plays G groups of K rollouts (`models/training/rollouts.py`); all rollouts of a group start from
   one scenario seed. A group whose rewards are all equal teaches nothing and is replaced by a new seed, in at most
   `collections` collections.
3. `group_advantages`, in the same file, turns the rewards into advantages. That is the place to change the advantage.
4. `Rollouts.rollout` hands TRL the exact token ids, the sampler's log-probabilities and the mask of sampled tokens.
   Tokens of tools, users and templates are masked.
5. `EpisodeGRPO` computes the log-probabilities of the sampled tokens (`models/training/trl_trainer.py`). It computes a
   prefix that all rows share once, and it leaves rows without an advantage out.
6. TRL computes the loss: the clipped surrogate with one ratio per token, against the sampler's own log-probabilities,
   summed over the batch's sampled tokens and divided by their number (`loss_type="dapo"`).
7. TRL makes the AdamW step and writes a checkpoint; `_Steps` records the figures, over all groups that were collected,
   and stops a training that is over. Which step's weights are used is decided afterwards (`tasks/train.py`).

Simplified against the paper: one optimizer step per batch, no KL term in the loss (KL to the base is measured), and a
learning rate that is constant or falls linearly. TRL keeps loss, optimizer, checkpoints and distribution.

Shape suffixes of arrays, tensors and nested lists in this folder; they are combined, as in `rewards_GK`:
- `_G` groups, `_K` rollouts of a group, `_R` rows: the G x K rollouts, group by group, or a micro-batch of them;
- `_T` tokens of a row, `_S` scored tokens of a row (or of all rows, one after another), `_N` all tokens of all rows,
  one row after another, `_P` tokens of the prefix that all rows share;
- `_V` vocabulary, `_H` attention heads, `_D` width of a vector, `_1` an axis of length one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from errors import TrainingError
from models.episodes import Trajectory
from models.renderer import Renderer
from models.training.actors import Actor
from models.training.checkpoints import (
    Ended,
    begin,
    complete,
    last_whole_checkpoint,
    read_ended,
    storing,
    weights_by_step,
    write_ended,
)
from models.training.levels import following_level
from models.training.lora import lora_config
from models.training.records import (
    LEAST_RECORDS,
    StepRecord,
    TrainingSettings,
    figures_apart,
    gap_alarm,
    misspecified,
    solved,
)
from models.training.rollouts import NothingToLearn, OutOfEpisodes, Rollouts, ScenarioSource
from models.training.trl_trainer import EpisodeGRPO

# How a training ends for now that was to be made up to a step.
PAUSED = "paused"


class _Steps(TrainerCallback):
    """Turns TRL's logs into step records, marks whole checkpoints, and stops a training that is over."""

    def __init__(
        self, rollouts: Rollouts, on_step: Callable[[StepRecord], None], records: list[StepRecord], until: int | None
    ) -> None:
        self.rollouts, self.on_step, self.records, self.until = rollouts, on_step, records, until
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        groups = tuple(self.rollouts.collected)
        record = StepRecord(
            step=state.global_step,
            loss=float(logs["loss"]),
            clip_fraction=float(logs.get("clip_ratio/region_mean") or 0.0),
            kl=float(logs.get("kl") or 0.0),
            logprob_gap=float(logs.get("logprob_gap") or 0.0),
            seconds=time.perf_counter() - self.began,
            groups=groups,
            metrics={
                **figures_apart(groups),
                **({"level": float(self.rollouts.level)} if self.rollouts.levels > 1 else {}),
                "rollout_seconds": self.rollouts.seconds,
                "dropped_groups": float(self.rollouts.dropped),
                "missing_groups": float(self.rollouts.missing),
                "grad_norm": float(logs.get("grad_norm") or 0.0),
                "entropy": float(logs.get("entropy") or 0.0),
                "sampler_ratio": float(logs.get("sampler_ratio") or 1.0),
                "sampler_ratio_worst": self.rollouts.worst_ratio,
                "played": float(self.rollouts.played),
            },
        )
        self.began = time.perf_counter()
        record.metrics["gap_alarm"] = float(bool(gap_alarm(record)))
        self.records.append(record)
        self.on_step(record)
        self.rollouts.turn_to(following_level(record, self.rollouts.levels))
        if _over(self.records, self.rollouts) or len(self.records) == self.until:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.records)


def _verdict(records: Sequence[StepRecord], settings: TrainingSettings) -> str:
    """What is wrong with the environment; a training of two steps is judged after two."""
    return misspecified(records, min(LEAST_RECORDS, settings.steps))


def _over(records: Sequence[StepRecord], rollouts: Rollouts) -> str:
    """How the training ended by its records, a checkpoint being there: "" while it goes on."""
    settings = rollouts.settings
    if _verdict(records, settings):
        return "misspecified"
    if solved(records, settings.solved, rollouts.levels - 1):
        return "solved"
    return "steps" if len(records) >= settings.steps else ""


@dataclass(frozen=True)
class TrainingResult:
    """What a training made. `weights` are the adapters' folders by step, as PEFT writes them: 0 is what it began from,
    the last is where it ended.

    `ending` says why no further step was made: "steps" (all were), "solved" (the capability's own scenarios, two steps
    running), "mastered" (every episode on them a success, so nothing is left to learn from), "nothing more to learn:
    ...", "misspecified", or "budget" (`most_episodes` do not pay for another step). `verdict` is empty unless the
    adapter must not be used. `environment_seconds` are of this process's rollouts.
    """

    weights: Mapping[int, Path]
    records: tuple[StepRecord, ...]
    ending: str
    verdict: str
    environment_seconds: float = 0.0

    @property
    def last(self) -> int:
        """The last step, whose weights the training ended with."""
        return max(self.weights)

    @property
    def folder(self) -> Path:
        """The adapter that the training ended with."""
        return self.weights[self.last]


def train_adapter(
    source: ScenarioSource,
    actor: Actor,
    renderer: Renderer,
    settings: TrainingSettings,
    output: Path,
    on_step: Callable[[StepRecord], None],
    on_trajectories: Callable[[int, list[Trajectory]], None] = lambda step, trajectories: None,
    start: Path | None = None,
    until: int | None = None,
) -> TrainingResult:
    """Train one adapter, resuming from the last whole checkpoint in `output`; without one, from the weights in `start`
    (an adapter's folder) or from zero. With `until` no step after that one is made, and the training can be gone on
    with: its ending is then `PAUSED`.

    `actor` samples, on the model that is trained or on servers. The base model is left as it was found. A training
    whose groups all have equal rewards ends there: well when it has mastered the environment or has made a step.
    Raises `AdapterError` when `start` does not fit, `StoreError` when a checkpoint cannot be written, and
    `TrainingError` when the loss is not finite or nothing was ever informative.
    """
    resume = last_whole_checkpoint(output)
    records = resume[1] if resume else []
    rollouts = Rollouts(source, actor, renderer, settings, on_trajectories)
    rollouts.played = int(records[-1].metrics.get("played", 0)) if records else 0
    rollouts.collected = list(records[-1].groups) if records else []
    if records:
        rollouts.turn_to(following_level(records[-1], rollouts.levels))
    ended = read_ended(output)
    paused = until is not None and len(records) >= until
    if not ended and not paused and not _over(records, rollouts):
        try:
            with storing(output):
                _train(
                    rollouts, output, _Steps(rollouts, on_step, records, until), resume[0] if resume else None, start
                )
        except NothingToLearn as reached:
            ended = _ended(reached, rollouts, records)
            write_ended(output, ended)
        except OutOfEpisodes:
            ended = Ended("budget", _verdict(records, settings))
            write_ended(output, ended)
    if not all(math.isfinite(r.loss) for r in records):
        raise TrainingError("a stored step has a loss that is not finite; remove the checkpoint folder and train again")
    ended = ended or Ended(_over(records, rollouts) or PAUSED, _verdict(records, settings))
    weights = weights_by_step(output, len(records))
    return TrainingResult(weights, tuple(records), ended.ending, ended.verdict, rollouts.environment_seconds)


def _ended(reached: NothingToLearn, rollouts: Rollouts, records: Sequence[StepRecord]) -> Ended:
    """How a training ends that has nothing to learn from. Raises `TrainingError` when it never had."""
    if reached.mastered:
        return Ended("mastered")
    if not records:
        raise TrainingError(
            f"{reached}; make the reward denser or the scenarios more varied, or raise train.group_size or "
            "train.collections"
        )
    # The step that could not be made has figures too: near misses that all earn the same are where reward parts.
    level = {"level": float(rollouts.level)}
    unmade = StepRecord(len(records) + 1, 0.0, 0.0, 0.0, 0.0, 0.0, tuple(rollouts.collected), level)
    verdict = misspecified([*records, unmade], 2)
    return Ended("misspecified" if verdict else f"nothing more to learn: {reached}", verdict)


def _train(rollouts: Rollouts, output: Path, callback: _Steps, resume: Path | None, start: Path | None) -> None:
    """Make the steps that are owed."""
    from datasets import Dataset
    from peft import get_peft_model

    actor, settings = rollouts.actor, rollouts.settings
    rows = settings.groups * settings.group_size
    micro = max(m for m in range(1, settings.micro_batch + 1) if rows % m == 0)
    torch.manual_seed(settings.seed)
    lora = lora_config(settings, actor.model)
    peft = get_peft_model(actor.model, lora)
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=settings.group_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        temperature=settings.temperature,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        beta=0.0,
        delta=settings.delta or None,
        loss_type="dapo",  # TRL's own advantage is not used: `group_advantages` replaces it
        max_completion_length=4096,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        gradient_checkpointing=False,
        use_cpu=actor.model.device.type == "cpu",
        bf16=actor.model.dtype == torch.bfloat16 and actor.model.device.type != "cpu",
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    try:
        if resume is None:
            begin(peft, lora, output, start)
        trainer = EpisodeGRPO(
            model=peft,
            reward_funcs=_reward,
            args=config,
            train_dataset=Dataset.from_dict(
                {"prompt": [f"slot {i}" for i in range(settings.groups * max(2, settings.steps))]}
            ),
            processing_class=rollouts.renderer.tokenizer,
            callbacks=[callback],
            source=rollouts,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    finally:
        peft.unload()
        actor.retire()


def _reward(reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: the environment's own rewards, handed through."""
    return reward
