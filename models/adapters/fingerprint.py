"""How a served adapter is recognised as the right one: by its effect on the log-probabilities of a stored text.

At registration the last tokens of a probe text are scored with the base alone and with the adapter. A server that holds
the adapter moves the same tokens by the same amounts. Movements are compared (adapter minus base, on one engine), so
that precision and kernels, which shift both alike, cancel; the base's own figures tell whether the base is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from errors import AdapterError

TAG = "fingerprint"
# A tag of the registry takes 5000 characters: this many ids of up to 6 digits, and twice COUNT numbers.
LONGEST = 384
COUNT = 16
# Nats. bfloat16 on one side and float32 on the other were seen 0.04 apart in the mean; another base is several.
BASE_APART = 0.5
LEAST_MOVE = 1e-3
# How far the movement seen may lie from the one expected (root mean squares): a share of it, or what rounding does in
# bfloat16 (0.05 was seen). An adapter that moves less than rounding does can only be told from one that moves nothing.
MOVE_APART, ROUNDING = 0.5, 0.15


class Scorer(Protocol):
    """Log-probabilities of the last `count` of `ids` under the base or an adapter."""

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]: ...


@dataclass(frozen=True)
class Fingerprint:
    """`ids` of a text, and the log-probabilities (nats) of its last tokens under the base and under the adapter."""

    ids: tuple[int, ...]
    base: tuple[float, ...]
    adapted: tuple[float, ...]

    @property
    def largest_move(self) -> float:
        """The largest change of a token's log-probability, nats."""
        return float(np.abs(_movement(self.base, self.adapted)).max())

    def text(self) -> str:
        """As a registry tag; `read_fingerprint` is the inverse."""
        numbers = {"base": self.base, "adapted": self.adapted}
        rounded = {name: [round(v, 5) for v in values] for name, values in numbers.items()}
        return json.dumps({"ids": list(self.ids)} | rounded, separators=(",", ":"))


@dataclass(frozen=True)
class Likeness:
    """In nats. `moved` and `expected`: root mean square movement seen and stored; `apart`: that of their difference;
    `base_apart`: mean distance of the base's figures."""

    moved: float
    expected: float
    apart: float
    base_apart: float


def take_fingerprint(policy: Scorer, ids: Sequence[int], adapter: str) -> Fingerprint:
    """Score the end of a text (a probe prompt, best with the adapter's own answer behind it) with base and adapter.

    Raises `AdapterError` when the adapter moves nothing.
    """
    kept = tuple(ids[-LONGEST:])
    count = min(COUNT, len(kept) - 1)
    if count < 1:
        raise AdapterError(f"a fingerprint needs a text of two tokens or more, got {len(kept)}; give a longer probe")
    base, adapted = (tuple(policy.score(kept, count, name)) for name in (None, adapter))
    found = Fingerprint(kept, base, adapted)
    if not moves(found):
        raise AdapterError(
            f"adapter {adapter!r} is not live: it moves the probe by {_size(_movement(base, adapted)):.1e} nats "
            f"(at least {LEAST_MOVE} is needed); train it again"
        )
    return found


def read_fingerprint(tags: Mapping[str, str], name: str) -> Fingerprint:
    """The fingerprint among a registered version's tags. Raises `AdapterError` when there is none."""
    try:
        stored = json.loads(tags[TAG])
        found = Fingerprint(
            tuple(int(i) for i in stored["ids"]),
            tuple(float(v) for v in stored["base"]),
            tuple(float(v) for v in stored["adapted"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise AdapterError(
            f"{name} was registered without a fingerprint that can be read ({problem!r}); register it again"
        ) from problem
    if not 0 < len(found.base) == len(found.adapted) < len(found.ids):
        raise AdapterError(
            f"{name}: fingerprint of {len(found.ids)} ids has {len(found.base)} and {len(found.adapted)} figures; "
            "register it again"
        )
    return found


def likeness(expected: Fingerprint, base: Sequence[float], adapted: Sequence[float]) -> Likeness:
    """How close the observed movement is to the expected one."""
    wanted, seen = _movement(expected.base, expected.adapted), _movement(base, adapted)
    base_apart = float(np.abs(_movement(expected.base, base)).mean())
    return Likeness(_size(seen), _size(wanted), _size(seen - wanted), base_apart)


def moves(expected: Fingerprint) -> bool:
    """Whether the adapter does anything that can be seen."""
    return _size(_movement(expected.base, expected.adapted)) > LEAST_MOVE


def prove(policy: Scorer, expected: Fingerprint, adapter: str, still: bool = False) -> Likeness:
    """Score the stored text on a server and compare. Raises `AdapterError` that says which of base, movement at all,
    and the right movement is lacking; `still` is for an adapter that must not move anything (yet)."""
    count = len(expected.base)
    base, adapted = (policy.score(expected.ids, count, name) for name in (None, adapter))
    found = likeness(expected, base, adapted)
    if not found.base_apart <= BASE_APART:
        raise AdapterError(
            f"{adapter!r} is for another base: the server's base differs from the registered one by "
            f"{found.base_apart:.2f} nats a token (at most {BASE_APART}); serve the base it was trained on, "
            "and with vLLM's CPU build install its plugin (docs/3-platform.md)"
        )
    if not still and not found.moved > LEAST_MOVE:
        raise AdapterError(
            f"{adapter!r} is not live: the server answers as its base does (moved {found.moved:.1e} nats); its weights "
            "are zero or do not reach the model: register the trained files again"
        )
    allowed = max(MOVE_APART * found.expected, ROUNDING)
    if not found.apart <= allowed:
        raise AdapterError(
            f"{adapter!r} is not what was registered: it moves the probe {found.apart:.2f} nats otherwise than its "
            f"fingerprint says (at most {allowed:.2f}); load the registered files under a new name"
        )
    return found


def _movement(base: Sequence[float], adapted: Sequence[float]) -> np.ndarray:
    return np.asarray(adapted, dtype=np.float64) - np.asarray(base, dtype=np.float64)


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
