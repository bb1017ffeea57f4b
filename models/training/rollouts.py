"""The rollouts of a training: groups of episodes that start from one scenario, and the advantages that follow.

Shape suffixes: `models/training/grpo.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from environments.contract import Environment, TargetTask
from errors import TrainingError
from models.episodes import Episode, Player, Trajectory
from models.policy import Sampling
from models.renderer import Renderer
from models.training.actors import Actor
from models.training.forward import common_prefix
from models.training.records import TrainingSettings
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
