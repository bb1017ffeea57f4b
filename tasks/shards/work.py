"""What a worker has to know of a shard, as JSON: which episodes, how they are played, and by which policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from environments.contract import TargetTask
from models.episodes import Episode
from models.policy import PolicyIdentity
from tasks.round.engine import Playground

# A part has at least so many shards for each worker, so that none waits long for the last one; and none has more than
# MOST episodes, which is what others may have to wait for when a worker dies.
FOR_EACH, MOST = 4, 64


@dataclass(frozen=True)
class Work:
    """Episodes of the target's own environment. `base` is the identity of the policy without adapter; `adapter` is the
    name and digest of the one that acts, `adapter_id` its row."""

    episodes: tuple[Episode, ...]
    purpose: str
    temperature: float
    max_tokens: int
    scope: str
    base: PolicyIdentity
    adapter: tuple[str, str] | None = None
    adapter_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The JSON that `from_json` reads. A task's payload is a text in it: PostgreSQL puts the keys of a JSON column
        in an order of its own, and prompts are written in the payload's."""
        # Field by field: `asdict` would copy what is in a task, too, and fails at sets and at some kinds of dict.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"base": asdict(self.base), "episodes": [_written(episode) for episode in self.episodes]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Work:
        """The work that was stored."""
        values = dict(given)
        values["episodes"] = tuple(_episode(e) for e in values["episodes"])
        values["base"] = PolicyIdentity(**values["base"])
        values["adapter"] = tuple(values["adapter"]) if values["adapter"] else None
        return cls(**values)

    def ground(self, make: Any, environment: str) -> Playground:
        """Where its episodes are played; `make` makes the target's environment."""
        return Playground(
            make, environment, self.purpose, self.temperature, self.max_tokens, self.adapter_id,
            scope=self.scope, of_target=True,
        )  # fmt: skip


def is_carried(payload: Any) -> bool:
    """Whether another process would play this payload: one that comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(payload)) == payload) and not _answers_for_missing(payload)
    except (TypeError, ValueError, RecursionError):
        return False


def _answers_for_missing(value: Any) -> bool:
    """Whether a dict in it answers for keys that it lacks, as a Counter does: the one that comes back would raise."""
    if isinstance(value, dict):
        return hasattr(value, "__missing__") or any(map(_answers_for_missing, value.values()))
    return isinstance(value, list) and any(map(_answers_for_missing, value))


def _written(episode: Episode) -> dict[str, Any]:
    task = {f.name: getattr(episode.task, f.name) for f in fields(episode.task)}
    tags = episode.task.capabilities
    task["payload"] = json.dumps(task["payload"])
    task["capabilities"] = sorted(tags) if isinstance(tags, Set) else list(tags)  # a set has another order elsewhere
    return {f.name: getattr(episode, f.name) for f in fields(episode)} | {"task": task}


def _episode(given: Mapping[str, Any]) -> Episode:
    task = dict(given["task"])
    task["capabilities"] = tuple(task["capabilities"])
    if isinstance(task["payload"], str):  # shards that an earlier version owed hold the object itself
        task["payload"] = json.loads(task["payload"])
    return Episode(**{**given, "task": TargetTask(**task)})


def works(
    ground: Playground, episodes: Sequence[Episode], base: PolicyIdentity, digest: str, workers: int
) -> list[Work]:
    """Episodes, all by one policy, as the shards that `workers` share. `digest` is the adapter's ("": the base)."""
    name = episodes[0].adapter
    size = max(1, min(MOST, -(-len(episodes) // (FOR_EACH * workers))))
    whole = Work(
        (), ground.purpose, ground.temperature, ground.max_tokens, ground.scope, base,
        (name, digest) if name else None, ground.adapter_id,
    )  # fmt: skip
    return [replace(whole, episodes=tuple(episodes[i : i + size])) for i in range(0, len(episodes), size)]
