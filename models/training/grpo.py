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
   prefix that all rows share once (what lies below the layers that learn once a training), and it leaves rows without
   an advantage out.
6. TRL computes the loss: the clipped surrogate with one ratio per token, against the sampler's own log-probabilities,
   summed over the batch's sampled tokens and divided by their number (`loss_type="dapo"`).
7. TRL makes the AdamW step and writes a checkpoint; `_Steps` records the figures, over all groups that were collected,
   and stops a training that is over. Which step's weights are used is decided afterwards (`tasks/train.py`).

Simplified against the paper: one optimizer step per batch, no KL term in the loss (KL to the base is measured), and a
learning rate that is constant or falls linearly to 0. TRL keeps loss, optimizer, checkpoints and distribution.

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
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from errors import TrainingError, Untrainable
from models.episodes import Trajectory
from models.out_of_memory import out_of_memory_told
from models.renderer import Conversation, Renderer
from models.training.actors import Actor, retired_after
from models.training.checkpoints import (
    Ended,
    begin,
    complete,
    last_whole_checkpoint,
    read_ended,
    weights_by_step,
    write_ended,
)
from models.training.lora import adapted
from models.training.ranks import OVER, DealtRollouts, ranks
from models.training.recall import Recall
from models.training.records import (
    StepRecord,
    TrainingSettings,
    figures_apart,
    following_level,
    gap_alarm,
    misspecified,
    over,
    verdict_on,
)
from models.training.rollouts import NothingToLearn, OutOfEpisodes, PlayedBefore, Rollouts, ScenarioSource
from models.training.trl_trainer import EpisodeGRPO, StepSource

# How a training ends for now that was to be made up to a step.
PAUSED = "paused"


class _Steps(TrainerCallback):
    """Turns TRL's logs into step records, marks whole checkpoints, and stops a training that is over."""

    def __init__(
        self,
        rollouts: Rollouts | Recall,
        on_step: Callable[[StepRecord], None],
        records: list[StepRecord],
        until: int | None,
        on_saved: Callable[[], None],
    ) -> None:
        self.rollouts, self.on_step, self.records, self.until = rollouts, on_step, records, until
        self.on_saved = on_saved
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        try:
            stop = self._record(state.global_step, logs)
        except BaseException:
            ranks().tell(OVER)
            raise
        ranks().tell(stop)
        if stop:
            control.should_training_stop = True

    def _record(self, step: int, logs: dict[str, Any]) -> bool:
        """Make the record of a step; whether the training ends with it."""
        groups = tuple(self.rollouts.collected)
        record = StepRecord(
            step=step,
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
                "nll": float(logs.get("nll") or 0.0),
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
        return bool(over(self.records, self.rollouts.settings, self.rollouts.levels)) or len(self.records) == self.until

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.records)
        self.on_saved()


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
    *,
    on_trajectories: Callable[[int, list[Trajectory]], None] = lambda step, trajectories: None,
    start: Path | None = None,
    until: int | None = None,
    on_saved: Callable[[], None] = lambda: None,
    ready: PlayedBefore | None = None,
) -> TrainingResult:
    """Train one adapter, resuming from the last whole checkpoint in `output`; without one, from the weights in `start`
    (an adapter's folder) or from zero. With `until` no step after that one is made, and the training can be gone on
    with: its ending is then `PAUSED`. `on_saved` is called when a checkpoint in `output` is whole, and at the end.
    `ready` is what those weights have played for the first step before.

    `actor` samples, on the model that is trained or on servers. The base model is left as it was found. A training
    whose groups all have equal rewards ends there: well when it has mastered the environment or has made a step.
    Raises `AdapterError` when `start` does not fit, `StoreError` when a checkpoint cannot be written, and
    `Untrainable` when the loss is not finite or nothing was ever informative, another `TrainingError` when an outage
    took the groups, `TrainingMemoryError` when the GPU has no memory left.
    """
    rollouts = Rollouts(source, actor, renderer, settings, on_trajectories, ready)
    return _trained(rollouts, renderer, output, on_step, start, until, on_saved)


def recall_adapter(
    successes: Sequence[Conversation],
    actor: Actor,
    renderer: Renderer,
    settings: TrainingSettings,
    output: Path,
    on_step: Callable[[StepRecord], None],
    start: Path | None = None,
) -> TrainingResult:
    """Train one adapter on conversations that succeeded (`models/training/recall.py`), resuming and beginning as
    `train_adapter` does. Raises what that raises of weights, checkpoints and the loss."""
    return _trained(Recall(successes, actor, settings), renderer, output, on_step, start)


