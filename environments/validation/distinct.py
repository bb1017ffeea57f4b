"""Whether scenarios differ in what is asked or in what solves it. A payload may hold what no episode ever shows, its
seed above all, so that by payloads alone a dozen scenarios count as a hundred."""

from __future__ import annotations

from collections.abc import Callable

from environments.contract import Environment, Message, TargetTask, content_hash
from environments.validation.playing import FAULTS, OUTSIDE, oracle_policy, play


class Distinct:
    """The scenarios that were met so far. `content` says what a scenario is, where there is such a thing; else
    environments of `make` do: by what they show first, and where that is equal by what their oracle does. Such an
    environment is closed with `close`."""

    def __init__(self, make: Callable[[], Environment], content: Callable[[TargetTask], str] | None = None) -> None:
        self._make, self._content = make, content
        self._environment: Environment | None = None
        self._looking = True
        self._met: set[str] = set()
        self._shown: dict[str, TargetTask | None] = {}  # None: its solution is met

    def add(self, task: TargetTask) -> bool:
        """Whether no scenario before was the same."""
        if not self._first(content_hash([task.family, dict(task.payload)])):
            return False
        if self._content is not None:
            return self._first(f"content {self._content(task)}")
        if not self._looking:
            return True
        try:
            return self._looks_new(task)
        except OUTSIDE:
            raise
        except FAULTS:  # the checks that play will tell; a deadline for each further look would only cost time
            self._looking = False
            return True

    def close(self) -> None:
        """Close the environment that was looked at."""
        if self._environment is not None:
            self._environment.close()

    def _first(self, key: str) -> bool:
        new = key not in self._met
        self._met.add(key)
        return new

    def _looks_new(self, task: TargetTask) -> bool:
        self._environment = self._environment or self._make()
        shown = content_hash([said(message) for message in self._environment.reset(task).messages])
        other = self._shown.setdefault(shown, task)
        if other is task:
            return True
        if other is not None:
            self._first(self._solved(self._environment, other, shown))
            self._shown[shown] = None
        return self._first(self._solved(self._environment, task, shown))

    def _solved(self, environment: Environment, task: TargetTask, shown: str) -> str:
        played = play(environment, task, oracle_policy, seed=task.seed)
        if played.error:
            raise RuntimeError(played.error)
        return content_hash([shown, [said(message) for message in played.messages if message.role == "assistant"]])


def said(message: Message) -> object:
    """A message without the ids of its calls, which may be of the seed."""
    return [message.role, message.content, [[call.name, call.arguments] for call in message.tool_calls]]
