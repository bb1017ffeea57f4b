"""Loading many modules at once, and ending with many loaded, without the garbage collector's looking at all of them."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import heavy libraries inside: the collector waits, and what was loaded is exempt from it for good.

    A quarter of the time of importing torch, transformers and Prefect goes into collections that find nothing. The
    same at the end of the process, where the interpreter collects while it takes the modules apart.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
    atexit.register(gc.freeze)  # what the work made since is not looked through at the end either
