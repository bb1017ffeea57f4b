"""What a score must be: the one verdict of episodes, of validation and of the red team."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from environments.contract import Check, Score
from errors import EnvironmentFault

# How far floats may be off when a reward is added up of its parts.
ROUNDING = 1e-6


def checked_score(score: object) -> Score:
    """The score with NumPy's numbers as Python's. One outside the contract is refused here, where it costs its own
    episode: in the store it would cost all those that are written with it."""
    if not isinstance(score, Score):
        raise EnvironmentFault(f"score() returned {type(score).__name__}; return environments.contract.Score")
    reward, success = plain(score.reward), plain(score.success)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise EnvironmentFault(f"score() gave reward {reward!r:.80}; a reward is a number")
    reward = rounded(reward)
    if not 0.0 <= reward <= 1.0:  # also catches NaN
        raise EnvironmentFault(f"score() gave reward {reward}; rewards lie in [0, 1]")
    if not isinstance(success, bool):
        raise EnvironmentFault(f"score() gave success {success!r:.80}; success is True or False")
    if not isinstance(score.metrics, Mapping):
        raise EnvironmentFault(f"score() gave metrics {score.metrics!r:.80}; give a dict of numbers")
    if not isinstance(score.checks, list | tuple):
        raise EnvironmentFault(f"score() gave checks {score.checks!r:.80}; give a tuple of contract.Check")
    metrics = {name: plain(value) for name, value in score.metrics.items()}
    for name, value in metrics.items():
        # The comparison is also false for NaN, and refuses integers that no column holds.
        if not (isinstance(name, str) and isinstance(value, int | float) and abs(value) <= sys.float_info.max):
            raise EnvironmentFault(f"score() gave metric {name!r:.80} as {value!r:.80}; metrics are finite numbers")
    return Score(reward, success, tuple(map(_checked_check, score.checks)), metrics)


def rounded(reward: float) -> float:
    """A reward that is outside [0, 1] by no more than sums of floats are: at its bound. Nine parts of 1/9 come to
    1.0000000000000002, so that of such a target's episodes just the perfect ones would be lost."""
    if -ROUNDING <= reward < 0.0:
        return 0.0
    return 1.0 if 1.0 < reward <= 1.0 + ROUNDING else reward


def _checked_check(check: Check) -> Check:
    if not isinstance(check, Check):
        raise EnvironmentFault(f"score() gave {check!r:.80} as a check; give environments.contract.Check")
    for name in ("name", "kind", "detail"):
        _refuse_other(check, name, getattr(check, name), str, "a text")
    flags: dict[str, Any] = {name: plain(getattr(check, name)) for name in ("required", "passed")}
    for name, value in flags.items():
        _refuse_other(check, name, value, bool, "True or False")
    return Check(check.name, check.kind, flags["required"], flags["passed"], check.detail)


def _refuse_other(check: Check, name: str, value: Any, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise EnvironmentFault(f"score() gave check {check.name!r:.80} with {name} {value!r:.80}; it is {wanted}")


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's; where nobody has imported NumPy, nothing is one."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
