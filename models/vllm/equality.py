"""Whether replicas are one and the same policy: each scores a fixed text, with the base and with every adapter.

The name under which a server has its base, and the path that an adapter was loaded from, say nothing of the weights.
Log-probabilities do: another revision, another precision or an adapter that was dropped without a word moves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from errors import AdapterError, ConfigurationError
from models.adapters.files import carries_weights
from models.vllm.server import VllmServer

# Low ids, which every vocabulary has, in no order: a text that no model was trained to know by heart.
PROBE = tuple((7 * i * i + 11 * i + 5) % 89 + 2 for i in range(16))
SCORED = 8
# Nats: the mean distance of a token's log-probability at which two servers are no longer taken for the same.
APART = 0.02


def probe(server: VllmServer, adapter: str | None = None) -> list[float]:
    """Log-probabilities (nats) of the end of the probe. Raises what `VllmServer.score` raises."""
    return server.score(PROBE, SCORED, adapter)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean distance in nats a token; infinite where a figure is not a number."""
    found = float(np.abs(np.subtract(one, other)).mean())
    return found if np.isfinite(found) else float("inf")


def common(scores: Mapping[str, Sequence[float]]) -> str:
    """The address whose figures most others share: of two that differ, the first."""
    return max(scores, key=lambda a: sum(apart(scores[a], other) <= APART for other in scores.values()))


def check_base(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """The figures of the base that all servers (by address) share. Raises `ConfigurationError` when one differs."""
    reference = common(scores)
    for address, found in scores.items():
        if (distance := apart(scores[reference], found)) > APART:
            raise ConfigurationError(
                f"{address} serves another base than {reference}: their log-probabilities of a probe lie "
                f"{distance:.3f} nats a token apart (at most {APART}); start it with the same model, revision and "
                "dtype, or take it out of policy.url"
            )
    return list(scores[reference])


def check_adapter(name: str, scores: Mapping[str, Sequence[float]], base: Sequence[float]) -> list[float]:
    """The figures of an adapter that all servers (by address) share; `base` are those without it. Raises `AdapterError`
    when one differs, also when it answers as its base does: then it dropped the adapter without a word."""
    reference = common(scores)
    if apart(scores[reference], base) <= APART:  # a server that the adapter moves did not drop it
        reference = max(scores, key=lambda a: apart(scores[a], base))
    for address, found in scores.items():
        distance = apart(scores[reference], found)
        if distance <= APART:
            continue
        if apart(found, base) <= APART < apart(scores[reference], base):
            raise AdapterError(
                f"{address} dropped adapter {name!r}: it answers as its base does, {distance:.3f} nats a token from "
                f"{reference} (at most {APART}); look at the server's log, start it again with the same --enable-lora, "
                "--max-loras and --max-lora-rank as the others, or take it out of policy.url"
            )
        raise AdapterError(
            f"{address} answers otherwise than {reference} with adapter {name!r}: {distance:.3f} nats a token apart "
            f"(at most {APART}); let both see the same policy.lora_folder, or take it out of policy.url"
        )
    return list(scores[reference])


def check_live(name: str, where: str, figures: Sequence[float], base: Sequence[float], folder: Path) -> None:
    """Raises `AdapterError` for an adapter with weights in it that changes no figure at all: what moves less than a
    server's precision still moves some. `where` are the servers."""
    if list(figures) == list(base) and carries_weights(folder):
        raise AdapterError(
            f"{where} dropped adapter {name!r}: it moves the log-probabilities of a probe by 0.0 nats, though its "
            f"weights in {folder} are not 0; look at the server's log for modules that it does not adapt"
        )