def _trained(
    rollouts: Rollouts | Recall,
    renderer: Renderer,
    output: Path,
    on_step: Callable[[StepRecord], None],
    start: Path | None = None,
    until: int | None = None,
    on_saved: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Make the steps that are owed on whatever `rollouts` gives."""
    settings = rollouts.settings
    resume = last_whole_checkpoint(output)
    records = resume[1] if resume else []
    rollouts.played = int(records[-1].metrics.get("played", 0)) if records else 0
    rollouts.collected = list(records[-1].groups) if records else []
    if records:
        rollouts.remember(g for record in records for g in record.groups)
        rollouts.turn_to(following_level(records[-1], rollouts.levels))
    ended = read_ended(output)
    paused = until is not None and len(records) >= until
    if not ended and not paused and not over(records, settings, rollouts.levels):
        try:
            steps = _Steps(rollouts, on_step, records, until, on_saved)
            _train(rollouts, renderer, output, steps, resume[0] if resume else None, start)
        except NothingToLearn as reached:
            ended = _ended(reached, rollouts, records)
            write_ended(output, ended)
        except OutOfEpisodes:
            ended = Ended("budget", verdict_on(records, settings))
            write_ended(output, ended)
    if not all(math.isfinite(r.loss) for r in records):
        raise Untrainable("a stored step has a loss that is not finite; remove the checkpoint folder and train again")
    on_saved()
    ended = ended or Ended(over(records, settings, rollouts.levels) or PAUSED, verdict_on(records, settings))
    weights = weights_by_step(output, len(records))
    return TrainingResult(weights, tuple(records), ended.ending, ended.verdict, rollouts.environment_seconds)


def _ended(reached: NothingToLearn, rollouts: Rollouts | Recall, records: Sequence[StepRecord]) -> Ended:
    """How a training ends that has nothing to learn from. Raises `Untrainable` when it never had."""
    if reached.mastered:
        return Ended("mastered")
    if not records:
        raise Untrainable(f"{reached}; {reached.help}")
    # The step that could not be made has figures too: near misses that all earn the same are where reward parts.
    level = {"level": float(rollouts.level)}
    unmade = StepRecord(len(records) + 1, 0.0, 0.0, 0.0, 0.0, 0.0, tuple(rollouts.collected), level)
    verdict = misspecified([*records, unmade], 2) if rollouts.settings.judged else ""
    return Ended("misspecified" if verdict else f"nothing more to learn: {reached}", verdict)


@dataclass(frozen=True)
class StepsOwed:
    """Steps that are to be made: up to `settings.steps`, in the folder `output`, on from the checkpoint `resume`."""

    settings: TrainingSettings
    output: Path
    resume: Path | None

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        resume = None if self.resume is None else str(self.resume)
        return {"settings": asdict(self.settings), "output": str(self.output), "resume": resume}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> StepsOwed:
        """From JSON."""
        resume = None if message["resume"] is None else Path(message["resume"])
        return cls(TrainingSettings(**message["settings"]), Path(message["output"]), resume)


def _train(
    rollouts: Rollouts | Recall,
    renderer: Renderer,
    output: Path,
    callback: _Steps,
    resume: Path | None,
    start: Path | None,
) -> None:
    """Make the steps that are owed, with the processes that follow, if any."""
    actor, here = rollouts.actor, ranks()
    owed = StepsOwed(rollouts.settings, output.resolve(), resume and resume.resolve())

    def begun(peft: Any, lora: Any) -> None:
        if resume is None:
            begin(peft, lora, output, start)
        here.tell(owed.as_json())

    source = rollouts if here.count == 1 else DealtRollouts(here, rollouts, rollouts.decoder)
    with retired_after(actor):
        make_steps(owed, actor.model, renderer.tokenizer, source, callback, begun)


def make_steps(
    owed: StepsOwed,
    model: Any,
    tokenizer: Any,
    source: StepSource,
    callback: TrainerCallback,
    begun: Callable[[Any, Any], None] = lambda peft, lora: None,
) -> None:
    """Make the steps that are owed, in every process of the training. The model is left as it was found.

    `begun` is given the PEFT model and its configuration before the first step, where they are to be prepared.
    """
    from datasets import Dataset

    settings, here = owed.settings, ranks()
    torch.manual_seed(settings.seed)
    with adapted(model, settings) as (peft, lora), out_of_memory_told(settings, here.count):
        begun(peft, lora)
        here.same_start(p.data for p in peft.parameters() if p.requires_grad)
        slots = settings.groups * max(2, settings.steps)
        trainer = EpisodeGRPO(
            model=peft,
            reward_funcs=_reward,
            args=_config(owed, model, here.count),
            train_dataset=Dataset.from_dict({"prompt": [f"slot {i}" for i in range(slots)]}),
            processing_class=_padding(tokenizer),
            callbacks=[callback],
            source=source,
            most_rows=settings.micro_batch,
            most_tokens=settings.micro_batch_tokens,
            recompute=settings.recompute,
            most_episodes=settings.most_episodes,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(owed.resume) if owed.resume else None)


def _padding(tokenizer: Any) -> Any:
    """The tokenizer, with a token for TRL to pad with where it would find none. Which one is the same: it is masked."""
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        tokenizer = deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _config(owed: StepsOwed, model: Any, processes: int) -> GRPOConfig:
    """TRL's settings of a training."""
    settings = owed.settings
    rows, left = divmod(settings.groups * settings.group_size, processes)
    if left:
        raise TrainingError(
            f"train.groups x train.group_size = {settings.groups} x {settings.group_size} rows are no multiple of the "
            f"{processes} processes that train; change one of the two, or devices.processes"
        )
    config = GRPOConfig(
        output_dir=str(owed.output),
        max_steps=settings.steps,
        per_device_train_batch_size=rows,  # at once: the trainer makes the micro-batches itself
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
        save_steps=1,  # `complete` forgets the earlier ones
        gradient_checkpointing=False,  # `make_learner` does it, for the layers' own pass too
        use_cpu=model.device.type == "cpu",
        bf16=model.dtype == torch.bfloat16 and model.device.type != "cpu",
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    if config.n_gpu > 1:  # several visible GPUs in one process: torch's DataParallel would multiply the batch by them
        config._n_gpu = 1
    return config


def _reward(reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: the environment's own rewards, handed through."""
    return reward
