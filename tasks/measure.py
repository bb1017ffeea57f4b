"""Measuring a policy on a target outside a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from environments.catalogue import load_target
from environments.contract import SPLITS
from errors import ConfigurationError
from models.base import load_base
from models.episodes import Episode, Player
from models.policy import Sampling, ScriptedPolicy, TokenPolicy
from models.scripted import NoopPolicy, OraclePolicy, RandomPolicy
from settings import load_settings
from tasks.policies import open_policy
from tasks.progress import track
from tasks.statistics import clustered_interval

SCRIPTED: dict[str, Callable[[], ScriptedPolicy]] = {"noop": NoopPolicy, "oracle": OraclePolicy, "random": RandomPolicy}


def measure(target: str, split: str, policy: str, trials: int, seed: int) -> list[dict[str, Any]]:
    """One row for the policy and one for no-op: success with its interval clustered by task, mean reward, errors."""
    if split not in SPLITS:
        raise ConfigurationError(f"split {split!r} does not exist; choose from {', '.join(SPLITS)}")
    if trials < 1:
        raise ConfigurationError(f"{trials} trials; give at least 1")
    rows = [] if policy == "noop" else [_row(target, split, policy, trials, seed)]
    return [*rows, _row(target, split, "noop", 1, seed)]


def _row(target: str, split: str, policy: str, trials: int, seed: int) -> dict[str, Any]:
    loaded, settings = load_target(target), load_settings()
    acting: TokenPolicy | ScriptedPolicy
    renderer = None
    if policy in SCRIPTED:
        acting = SCRIPTED[policy]()
    else:
        base = load_base(policy, settings.dtype, settings.calls, settings.rollout.rows)
        # Another model than the settings' is not what their servers serve.
        acting = open_policy(settings, base) if policy == settings.base_model else base.policy
        renderer = base.renderer
    sampling = Sampling(settings.rollout.temperature, settings.rollout.max_tokens)
    tasks = loaded.tasks(split)
    episodes = [Episode(f"{t.id}/{k}", t, seed, k) for t in tasks for k in range(trials)]
    player = Player(loaded.environment, acting, renderer, sampling)
    played = list(track(player.play(episodes), f"{policy} on {target} {split}", len(episodes), "episodes"))
    scored = [(t.episode.task.id, t.score) for t in played if t.score is not None]
    if not scored:
        raise ConfigurationError(f"all {len(played)} episodes were lost to errors; the first: {played[0].error}")
    interval = clustered_interval(np.array([float(s.success) for _, s in scored]), np.array([i for i, _ in scored]))
    return {
        "policy": policy,
        "success": interval.rate,
        "low": interval.low,
        "high": interval.high,
        "reward": float(np.mean([s.reward for _, s in scored])),
        "episodes": len(scored),
        "tasks": len(tasks),
        "errors": len(played) - len(scored),
        "data_hash": loaded.data_hash,
    }
