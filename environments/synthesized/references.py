"""What a target's reference solutions call, for rewards that say how near an episode came.

A reference is replayed in an environment of its own, once for each task, however many episodes of the task fail. A user
that a model plays is left to the scripted one: a reference needs nobody's answers, and no call of a provider may be
paid for, or fail, where an episode is only scored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property

from environments.contract import Action, Observation, Target, TargetTask, ToolCall, content_hash
from environments.playing import for_one_episode, take_turns
from environments.targets.catalogue import with_scripted_user

# Tasks whose calls are kept: more than a step of training plays, and a home's diagnosis tasks all together.
KEPT = 4096
# How often a thread that waits for another one's replay looks up, so that a limit on its own call is heard.
LOOK_UP_SECONDS = 0.5


class References:
    """The calls of a target's reference solutions, task by task. Safe to share between threads: whoever comes while a
    task is being replayed waits for it. A replay that fails raises, and is tried again by the next that asks."""

    def __init__(self, target: Target) -> None:
        self._given = target
        self._calls: OrderedDict[str, tuple[ToolCall, ...]] = OrderedDict()
        self._replaying: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    @cached_property
    def _target(self) -> Target:
        return with_scripted_user(self._given)

    def calls(self, task: TargetTask) -> tuple[ToolCall, ...]:
        """The tool calls of the reference solution of a task, in their order."""
        key = content_hash([task.id, repr(task.payload)])
        with self._lock:
            known = self._known(key)
            if known is not None:
                return known
            replaying = self._replaying.setdefault(key, threading.Lock())
        while not replaying.acquire(timeout=LOOK_UP_SECONDS):
            pass
        try:
            with self._lock:
                known = self._known(key)
            return self._replayed(task, key) if known is None else known
        finally:
            replaying.release()

    def _known(self, key: str) -> tuple[ToolCall, ...] | None:
        """What is kept of a task, which is then the last to be let go; to be asked under the lock."""
        if key in self._calls:
            self._calls.move_to_end(key)
        return self._calls.get(key)

    def _replayed(self, task: TargetTask, key: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        environment = self._target.environment()

        def step(action: Action) -> Observation:
            calls.extend(action.tool_calls)
            return environment.step(action)

        try:
            take_turns(environment, environment.reset(for_one_episode(task)), lambda taken: environment.oracle(), step)
        finally:
            environment.close()
        with self._lock:
            self._calls[key] = tuple(calls)
            self._replaying.pop(key, None)
            if len(self._calls) > KEPT:
                self._calls.popitem(last=False)
        return tuple(calls)
