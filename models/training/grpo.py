"""GRPO on a LoRA adapter: TRL's trainer, our rollouts, and a forward pass that computes a shared prefix once.

One optimizer step, in this order:
1. The actor publishes the adapter as it is now (`models/training/actors.py`).
2. `Rollouts.collect` plays G groups of K rollouts; all rollouts of a group start from one scenario seed. A group whose
   rewards are all equal teaches nothing and is replaced by a new seed, in at most `collections` collections.
3. `group_advantages` turns the rewards into advantages. This is the place to change the advantage.
4. `Rollouts.rollout` hands TRL the exact token ids, the sampler's log-probabilities and the mask of sampled tokens.
   Tokens of tools, users and templates are masked.
5. `EpisodeGRPO` computes the log-probabilities of the sampled tokens (`models/training/trl_trainer.py`). It computes a
   prefix that all rows share once, and it leaves rows without an advantage out.
6. TRL computes the loss: the clipped surrogate with one ratio per token, against the sampler's own log-probabilities,
   summed over the batch's sampled tokens and divided by their number (`loss_type="dapo"`).
7. TRL makes the AdamW step and writes a checkpoint; `_Steps` records the figures and stops a training that goes wrong.

Simplified against the paper: one optimizer step per batch, no KL term in the loss (KL to the base is measured), and a
learning rate that is constant or falls linearly. TRL keeps loss, optimizer, checkpoints and distribution.

Shape suffixes of arrays, tensors and nested lists in this folder; they are combined, as in `rewards_GK`:
- `_G` groups, `_K` rollouts of a group, `_R` rows: the G x K rollouts, group by group, or a micro-batch of them;
- `_T` tokens of a row, `_S` scored tokens of a row (or of all rows, one after another), `_N` all tokens of all rows,
  one row after another, `_P` tokens of the prefix that all rows share;
- `_V` vocabulary, `_H` attention heads, `_D` width of a vector, `_1` an axis of length one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from environments.contract import Environment, TargetTask
from errors import TrainingError
from models.adapters.files import order_config
from models.episodes import Episode, Player, Trajectory
from models.policy import Sampling
from models.renderer import Renderer
from models.training.actors import Actor
from models.training.forward import common_prefix
from models.training.lora import lora_config
from models.training.records import (
    COMPLETE,
    StepRecord,
    TrainingSettings,
    gap_alarm,
    last_whole_checkpoint,
    misspecified,
)
from models.training.trl_trainer import EpisodeGRPO

logger = logging.getLogger("trace.models")


def group_advantages(rewards_GK: torch.Tensor) -> torch.Tensor:
    """The advantage of every rollout, as (G, K): its reward's distance from the group's mean, in the group's standard
    deviations (unbiased, plus 1e-4 against division by zero).

    Every token that the policy sampled in a rollout gets that rollout's advantage. A group with equal rewards gets 0.
    To change the advantage, change this function: nothing else computes one.
    """
    centred_GK = rewards_GK - rewards_GK.mean(dim=1, keepdim=True)
    k = rewards_GK.shape[1]
    std_G1 = ((centred_GK**2).mean(dim=1, keepdim=True) * (k / (k - 1))).sqrt()
    return centred_GK / (std_G1 + 1e-4)


class ScenarioSource(Protocol):
    """What training draws from: a synthesized environment."""

    def scenario(self, seed: int) -> TargetTask: ...
    def environment(self) -> Environment: ...


class Rollouts:
    """Plays the groups of each step, keeps informative ones, and remembers the figures of the step."""

    def __init__(
        self,
        source: ScenarioSource,
        actor: Actor,
        renderer: Renderer,
        settings: TrainingSettings,
        on_trajectories: Callable[[int, list[Trajectory]], None],
    ) -> None:
        self.environments, self.actor, self.renderer, self.settings = source, actor, renderer, settings
        self.adapter = ""
        self.worst_ratio = 1.0  # of the step, largest of ratio and 1 / ratio over tokens
        self.on_trajectories = on_trajectories
        self.shared = 0
        self.advantages_R = torch.zeros(0)
        self.last: list[Trajectory] = []
        self.dropped = 0
        self.missing = 0
        self.seconds = 0.0
        self.environment_seconds = 0.0

    @property
    def decoder(self) -> Any:
        """The sampler's decoder on the model that is trained; None when servers sample."""
        return getattr(self.actor.policy, "decoder", None)

    def seeds(self, step: int, collection: int) -> list[int]:
        """Scenario seeds of a step's groups: never used twice, nor by calibration (which counts down from -1)."""
        first = ((self.settings.seed % 1000) * 1_000 + step) * self.settings.collections * self.settings.groups
        return [first + collection * self.settings.groups + g for g in range(self.settings.groups)]

    def collect(self, step: int) -> list[Trajectory]:
        """At most G x K trajectories, group by group, each once.

        Groups with equal rewards, and groups that lost an episode to the infrastructure, are replaced while collections
        are left. Groups with equal rewards then fill the batch; lost ones leave it smaller, and `missing` counts them.
        """
        s = self.settings
        kept: list[list[Trajectory]] = []
        spare: list[list[Trajectory]] = []
        lost = 0
        began = time.perf_counter()
        for collection in range(s.collections):
            missing = s.groups - len(kept)
            seeds = self.seeds(step, collection)[:missing]
            episodes = [
                Episode(
                    f"{step}/{collection}/{seed}/{k}",
                    self.environments.scenario(seed),
                    s.seed * 100_003 + step,
                    k,
                    self.adapter,
                )
                for seed in seeds
                for k in range(s.group_size)
            ]
            player = Player(
                self.environments.environment,
                self.actor.policy,
                self.renderer,
                Sampling(s.temperature, s.max_tokens),
                2 * self.actor.rows,
            )
            done = {t.episode.key: t for t in player.play(episodes)}
            self.environment_seconds += player.environment_seconds
            ordered = [done[e.key] for e in episodes]
            self.on_trajectories(step, ordered)
            for g in range(len(seeds)):
                group = ordered[g * s.group_size : (g + 1) * s.group_size]
                if any(t.score is None for t in group):
                    lost += 1
                    continue  # an episode lost to the infrastructure has no reward: its group is not used
                rewards = {round(t.score.reward, 6) for t in group if t.score}
                (kept if len(rewards) > 1 else spare).append(group)
            if len(kept) >= s.groups:
                break
        self.dropped = len(spare)
        if not kept:
            raise TrainingError(
                f"no informative group in {s.collections} collections of {s.groups} groups at step {step}: "
                f"{len(spare)} groups had equal rewards (make the reward denser or the scenarios more varied), "
                f"{lost} lost episodes to the infrastructure"
            )
        while len(kept) < s.groups and spare:
            kept.append(spare.pop(0))  # fills the batch; its advantages are 0
        self.missing = s.groups - len(kept)
        if self.missing:
            logger.warning(
                "step %d learns from %d groups instead of %d: the others lost episodes to the infrastructure",
                step,
                len(kept),
                s.groups,
            )
        self.actor.rest()  # the backward pass needs the memory
        self.seconds = time.perf_counter() - began
        self.last = [t for group in kept for t in group]
        return self.last

    def rollout(self, prompts: list[Any], trainer: EpisodeGRPO) -> dict[str, Any]:
        """TRL's rollout function. The prompts only say how many rows are wanted; the scenarios are ours."""
        step = trainer.state.global_step
        self.adapter = self.actor.publish(step, trainer.accelerator.unwrap_model(trainer.model))
        self.worst_ratio = 1.0
        rows = self.settings.groups * self.settings.group_size
        if len(prompts) != rows:
            raise TrainingError(
                f"the trainer asked for {len(prompts)} rollouts, groups x group size is {rows}; make them equal"
            )
        trajectories = self.collect(step)
        rewards_R = [t.score.reward if t.score else 0.0 for t in trajectories]
        rewards_GK = torch.tensor(rewards_R, dtype=torch.float32, device=trainer.accelerator.device)
        rewards_GK = rewards_GK.view(-1, self.settings.group_size)
        self.advantages_R = torch.zeros(rows, device=rewards_GK.device)
        self.advantages_R[: len(trajectories)] = group_advantages(rewards_GK).flatten()
        # Retention scenarios may come with other instructions than the capability's own.
        shared = min(t.conversation.shared for t in trajectories)
        self.shared = common_prefix([t.conversation.ids[:shared] for t in trajectories])
        out: dict[str, Any] = {
            "prompt_ids": [],
            "completion_ids": [],
            "logprobs": [],
            "env_mask": [],
            "reward": rewards_R,
        }
        for t in trajectories:
            first = t.conversation.sampled.index(True)
            out["prompt_ids"].append(t.conversation.ids[:first])
            out["completion_ids"].append(t.conversation.ids[first:])
            out["logprobs"].append(t.conversation.logprobs[first:])
            out["env_mask"].append([int(s) for s in t.conversation.sampled[first:]])
        for _ in range(rows - len(trajectories)):  # TRL wants whole groups: these rows hold no sampled token
            out["prompt_ids"].append(out["prompt_ids"][0])
            out["completion_ids"].append(out["completion_ids"][0][:1])
            out["logprobs"].append([0.0])
            out["env_mask"].append([0])
            out["reward"].append(0.0)
        return out


