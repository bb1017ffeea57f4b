"""Playing episodes: policies act, environments answer, trajectories come out as each one ends.

A failure of the infrastructure (environment, sandbox, provider, context) is stored as an error with its boundary, and
has no reward: it is owed again. Only what the agent did counts as its failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from environments.contract import (
    DEEPEST,
    Action,
    Environment,
    Message,
    Observation,
    Prompt,
    Score,
    TargetTask,
    Termination,
    content_hash,
    too_deep,
)
from environments.offered import can_be_said, observed, offered, refuse_tools, suggested
from environments.playing import for_one_episode, take_turns
from environments.scores import checked_score
from environments.wrapping import WrappedEnvironment
from errors import CallOverdue, ContextOverflow, EnvironmentFault, PolicyError, TraceError
from models.deadline import DeadlinePassed, within
from models.overlap import Overlap
from models.policy import MessagePolicy, PolicyIdentity, Request, Sampling, TokenPolicy
from models.renderer import Conversation, Renderer
from models.scripted import OraclePolicy

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("trace.models")

# Longest call into an environment, in seconds. The turns of a user played by a model do not count: each has a limit of
# its own (`models/providers/simulated_user.py`), and one that passes it is the provider's failure.
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
    """An episode that ended. `score` is None when an error ended it; then `error` and `boundary` say which, and
    `lasting` whether it would end it again."""

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
    lasting: bool = False

    @property
    def sampled_tokens(self) -> int:
        return sum(self.conversation.sampled)


def trajectory_id(
    data_hash: str, environment: str, task: TargetTask, seed: int, trial: int, policy: PolicyIdentity
) -> str:
    """Hash of everything that makes a trajectory the same one."""
    return content_hash([data_hash, environment, task.id, seed, trial, policy.id], 24)


@dataclass
class Playing:
    """An episode that is being played."""

    episode: Episode
    environment: Environment
    began: float
    prompt: Prompt = field(default_factory=Prompt)
    tools: Sequence[Mapping[str, Any]] = ()
    max_steps: int = 0
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    conversation: Conversation = field(default_factory=Conversation)
    closed: bool = False


# The episodes that are being played in this process, by their environments: what comes twice would mix two of them up.
_OPEN: WeakValueDictionary[int, Playing] = WeakValueDictionary()
_OPENING = threading.Lock()


class Player:
    """Plays episodes on a policy. `environment_seconds` adds up the time spent waiting for environments,
    `policy_seconds` that spent waiting for the policy.

    On a token policy up to `window` episodes are open, and environments work in threads of their own while turns are
    sampled (`models/overlap.py`); a message policy plays one episode after another in the caller's thread.

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
            yield from Overlap(self, self.policy, self.renderer).play(iter(episodes))
        else:
            for episode in episodes:
                yield self._play_scripted(episode, self.policy)

    def begin(self, episode: Episode) -> tuple[Playing, Observation]:
        """Make an environment and reset it; what it shows first. Raises what ends the episode."""
        began = time.perf_counter()
        environment = self._guarded("make", self.make)
        if not callable(getattr(environment, "reset", None)):
            raise EnvironmentFault(
                f"the target's environment() gave {type(environment).__name__}, which is no environment; let it "
                "return one"
            )
        playing = Playing(episode, environment, began)
        inner = innermost(environment)
        with _OPENING:  # lanes begin several at once
            other = _OPEN.setdefault(id(inner), playing)
        if other is not playing:
            raise EnvironmentFault(
                f"the target's environment() gave the {type(inner).__name__} in which another episode is being played; "
                "let it build a new one each time"
            )
        try:
            first = self._guarded("reset", self._reset, playing)
        except TraceError:
            self.close(playing)
            raise
        playing.messages.extend(first.messages)
        self._spent(began)
        return playing, first

    def _reset(self, playing: Playing) -> Observation:
        environment = playing.environment
        first = observed(environment.reset(for_one_episode(playing.episode.task)), "reset")
        playing.prompt, playing.max_steps = offered(environment)
        playing.tools = environment.tools
        return first

    def _spent(self, since: float) -> float:
        """Seconds since then, which the caller's thread waited unless the environment has one of its own."""
        seconds = time.perf_counter() - since
        if not isinstance(self.policy, TokenPolicy):
            self.environment_seconds += seconds
        return seconds

    def step(self, playing: Playing, action: Action, sampled: int) -> Observation:
        """Carry an action into the environment, and keep both. Raises what ends the episode.

        A turn whose calls are nested too deeply is malformed, whichever policy made it: neither environments nor the
        store have to hold it."""
        if too_deep(action.tool_calls):
            names = ", ".join(str(call.name) for call in action.tool_calls)
            action = Action(malformed=f"({names}: arguments nested deeper than {DEEPEST})")
        since = time.perf_counter()
        observation = self._guarded("step", self._step, playing, action)
        seconds = self._spent(since)
        playing.messages.append(action.as_message())
        playing.messages.extend(observation.messages)
        playing.steps.append(Step(action, observation, sampled, 1000 * seconds))
        return observation

    def _step(self, playing: Playing, action: Action) -> Observation:
        observation = observed(playing.environment.step(action), "step")
        tools = playing.environment.tools
        if tools is not playing.tools:  # some environments offer more in later turns
            refuse_tools(tools)
            playing.tools = tools
        return observation

    def count_step(self) -> None:
        """One more step was taken; in the caller's thread."""
        self.steps += 1
        self.stepped()

    def end(self, playing: Playing, termination: Termination, problem: TraceError | None = None) -> Trajectory:
        """Score an episode (unless a problem ended it) and close its environment. Scoring may ask a target or a
        provider once more, so what is raised there ends this episode alone, as it does in `step`."""
        score = None
        if problem is None:
            since = time.perf_counter()
            try:
                score = self._guarded("score", lambda: checked_score(playing.environment.score()))
            except TraceError as raised:
                problem, termination = raised, Termination.ERROR
            self._spent(since)
        self.close(playing)
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
            bool(problem and problem.lasting),
        )

    def _guarded(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return guarded(self.step_seconds, name, call, *args, **kwargs)

    def close(self, playing: Playing) -> None:
        """Close an episode's environment, once. The episode is over or given up, so a failure here is only logged."""
        if playing.closed:
            return
        playing.closed = True
        _OPEN.pop(id(innermost(playing.environment)), None)
        try:
            self._guarded("close", lambda: playing.environment.close())  # one without it is a fault, too
        except TraceError as problem:
            logger.warning("%s", problem)

    def failed(self, episode: Episode, problem: TraceError) -> Trajectory:
        """An episode that could not even begin."""
        identity, said = self.policy.identity(episode.adapter), (str(problem), problem.boundary, problem.lasting)
        return Trajectory(episode, identity, (), (), Conversation(), Termination.ERROR, None, 0.0, *said)

    def _play_scripted(self, episode: Episode, policy: MessagePolicy) -> Trajectory:
        try:
            playing, first = self.begin(episode)
        except TraceError as problem:
            return self.failed(episode, problem)

        def act(taken: int) -> Action:
            given = playing.environment, playing.messages, episode.seed * 1_000_003 + taken
            if isinstance(policy, OraclePolicy):
                # It asks the environment, so what is raised there is the environment's too.
                return self._guarded("oracle", lambda: suggested(policy.act(*given), "oracle()"))
            return policy.act(*given)

        def step(action: Action) -> Observation:
            observation = self.step(playing, action, 0)
            self.count_step()
            return observation

        try:
            ended = take_turns(playing.environment, first, act, step)
        except ContextOverflow as problem:
            # Before the first turn the task does not fit; later the agent filled its own context (see `Overlap`).
            if playing.steps:
                return self.end(playing, Termination.CONTEXT)
            return self.end(playing, Termination.ERROR, problem)
        except TraceError as problem:
            return self.end(playing, Termination.ERROR, problem)
        return self.end(playing, ended)

    def request(self, playing: Playing) -> Request:
        """The next turn; its seed depends on the episode and the step, not on what else is in the batch."""
        episode = playing.episode
        seed = int(content_hash([episode.task.id, episode.seed, episode.trial, len(playing.steps)], 12), 16)
        sampling = Sampling(self.sampling.temperature, self.sampling.max_tokens, seed)
        return Request(episode.key, playing.conversation.ids, sampling, episode.adapter, playing.conversation.shared)


def innermost(environment: Environment) -> Environment:
    """The environment that others are wrapped around."""
    while isinstance(environment, WrappedEnvironment):
        environment = environment.inner
    return environment


def guarded(seconds: float, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call into an environment, for at most `seconds`; what it raises becomes an `EnvironmentFault` (what is a
    `TraceError` stays)."""
    try:
        return within(seconds, call, *args, **kwargs)
    except TraceError:
        raise
    except DeadlinePassed:
        raise CallOverdue(
            f"the environment's {name} did not return within {seconds} s; make it faster or allow more"
        ) from None
    except BaseException as problem:
        if _ends_the_process(problem):
            raise
        raise EnvironmentFault(f"the environment's {name} raised {_told(problem)}; mend the environment") from problem


def _ends_the_process(problem: BaseException) -> bool:
    """Whether it comes from outside: a person's stop, or one of Prefect's. A user's environment may raise anything else
    and the round goes on: it leaves the process as a program of its own would, asyncio cancels what it waits for, and
    what panics in Rust is no `Exception`."""
    return isinstance(problem, KeyboardInterrupt) or type(problem).__module__.partition(".")[0] == "prefect"


def _told(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:  # an error's text is a user's code as well
        return f"{type(problem).__name__}, whose text cannot be made"


class Guarded(WrappedEnvironment):
    """An environment that is played without a `Player`, as validation does: its calls have the same limit."""

    def __init__(self, inner: Environment, seconds: float = STEP_SECONDS) -> None:
        self.seconds = seconds
        super().__init__(inner)

    @classmethod
    def made(cls, make: Callable[[], Environment], seconds: float = STEP_SECONDS) -> Guarded:
        """What `make` gives; making it has the same limit."""
        return guarded(seconds, "make", lambda: cls(make(), seconds))

    def reset(self, task: TargetTask) -> Observation:
        return guarded(self.seconds, "reset", self._reset, task)

    def _reset(self, task: TargetTask) -> Observation:
        first = observed(super().reset(for_one_episode(task)), "reset")
        offered(self)
        return first

    def step(self, action: Action) -> Observation:
        return guarded(self.seconds, "step", self._step, action)

    def _step(self, action: Action) -> Observation:
        before = self.tools
        said = super().step(action)
        if self.tools is not before:
            refuse_tools(self.tools)
        # What validation tries no agent can say, half a character for one: the environment may say it again.
        return observed(said, "step") if can_be_said(action) else said

    def score(self) -> Score:
        return guarded(self.seconds, "score", super().score)

    def oracle(self) -> Action | None:
        return guarded(self.seconds, "oracle", lambda: suggested(super(Guarded, self).oracle(), "oracle()"))

    def close(self) -> None:
        guarded(self.seconds, "close", super().close)


def play_all(player: Player, episodes: Sequence[Episode]) -> list[Trajectory]:
    """All trajectories, in the order of `episodes`."""
    done = {t.episode.key: t for t in player.play(episodes)}
    return [done[e.key] for e in episodes]
