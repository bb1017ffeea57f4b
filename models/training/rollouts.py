"""The rollouts of a training: groups of episodes that start from one scenario, and the advantages that follow.

Shape suffixes: `models/training/grpo.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from environments.contract import Environment, Message, TargetTask
from environments.synthesized.hints import Advised, advised, is_advised, unadvised, with_advice
from errors import NotFinite, TraceError, TrainingError
from models.episodes import Episode, Player, Trajectory
from models.local.kv_cache import common_prefix
from models.opening import opened
from models.policy import Sampling
from models.renderer import Conversation, Renderer
from models.training.actors import Actor
from models.training.records import Allowed, Dialled, GroupFigures, TrainingSettings, come_apart, levels_of, step_seed
from models.training.trl_trainer import EpisodeGRPO, trl_rows

logger = logging.getLogger("trace.models")

# Scenario seeds of a step, of which those from SPARE_SEEDS on stand in for others; and steps of a training.
SEEDS, SPARE_SEEDS, STEPS = 1_000_000, 900_000, 100_000
# Rewards of a group that are no further apart are equal.
EQUAL = 1e-6
# What to do where a training ends before its first step.
MEND = "mend the environment's module, or have another made"
DENSER = "make the reward denser or the scenarios more varied, or raise train.group_size or train.collections"
# Success on own scenarios of a family, without advice, from which its next ones are shown none.
UNHINTED = 0.3


def scenario_seed(seed: int, step: int, place: int) -> int:
    """The scenario seed of a place in a step of a training: a number for each (seed, step, place).

    So no two steps share one, nor two trainings with different `seed`s, such as those of a home's rounds, whatever
    their settings. None is negative: those are for calibration and for choosing a checkpoint.
    """
    return (seed * STEPS + step) * SEEDS + place


def group_advantages(rewards_GK: torch.Tensor, scaled: bool = True) -> torch.Tensor:
    """The advantage of every rollout, as (G, K): its reward's distance from the group's mean, if `scaled` in the
    group's standard deviations (unbiased, plus 1e-4 against division by zero).

    Not scaled (Liu et al., 2025, arXiv 2503.20783), a group of near misses that differ by little weighs little.

    Every token that the policy sampled in a rollout gets that rollout's advantage. A group with equal rewards gets 0.
    To change the advantage, change this function: nothing else computes one.
    """
    centred_GK = rewards_GK - rewards_GK.mean(dim=1, keepdim=True)
    # The mean of equal numbers is rounded, and so divided by next to nothing would be an advantage.
    spread_G1 = rewards_GK.amax(dim=1, keepdim=True) - rewards_GK.amin(dim=1, keepdim=True)
    centred_GK = centred_GK.masked_fill(spread_G1 < EQUAL, 0.0)
    if not scaled:
        return centred_GK
    k = rewards_GK.shape[1]
    std_G1 = ((centred_GK**2).mean(dim=1, keepdim=True) * (k / (k - 1))).sqrt()
    return centred_GK / (std_G1 + 1e-4)


def dealt_out(advantages_GK: torch.Tensor, seed: int) -> torch.Tensor:
    """The advantages of each group, (G, K), among its own rollouts in an order that `seed` decides."""
    draws = torch.Generator().manual_seed(seed)
    order_GK = torch.stack([torch.randperm(len(row), generator=draws) for row in advantages_GK])
    return advantages_GK.gather(1, order_GK.to(advantages_GK.device))


class ScenarioSource(Protocol):
    """What training draws from: a synthesized environment. `own` says of a scenario whether it needs the capability;
    the others are there for retention; `advice` is a worked example that an own one may be shown with."""

    def scenario(self, seed: int) -> TargetTask: ...
    def own(self, task: TargetTask) -> bool: ...
    def advice(self, task: TargetTask) -> Sequence[Message]: ...
    def environment(self) -> Environment: ...


class NothingToLearn(Exception):
    """All groups of all collections of a step have equal rewards, or are lost for good; `mastered` when every own
    episode succeeded. `help` says what to do where nothing was learnt before."""

    def __init__(self, message: str, mastered: bool, help: str) -> None:
        super().__init__(message)
        self.mastered, self.help = mastered, help


class OutOfEpisodes(Exception):
    """The next collection would pass `TrainingSettings.most_episodes`."""


@dataclass(frozen=True)
class PlayedBefore:
    """Whole groups that what is trained has played before its first step, at the training's temperature: `learn` are
    informative and are learnt from in that step, the `rest` are in its figures alone, which without them would say more
    than it can."""

    learn: Sequence[Sequence[Trajectory]] = ()
    rest: Sequence[Sequence[Trajectory]] = ()


class Rollouts:
    """Plays the groups of each step, keeps informative ones, and remembers the figures of the step.

    `collected` has what every group of the step came to that has a scored episode, learnt from or not, each once, and
    before the first step what the last step of an earlier process came to. Rollouts with advice are in no figure.
    `ready` is what has been played for the first step before. `played` counts the episodes of all steps, those not
    among them. `level` of `levels` is how hard the own scenarios are (`turn_to`).
    """

    def __init__(
        self,
        source: ScenarioSource,
        actor: Actor,
        renderer: Renderer,
        settings: TrainingSettings,
        on_trajectories: Callable[[int, list[Trajectory]], None],
        ready: PlayedBefore | None = None,
    ) -> None:
        self.ready = ready or PlayedBefore()
        self.environments, self.actor, self.renderer, self.settings = source, actor, renderer, settings
        self.level, self.levels = levels_of(source)
        self.adapter = ""
        self.worst_ratio = 1.0  # of the step, largest of ratio and 1 / ratio over tokens
        self.on_trajectories = on_trajectories
        self.shared, self.repeats = 0, False
        self.advantages_R = torch.zeros(0)
        self.hinted_R = torch.zeros(0, dtype=torch.bool)
        self.collected: list[GroupFigures] = []
        self.known: dict[str, GroupFigures] = {}  # what the last own scenario of each family came to
        self.dropped = 0
        self.missing = 0
        self.played = 0
        self.seconds = 0.0
        self.environment_seconds = 0.0

    def remember(self, groups: Iterable[GroupFigures]) -> None:
        """Groups that were collected, in their order, here or by an earlier process: what advice is given by."""
        self.known |= {group.family: group for group in groups if group.own}

    def turn_to(self, level: int) -> None:
        """Draw scenarios of another level from now on."""
        if level != self.level and isinstance(self.environments, Dialled):
            self.level, self.environments = level, self.environments.at(level)

    def scenarios(self, step: int, collection: int, count: int) -> list[TargetTask]:
        """`count` scenarios of a collection, one a group, never drawn twice (`scenario_seed`).

        A step's first collection is of the whole step, and has at least one of the capability's own, if a draw in a
        hundred is one: a step on retention scenarios alone would teach nothing, and nothing could be said of it. Groups
        that were played before stand in for own ones of it: those for retention are what is left.
        """
        groups, first = self.settings.groups, collection * self.settings.groups
        if collection:
            return [self._scenario(step, first + g) for g in range(count)]
        drawn = [self._scenario(step, g) for g in range(groups)]
        if not any(map(self.environments.own, drawn)):
            further = (self._scenario(step, SPARE_SEEDS + i) for i in range(100))
            drawn[-1] = next(filter(self.environments.own, further), drawn[-1])
        given = [g for g, task in enumerate(drawn) if self.environments.own(task)][: groups - count]
        return [task for g, task in enumerate(drawn) if g not in given][:count]

    def _begun(self, step: int) -> list[list[Trajectory]]:
        """The groups that a step begins with: of those that were played before, as many as it has own scenarios."""
        if step or not self.ready.learn:
            return []
        own = sum(map(self.environments.own, self.scenarios(step, 0, self.settings.groups)))
        return [list(group) for group in self.ready.learn[:own]]

    def _scenario(self, step: int, place: int) -> TargetTask:
        return self.environments.scenario(scenario_seed(self.settings.seed, step, place))

    def _seed(self, step: int) -> int:
        return step_seed(self.settings.seed, step)

    @property
    def decoder(self) -> Any:
        """The sampler's decoder on the model that is trained; None when servers sample."""
        return getattr(self.actor.policy, "decoder", None)

    def collect(self, step: int) -> list[Trajectory]:
        """At most G x K trajectories of a step, as `_collect` says. Where there is nothing to learn at a level of
        difficulty, the next harder one is tried when it was mastered, else the next easier one, each once. What is
        raised then is `mastered` for the hardest level alone."""
        if isinstance(self.environments, Allowed):
            owed = (self.settings.groups - len(self._begun(step))) * self.settings.group_size
            self.environments.allow(owed, self._seed(step))
        tried = {self.level}
        while True:
            try:
                return self._collect(step)
            except NothingToLearn as reached:
                other = self.level + (1 if reached.mastered else -1)
                if other in tried or not 0 <= other < self.levels:
                    # An easier level that is solved is not what the training was for.
                    reached.mastered &= self.level == self.levels - 1
                    raise
                logger.info("step %d turns to level %d of %d: %s", step, other, self.levels, reached)
                tried.add(other)
                self.turn_to(other)

    def _collect(self, step: int) -> list[Trajectory]:
        """At most G x K trajectories, group by group, each once.

        Groups with equal rewards, and groups that lost an episode to the infrastructure, are replaced while collections
        are left. Groups with equal rewards then fill the batch; lost ones leave it smaller, and `missing` counts them.

        Raises `NothingToLearn` when all rewards are equal, `OutOfEpisodes` when no informative group can be paid for, a
        transient `TrainingError` when none is informative and at least half of them lost an episode that another try
        may not lose, and a lasting one when the adapter has come apart.
        """
        s = self.settings
        before = self.ready if step == 0 else PlayedBefore()
        kept = self._begun(step)
        spare: list[list[Trajectory]] = []
        lost: list[Trajectory] = []
        self.collected = []
        for played in (*before.learn, *before.rest):
            self._count(played, played[0].episode.task)
        began = time.perf_counter()
        for collection in range(s.collections + s.patience):
            if len(kept) >= s.groups or (kept and collection >= s.collections):
                break
            if not self._can_pay((s.groups - len(kept)) * s.group_size):
                if not kept:
                    raise OutOfEpisodes(f"{self.played} of at most {s.most_episodes} episodes are played")
                break
            tasks = self.scenarios(step, collection, s.groups - len(kept))
            episodes = [
                # Numbered through the step: a task that is drawn twice in it is sampled by other random numbers.
                Episode(
                    f"{step}/{collection}/{g}/{k}{self._at}",
                    told,
                    self._seed(step),
                    (collection * s.groups + g) * s.group_size + k,
                    self.adapter,
                )
                for g, task in enumerate(tasks)
                for k, told in enumerate(self._told(task))
            ]
            player = Player(
                lambda: Advised(self.environments.environment()),
                self.actor.policy,
                self.renderer,
                Sampling(s.temperature, s.max_tokens),
                2 * self.actor.rows,
            )
            try:
                done = {t.episode.key: t for t in player.play(episodes)}
            except NotFinite as problem:
                raise come_apart(step) from problem
            self.environment_seconds += player.environment_seconds
            ordered = [done[e.key] for e in episodes]
            if not all(math.isfinite(sum(t.conversation.logprobs)) for t in ordered):
                raise come_apart(step)
            self.played += len(ordered)
            self.on_trajectories(step, ordered)
            ordered = [self._unhinted(t) if t.score and is_advised(t.episode.task) else t for t in ordered]
            for g, task in enumerate(tasks):
                group = ordered[g * s.group_size : (g + 1) * s.group_size]
                self._count(group, task)
                if gone := [t for t in group if t.score is None]:
                    lost.append(max(gone, key=lambda t: t.lasting))
                    continue  # an episode lost to the infrastructure has no reward: its group is not used
                rewards = {round(t.score.reward, 6) for t in group if t.score}
                (kept if len(rewards) > 1 else spare).append(group)
        self.dropped = len(spare)
        self.remember(self.collected)
        if not kept:
            self._refuse(step, len(spare), lost)
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
        return [t for group in kept for t in group]

    @property
    def _at(self) -> str:
        """What tells the episodes of a level from those that another had in the same step."""
        return f"/level{self.level}" if self.levels > 1 else ""

    def _can_pay(self, episodes: int) -> bool:
        most = self.settings.most_episodes
        return most is None or self.played + episodes <= most

    def _hinted(self, task: TargetTask) -> int:
        """How many rollouts of a scenario's group get advice: none where it is there for retention, and none where the
        last one of its family came to enough without. Families are told apart, because one that never succeeds would
        else be left alone as soon as the others do."""
        known = self.known.get(task.family)
        if not self.environments.own(task) or (known is not None and known.success >= UNHINTED):
            return 0
        wanted = self.settings.hints * self.settings.group_size
        return max(1, math.floor(wanted + 1e-9)) if wanted else 0  # no more than that share, and some where it is small

    def _told(self, task: TargetTask) -> list[TargetTask]:
        """The task for each rollout of a group: the last ones of it come with advice, where there is to be any."""
        hinted = self._hinted(task)
        plain = [task] * self.settings.group_size
        advice = self.environments.advice(task) if hinted else ()
        return [*plain[hinted:], *[advised(task, advice)] * hinted] if advice else plain

    def _unhinted(self, played: Trajectory) -> Trajectory:
        """A rollout that was played with advice as if it had been played without: the same turns behind the prompt that
        the scenario has by itself. One whose environment fails now is lost to it, as it would have been before."""
        task = played.episode.task
        try:
            prompt, first = opened(self.environments.environment, unadvised(task))
        except TraceError as problem:
            return replace(played, score=None, error=str(problem), boundary=problem.boundary)
        plain = self.renderer.start(prompt, first)
        shown = len(self.renderer.start(with_advice(prompt, task), first).ids)
        was = played.conversation
        conversation = Conversation(
            [*plain.ids, *was.ids[shown:]],
            [*plain.sampled, *was.sampled[shown:]],
            [*plain.logprobs, *was.logprobs[shown:]],
            plain.shared,
        )
        return replace(played, conversation=conversation)

    def _count(self, group: Sequence[Trajectory], task: TargetTask) -> None:
        """Add what a group came to; episodes without a score, and those with advice, are in no figure."""
        scores = [t.score for t in group if t.score and not is_advised(t.episode.task)]
        if scores:
            wins, reward = sum(s.success for s in scores), sum(s.reward for s in scores) / len(scores)
            self.collected.append(GroupFigures(self.environments.own(task), len(scores), wins, reward, task.family))

    def _refuse(self, step: int, equal: int, lost: Sequence[Trajectory]) -> None:
        """Say why nothing can be learnt from what the step has collected. `NothingToLearn` ends a training for good: a
        few equal groups among lost ones do not say so much, and another try may, but of those lost each time."""
        s = self.settings
        tried = f"no informative group in {s.collections + s.patience} collections of {s.groups} groups at step {step}"
        again = [t for t in lost if t.lasting]
        if len(lost) - len(again) >= equal + len(again):
            share = f"{len(lost)} of {len(lost) + equal} groups" if equal else "every group"
            said = f"{tried}: {share} lost an episode to the infrastructure, the last to: {lost[-1].error}"
            problem = TrainingError(said)
            problem.transient = True
            raise problem
        own = [g for g in self.collected if g.own]
        mastered = bool(own) and not again and all(g.successes == g.episodes for g in own)
        also = f"; the others lost episodes to the infrastructure, the last to: {lost[-1].error}" if lost else ""
        if again:
            also = f"; {len(again)} lost an episode to what its module raises each time, the last to: {again[-1].error}"
        said = f"{tried}: {equal} groups had equal rewards{also}"
        raise NothingToLearn(said, mastered, MEND if len(again) > equal else DENSER)

    def rollout(self, prompts: list[Any], trainer: EpisodeGRPO) -> dict[str, Any]:
        """TRL's rollout function. The prompts only say how many rows are wanted; the scenarios are ours."""
        step = trainer.state.global_step
        try:
            self.adapter = self.actor.publish(step, trainer.accelerator.unwrap_model(trainer.model))
        except NotFinite as problem:
            raise come_apart(step) from problem
        self.worst_ratio = 1.0
        rows = self.settings.groups * self.settings.group_size
        if len(prompts) != rows:
            raise TrainingError(
                f"the trainer asked for {len(prompts)} rollouts, groups x group size is {rows}; make them equal"
            )
        trajectories = self.collect(step)
        rewards_R = [t.score.reward if t.score else 0.0 for t in trajectories]
        rewards_GK = torch.tensor(rewards_R, dtype=torch.float32, device=trainer.accelerator.device)
        advantages_GK = group_advantages(rewards_GK.view(-1, self.settings.group_size), self.settings.scaled)
        if self.settings.shuffled:
            advantages_GK = dealt_out(advantages_GK, self._seed(step))
        self.advantages_R = torch.zeros(rows, device=rewards_GK.device)
        self.advantages_R[: len(trajectories)] = advantages_GK.flatten()
        # A rollout with advice teaches by its success alone: the policy would not have made its mistakes. Where rewards
        # are dealt out at random, it would teach that being advised, which is mostly to succeed, is good.
        self.hinted_R = torch.zeros(rows, dtype=torch.bool, device=rewards_GK.device)
        self.hinted_R[: len(trajectories)] = torch.tensor([is_advised(t.episode.task) for t in trajectories])
        if not self.settings.shuffled:
            self.advantages_R[self.hinted_R & (self.advantages_R < 0)] = 0.0
        conversations = [t.conversation for t in trajectories]
        # Retention scenarios may come with other instructions than the capability's own.
        self.shared = common_prefix([c.ids[: min(c.shared for c in conversations)] for c in conversations])
        return trl_rows(conversations, rewards_R, rows)