class _Steps(TrainerCallback):
    """Turns TRL's logs into step records, marks whole checkpoints, and stops a training that goes wrong."""

    def __init__(self, rollouts: Rollouts, on_step: Callable[[StepRecord], None], records: list[StepRecord]) -> None:
        self.rollouts, self.on_step, self.records = rollouts, on_step, records
        self.began = time.perf_counter()
        self.verdict = ""

    def ended(self, records: Sequence[StepRecord]) -> bool:
        """Whether training is over before its last step: misspecified, or solved in two steps running."""
        solved = len(records) > 1 and sum(r.success for r in records[-2:]) / 2 >= self.rollouts.settings.solved
        return solved or bool(misspecified(records))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        trajectories = [t for t in self.rollouts.last if t.score]
        record = StepRecord(
            step=state.global_step,
            reward=sum(t.score.reward for t in trajectories if t.score) / len(trajectories),
            success=sum(t.score.success for t in trajectories if t.score) / len(trajectories),
            loss=float(logs["loss"]),
            clip_fraction=float(logs.get("clip_ratio/region_mean") or 0.0),
            kl=float(logs.get("kl") or 0.0),
            logprob_gap=float(logs.get("logprob_gap") or 0.0),
            seconds=time.perf_counter() - self.began,
            metrics={
                "rollout_seconds": self.rollouts.seconds,
                "dropped_groups": float(self.rollouts.dropped),
                "missing_groups": float(self.rollouts.missing),
                "grad_norm": float(logs.get("grad_norm") or 0.0),
                "entropy": float(logs.get("entropy") or 0.0),
                "sampler_ratio": float(logs.get("sampler_ratio") or 1.0),
                "sampler_ratio_worst": self.rollouts.worst_ratio,
            },
        )
        self.began = time.perf_counter()
        record.metrics["gap_alarm"] = float(bool(gap_alarm(record)))
        self.records.append(record)
        self.on_step(record)
        self.verdict = misspecified(self.records)
        if self.ended(self.records):
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # Written last: a checkpoint without it was cut off and is not resumed from.
        (folder / COMPLETE).write_text(json.dumps([asdict(r) for r in self.records]))


