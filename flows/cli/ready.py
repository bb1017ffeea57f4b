"""What a command checks before a flow runs, while Prefect's server and the model's libraries are starting."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def ready(settings: Any, module: str, checks: Callable[[Any], object] = bool) -> Any:
    """The `module` of the flows, when all that can be checked is right: what is light before anything else, the rest
    while Prefect's server starts. The server is stopped when something is refused. `checks` looks at what is given
    with the module."""
    from flows.cli.early_server import start_early
    from flows.cli.loading import loading
    from tasks.round.preflight import check_by_loading, check_without_loading

    check_without_loading(settings)
    server = start_early()
    try:
        with loading():
            check_by_loading(settings)
            flow = import_module(module)
        checks(flow)
        server.wait()
    except BaseException:
        server.stop()
        raise
    return flow
