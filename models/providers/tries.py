"""A call of a language model, tried again while its failure may pass: the agent's turns, and a simulated user's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from errors import ProviderError
from models.providers.litellm_client import CallFailed

T = TypeVar("T")

# Seconds before the second, the third and the fourth try.
WAITS = (2.0, 8.0, 30.0)
# A provider may ask for a longer wait, up to so many seconds.
LONGEST_WAIT = 120.0


def tried(
    call: Callable[[], T], model: str, stop: threading.Event, waits: Sequence[float], seconds: float = float("inf")
) -> T:
    """What `call` returns, tried again after each of `waits` while it raises a `ProviderError` that may pass, and no
    later than `seconds` after the first try; then raises the last one. `stop` ends it at its next wait."""
    began = time.monotonic()
    for wait in (*waits, None):
        if stop.is_set():
            break
        try:
            return call()
        except ProviderError as problem:
            if wait is None or not problem.transient:
                raise
            asked = problem.retry_after if isinstance(problem, CallFailed) else 0.0
            pause = min(LONGEST_WAIT, max(wait, asked))
            if time.monotonic() - began + pause > seconds:
                raise
            stop.wait(pause)
    raise ProviderError(f"{model}: stopped before the call; run the same command again", transient=True)