@dataclass(frozen=True)
class TrainingResult:
    """`folder` holds the adapter as PEFT writes it; `verdict` is empty unless the training was stopped for a reason;
    `environment_seconds` of this process's rollouts."""

    folder: Path
    records: tuple[StepRecord, ...]
    verdict: str
    environment_seconds: float = 0.0


def train_adapter(
    source: ScenarioSource,
    actor: Actor,
    renderer: Renderer,
    settings: TrainingSettings,
    output: Path,
    on_step: Callable[[StepRecord], None],
    on_trajectories: Callable[[int, list[Trajectory]], None] = lambda step, trajectories: None,
) -> TrainingResult:
    """Train one adapter, resuming from the last whole checkpoint in `output`.

    `actor` samples, on the model that is trained or on servers. The base model is left as it was found.
    Raises `TrainingError` when the loss is not finite or nothing is informative.
    """
    from datasets import Dataset
    from peft import get_peft_model

    resume = last_whole_checkpoint(output)
    records = resume[1] if resume else []
    rollouts = Rollouts(source, actor, renderer, settings, on_trajectories)
    rows = settings.groups * settings.group_size
    micro = max(m for m in range(1, settings.micro_batch + 1) if rows % m == 0)
    torch.manual_seed(settings.seed)
    shape: Any = actor.model.config
    peft = get_peft_model(actor.model, lora_config(settings, shape.num_hidden_layers))
    callback = _Steps(rollouts, on_step, records)
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
        trainer = EpisodeGRPO(
            model=peft,
            reward_funcs=_reward,
            args=config,
            train_dataset=Dataset.from_dict(
                {"prompt": [f"slot {i}" for i in range(settings.groups * max(2, settings.steps))]}
            ),
            processing_class=renderer.tokenizer,
            callbacks=[callback],
            source=rollouts,
        )
        trainer.remove_callback(PrinterCallback)
        if not (resume and (len(records) >= settings.steps or callback.ended(records))):
            trainer.train(resume_from_checkpoint=str(resume[0]) if resume else None)
        elif resume:
            trainer._load_from_checkpoint(str(resume[0]))
        folder = output / "adapter"
        peft.save_pretrained(str(folder), safe_serialization=True)
        order_config(folder)
    finally:
        peft.unload()
        actor.retire()
    if records and not all(math.isfinite(r.loss) for r in records):
        raise TrainingError("a stored step has a loss that is not finite; remove the checkpoint folder and train again")
    verdict = callback.verdict or misspecified(records)
    return TrainingResult(folder, tuple(records), verdict, rollouts.environment_seconds)


def _reward(reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: the environment's own rewards, handed through."""
    return reward
