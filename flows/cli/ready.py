"""What commands stand on: heavy modules loaded without garbage collections, a home that is opened, and what is checked
before a flow runs, while Prefect's server and the model's libraries are starting."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


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


def open_home(home: Path | None) -> tuple[Any, Any]:
    """Settings and store of a home (None: the one that is set), which has to be there."""
    with loading():
        from db import open_stored
        from settings import load_settings

    settings = load_settings(home=home)
    return settings, open_stored(settings.database_url)


def ready(
    settings: Any, module: str, checks: Callable[[Any], object] = bool, until: str = "", round: bool = True
) -> Any:
    """The `module` of the flows, when all that can be checked is right: what is light before anything else, the rest
    while Prefect's server starts. The server is stopped when something is refused. `checks` looks at what is given
    with the module; `until` is the round's last stage, where it does not run whole. A `round` goes on from what is live
    in the home, which has to stand on its base model then."""
    from flows.cli.early_server import start_early
    from tasks.round.preflight import check_by_loading, check_live, check_without_loading

    check_without_loading(settings)
    if round:
        check_live(settings)
    server = start_early()
    try:
        with loading():
            check_by_loading(settings, until)
            flow = import_module(module)
        checks(flow)
        server.wait()
    except BaseException:
        server.stop()
        raise
    return flow
