"""One episode of a simple policy in an environment, as validation and the red team need it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from environments.contract import Action, Environment, Message, Observation, Score, TargetTask, canonical_json
from environments.playing import take_turns
from environments.sandbox.workers import WorkerDied, WorkerNotStarted
from environments.scores import checked_score
from errors import BudgetExceeded, ProviderError

# What code from outside this project may raise, on purpose or by mistake: a list of classes would always lack one
# (`re.error` is a plain Exception). A fault is a finding here and is kept.
FAULTS = (Exception,)


class TooSlow(Exception):
    """The checks of an environment have taken all the time that they may take together. It ends them, not an episode
    alone; its text is the reason against the environment."""


# A model from outside that plays the user and fails, or may cost no more, or a machine that starts no worker: it says
# nothing of the environment. No time is left: there is nothing more to find.
OUTSIDE = (ProviderError, BudgetExceeded, TooSlow, WorkerNotStarted)
# A reward this high counts as a win whatever `success` says: training follows the reward.
FULL_REWARD = 0.95

# After this many faults an environment counts as broken; each further fault would only cost a deadline.
ENOUGH_FAULTS = 3

# Environment (oracles only may ask it), messages so far, random numbers -> action, or None to stop.
SimplePolicy = Callable[[Environment, Sequence[Message], random.Random], Action | None]


@dataclass(frozen=True)
class Played:
    """An episode: its score (None on a fault), the bytes that equal episodes share (on a fault its text without what
    was measured), steps, the fault's text, and the conversation (up to the fault)."""

    score: Score | None
    transcript: bytes
    steps: int
    error: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def won(self) -> bool:
        """Success, or a reward as good as one."""
        return self.score is not None and (self.score.success or self.score.reward >= FULL_REWARD)


def play(
    environment: Environment, task: TargetTask, policy: SimplePolicy, *, seed: int = 0, past_the_end: bool = False
) -> Played:
    """Play `task` to its end and score it. `past_the_end` goes on acting after `done`, as a hostile client may.

    What the environment raises is kept in `error`, and a score that episodes would refuse is a fault too; what is of
    `OUTSIDE` is raised. Its calls have no limit of time here: a module's worker has its own, any other environment is
    given one by whoever makes it (`models.episodes.Guarded`).
    """
    rng = random.Random(seed)
    messages: list[Message] = []
    steps = 0

    def act(taken: int) -> Action | None:
        return policy(environment, messages, rng)

    def step(action: Action) -> Observation:
        nonlocal steps
        steps += 1
        messages.append(action.as_message())
        observation = environment.step(action)
        messages.extend(observation.messages)
        return observation

    try:
        first = environment.reset(task)
        messages.extend(first.messages)
        take_turns(environment, first, act, step, past_the_end=past_the_end)
        score = checked_score(environment.score())
        shown = [message.as_dict() for message in messages if message.role != "assistant"]
        judged = vars(score) | {"checks": [vars(check) for check in score.checks], "metrics": dict(score.metrics)}
        return Played(score, _bytes([shown, judged]), steps, "", tuple(messages))
    except OUTSIDE:
        raise
    except FAULTS as error:
        name = type(error).__name__
        plain = error.plain if isinstance(error, WorkerDied) else error
        return Played(None, _bytes(f"{name}: {plain}"), steps, f"{name}: {error}"[:500], tuple(messages))


def play_all(
    environment: Environment, tasks: Sequence[TargetTask], policy: SimplePolicy, *, past_the_end: bool = False
) -> list[Played]:
    """Play each task with its own seed, in order; stops at `ENOUGH_FAULTS` faults, so the list may be shorter."""
    played: list[Played] = []
    faults = 0
    for task in tasks:
        played.append(play(environment, task, policy, seed=task.seed, past_the_end=past_the_end))
        faults += bool(played[-1].error)
        if faults >= ENOUGH_FAULTS:
            break
    return played


def oracle_policy(environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
    """The environment's own reference solution."""
    return environment.oracle()


def replay_policy(actions: Sequence[Action]) -> SimplePolicy:
    """Plays the same actions in order, whatever is asked and answered."""

    def policy(environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        turn = sum(message.role == "assistant" for message in messages)
        return actions[turn] if turn < len(actions) else None

    return policy


def recorded(environment: Environment, task: TargetTask, policy: SimplePolicy) -> list[Action]:
    """The actions of a policy on one scenario (those before a fault, where there is one)."""
    actions: list[Action] = []

    def recording(env: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        action = policy(env, messages, rng)
        if action is not None:
            actions.append(action)
        return action

    play(environment, task, recording)
    return actions


def _bytes(value: object) -> bytes:
    try:
        return canonical_json(value).encode("utf-8", "backslashreplace")
    except (ValueError, TypeError, RecursionError) as error:
        # Observations that are no JSON cannot be compared: give every such episode bytes of its own kind.
        return f"{type(error).__name__}: {error}".encode()
