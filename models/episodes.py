"""Playing episodes: policies act, environments answer, trajectories come out as each one ends.

A failure of the infrastructure (environment, sandbox, provider, context) is stored as an error with its boundary, and
has no reward: it is owed again. Only what the agent did counts as its failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ParamSpec, TypeVar

from environments.contract import (
    Action,
    Environment,
    Message,
    Observation,
    Prompt,
    Score,
    TargetTask,
    Termination,
    content_hash,
)
from environments.playing import take_turns
from errors import ContextOverflow, EnvironmentFault, PolicyError, TraceError
from models.deadline import DeadlinePassed, within
from models.policy import Generation, MessagePolicy, PolicyIdentity, Request, Sampling, TokenPolicy
from models.renderer import Conversation, Renderer

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("trace.models")

# Longest call into an environment, in seconds: room for a simulated user behind a slow provider.
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Episode:
    """What is to be played. `key` identifies it within the call (usually the trajectory id); `seed` decides the
    policy's draws; `adapter` is the policy's adapter."""

    key: str
    task: TargetTask
    seed: int = 0
    trial: int = 0
    adapter: str | None = None


@dataclass(frozen=True)
class Step:
    """One action and the observation that answered it."""

    action: Action
    observation: Observation
    sampled_tokens: int
    milliseconds: float


@dataclass(frozen=True)
class Trajectory:
    """An episode that ended. `score` is None when an error ended it; then `error` and `boundary` say which."""

    episode: Episode
    policy: PolicyIdentity
    messages: tuple[Message, ...]
    steps: tuple[Step, ...]
    conversation: Conversation
    termination: Termination
    score: Score | None
    seconds: float
    error: str = ""
    boundary: str = ""

    @property
    def sampled_tokens(self) -> int:
        return sum(self.conversation.sampled)


def trajectory_id(
    data_hash: str, environment: str, task: TargetTask, seed: int, trial: int, policy: PolicyIdentity
) -> str:
    """Hash of everything that makes a trajectory the same one."""
    return content_hash([data_hash, environment, task.id, seed, trial, policy.id], 24)


@dataclass
class _Playing:
    episode: Episode
    environment: Environment
    began: float
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    conversation: Conversation = field(default_factory=Conversation)
    environment_seconds: float = 0.0


class Player:
    """Plays episodes on a policy. `environment_seconds` adds up the time spent in environments, `policy_seconds` that
    spent waiting for the policy.

    Each call into an environment has `step_seconds`; one that takes longer ends its episode with an `EnvironmentFault`
    that names the limit (what can be interrupted, and where, stands in `models/deadline.py`). Nothing that an
    environment raises or returns reaches the caller: its episode carries it as an error, the others go on.

    `steps` counts those of all episodes; `stepped` is called after each, for progress before the first episode ends.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        policy: TokenPolicy | MessagePolicy,
        renderer: Renderer | None,
        sampling: Sampling,
        window: int = 64,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.make, self.policy, self.renderer, self.sampling, self.window = make, policy, renderer, sampling, window
        self.step_seconds = step_seconds
        self.environment_seconds = 0.0
        self.policy_seconds = 0.0
        self.steps = 0
        self.stepped: Callable[[], object] = bool

    def play(self, episodes: Iterable[Episode]) -> Iterator[Trajectory]:
        """Trajectories in the order in which episodes end; at most `window` are open at once."""
        if isinstance(self.policy, TokenPolicy):
            if self.renderer is None:
                raise PolicyError("a token policy needs a renderer; make one from its tokenizer")
            yield from self._play_tokens(iter(episodes), self.policy, self.renderer)
        else:
            for episode in episodes:
                yield self._play_scripted(episode, self.policy)

    def _begin(self, episode: Episode) -> tuple[_Playing, Observation]:
        began = time.perf_counter()
        environment = self._guarded("make", self.make)
        playing = _Playing(episode, environment, began)
        try:
            first = _observed(self._guarded("reset", environment.reset, episode.task), "reset")
        except TraceError:
            self._close(environment)
            raise
        playing.messages.extend(first.messages)
        self._spent(playing, began)
        return playing, first

    def _spent(self, playing: _Playing, since: float) -> float:
        seconds = time.perf_counter() - since
        playing.environment_seconds += seconds
        self.environment_seconds += seconds
        return seconds

    def _act(self, playing: _Playing, action: Action, sampled: int) -> Observation:
        since = time.perf_counter()
        observation = _observed(self._guarded("step", playing.environment.step, action), "step")
        seconds = self._spent(playing, since)
        playing.messages.append(action.as_message())
        playing.messages.extend(observation.messages)
        playing.steps.append(Step(action, observation, sampled, 1000 * seconds))
        self.steps += 1
        self.stepped()
        return observation

    def _end(self, playing: _Playing, termination: Termination, problem: TraceError | None = None) -> Trajectory:
        score = None
        if problem is None:
            since = time.perf_counter()
            try:
                score = _checked(self._guarded("score", playing.environment.score))
            except EnvironmentFault as fault:
                problem, termination = fault, Termination.ERROR
            self._spent(playing, since)
        self._close(playing.environment)
        episode = playing.episode
        return Trajectory(
            episode,
            self.policy.identity(episode.adapter),
            tuple(playing.messages),
            tuple(playing.steps),
            playing.conversation,
            termination,
            score,
            time.perf_counter() - playing.began,
            str(problem) if problem else "",
            problem.boundary if problem else "",
        )

    def _guarded(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call into an environment; what it raises becomes an `EnvironmentFault` (what is a `TraceError` stays)."""
        try:
            return within(self.step_seconds, call, *args, **kwargs)
        except TraceError:
            raise
        except DeadlinePassed:
            raise EnvironmentFault(
                f"the environment's {name} did not return within {self.step_seconds} s; make it faster or allow more"
            ) from None
        except Exception as problem:  # a user's environment may raise anything; the round must not end for it
            raise EnvironmentFault(
                f"the environment's {name} raised {type(problem).__name__}: {problem}; mend the environment"
            ) from problem

    def _close(self, environment: Environment) -> None:
        """Close an environment. Its episode is over and scored, so a failure here is only logged."""
        try:
            self._guarded("close", environment.close)
        except TraceError as problem:
            logger.warning("%s", problem)

    def _failed(self, episode: Episode, problem: TraceError) -> Trajectory:
        """An episode that could not even begin."""
        identity = self.policy.identity(episode.adapter)
        return Trajectory(
            episode, identity, (), (), Conversation(), Termination.ERROR, None, 0.0, str(problem), problem.boundary
        )

    def _play_scripted(self, episode: Episode, policy: MessagePolicy) -> Trajectory:
        try:
            playing, first = self._begin(episode)
        except TraceError as problem:
            return self._failed(episode, problem)

        def act(taken: int) -> Action:
            seed = episode.seed * 1_000_003 + taken
            # An oracle asks the environment, so what is raised there is the environment's too.
            return self._guarded("oracle", policy.act, playing.environment, playing.messages, seed)

        try:
            ended = take_turns(playing.environment, first, act, lambda action: self._act(playing, action, 0))
        except ContextOverflow as problem:
            # Before the first turn the task does not fit; later the agent filled its own context (see `_turn`).
            if playing.steps:
                return self._end(playing, Termination.CONTEXT)
            return self._end(playing, Termination.ERROR, problem)
        except TraceError as problem:
            return self._end(playing, Termination.ERROR, problem)
        return self._end(playing, ended)

    def _play_tokens(
        self, episodes: Iterator[Episode], policy: TokenPolicy, renderer: Renderer
    ) -> Iterator[Trajectory]:
        open_ones: dict[str, _Playing] = {}
        while True:
            for episode in islice(episodes, self.window - len(open_ones)):
                try:
                    playing, first = self._begin(episode)
                except TraceError as problem:
                    yield self._failed(episode, problem)
                    continue
                environment = playing.environment
                try:
                    playing.conversation = renderer.start(Prompt.of(environment), first.messages)
                    policy.submit(self._request(playing))
                except TraceError as problem:
                    yield self._end(playing, Termination.ERROR, problem)
                else:
                    open_ones[episode.key] = playing
            if not open_ones:
                return
            since = time.perf_counter()
            generations = policy.poll()
            self.policy_seconds += time.perf_counter() - since
            for generation in generations:
                playing = open_ones[generation.session]
                ended = self._turn(playing, generation, policy, renderer)
                if ended is not None:
                    policy.release(generation.session)
                    del open_ones[generation.session]
                    yield ended

    def _request(self, playing: _Playing) -> Request:
        """The next turn; its seed depends on the episode and the step, not on what else is in the batch."""
        episode = playing.episode
        seed = int(content_hash([episode.task.id, episode.seed, episode.trial, len(playing.steps)], 12), 16)
        sampling = Sampling(self.sampling.temperature, self.sampling.max_tokens, seed)
        return Request(episode.key, playing.conversation.ids, sampling, episode.adapter, playing.conversation.shared)

    def _turn(
        self, playing: _Playing, generation: Generation, policy: TokenPolicy, renderer: Renderer
    ) -> Trajectory | None:
        """Carry one sampled turn into the environment; the trajectory if that ended the episode."""
        try:
            if generation.problem is not None:
                raise generation.problem
            observation = self._act(
                playing, renderer.read(generation.ids, playing.environment.tools), len(generation.ids)
            )
            last = observation.done or len(playing.steps) >= playing.environment.max_steps
            renderer.answer(
                playing.conversation, generation.ids, generation.logprobs, () if last else observation.messages
            )
            if last:
                return self._end(playing, Termination.DONE if observation.done else Termination.MAX_STEPS)
            if len(playing.conversation.ids) + self.sampling.max_tokens > policy.context:
                # The agent filled its own context: its failure, scored as it stands, and counted apart.
                return self._end(playing, Termination.CONTEXT)
            policy.submit(self._request(playing))
        except TraceError as problem:
            return self._end(playing, Termination.ERROR, problem)
        return None


def _observed(observation: Observation, name: str) -> Observation:
    """Refuse an observation outside the contract."""
    if not isinstance(observation, Observation):
        kind = type(observation).__name__
        raise EnvironmentFault(f"{name}() returned {kind}; return environments.contract.Observation")
    for message in observation.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvironmentFault(f"{name}() gave {message!r:.80} as a message; give contract.Message with a text")
        try:
            message.content.encode()
        except UnicodeEncodeError as problem:
            raise EnvironmentFault(f"{name}() gave a text that is not Unicode ({problem}); clean it") from None
    return observation


def _checked(score: Score) -> Score:
    """Refuse a score outside the contract."""
    if not isinstance(score, Score):
        raise EnvironmentFault(f"score() returned {type(score).__name__}; return environments.contract.Score")
    if isinstance(score.reward, bool) or not isinstance(score.reward, int | float):
        raise EnvironmentFault(f"score() gave reward {score.reward!r:.80}; a reward is a number")
    if not 0.0 <= score.reward <= 1.0:  # also catches NaN
        raise EnvironmentFault(f"score() gave reward {score.reward}; rewards lie in [0, 1]")
    return score


def play_all(player: Player, episodes: Sequence[Episode]) -> list[Trajectory]:
    """All trajectories, in the order of `episodes`."""
    done = {t.episode.key: t for t in player.play(episodes)}
    return [done[e.key] for e in episodes]
