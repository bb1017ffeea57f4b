"""Where the checkout is, its hash, and its scenarios. Imports tool_sandbox only in `scenarios`."""

from __future__ import annotations

import datetime
import importlib.util
import os
import random
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.contract import content_hash
from environments.targets.third_party.adapter import TargetInfo, folder_hash, split_all, user_name
from errors import TargetError
from settings import machine_settings

VARIABLE, KEY_VARIABLE = "TRACE_TOOLSANDBOX", "RAPID_API_KEY"
VARIANTS = ("base", "augmented")
LICENCE = "Apple sample code licence (own terms; see the checkout's LICENSE)"
INSTALL = (
    f"clone github.com/apple/ToolSandbox, set {VARIABLE} to that folder, and run `make install-toolsandbox` "
    "(polars==0.20.31, langchain-core<1 and ccy==1.3.1 among others: best in a virtual environment of its own), then "
    "call `.venv-toolsandbox/bin/trace-agent`"
)
ADAPTER_VERSION = 1
BASE_COUNT, NETWORK_COUNT = 129, 28
# Split sizes by source hash, so that `describe` need not import the package (8 s) to count.
# First without a key for the network, then with one.
_KNOWN_SPLITS: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]] = {
    "5f50bcf83fc627256e142cfc0ea62e07cca67ab11fbc46a6e7ebf221ba06bdd5": (
        {"diagnosis": 40, "validation": 23, "test": 38},
        {"diagnosis": 52, "validation": 26, "test": 51},
    )
}
NETWORK_TOOLS = frozenset(
    {
        "search_stock",
        "convert_currency",
        "search_lat_lon",
        "search_location_around_lat_lon",
        "search_weather_around_lat_lon",
    }
)
# tool_sandbox keeps one execution context per process and redirects stdout while a tool runs.
LOCK = threading.RLock()


def package_folder() -> Path:
    """The folder of `tool_sandbox`: in the checkout that the variable names, else where it is installed.

    Raises TargetError when there is none.
    """
    root = machine_settings().toolsandbox
    if root:
        folder = Path(root).expanduser() / "tool_sandbox"
        if not (folder / "scenarios").is_dir():
            raise TargetError(f"{VARIABLE}={root!r} has no folder tool_sandbox/scenarios; {INSTALL}")
        return folder
    spec = importlib.util.find_spec("tool_sandbox")
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(f"ToolSandbox is not here (no module tool_sandbox, {VARIABLE} is not set); {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def source_hash() -> str:
    """Hash of the scenarios, tools and evaluation code."""
    return folder_hash(
        package_folder(), ["common/*.py", "scenarios/*.py", "tools/*.py", "roles/execution_environment.py"]
    )


def data_hash(variant: str, user: str) -> str:
    """Covers the checkout's code, the variant, the user and this adapter."""
    return content_hash(["toolsandbox", ADAPTER_VERSION, variant, user, source_hash(), has_key()])


def has_key() -> bool:
    """Whether scenarios that need the network can be played."""
    return bool(os.environ.get(KEY_VARIABLE))


def import_package() -> None:
    """Make `tool_sandbox` importable and import what the adapter uses. Raises TargetError when that fails."""
    root = str(package_folder().parent)
    if root not in sys.path:
        sys.path.append(root)
    os.environ.setdefault("TQDM_DISABLE", "1")  # it draws a progress bar per scenario
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports a deprecated part of LangChain
            importlib.import_module("tool_sandbox.scenarios")
            importlib.import_module("tool_sandbox.roles.execution_environment")
    except ImportError as error:
        raise TargetError(f"ToolSandbox does not import: {error}; {INSTALL}") from error


def scenarios() -> Mapping[str, Any]:
    """All scenarios, base and augmented (1032), by name. Times like "tomorrow" are counted from the day of the call."""
    with LOCK:
        return _scenarios(source_hash(), datetime.date.today())


@lru_cache(maxsize=1)
def _scenarios(source: str, today: datetime.date) -> Mapping[str, Any]:
    import_package()
    from tool_sandbox.common.tool_discovery import ToolBackend
    from tool_sandbox.scenarios import named_scenarios

    # Tool lists are shuffled with the global generator while scenarios are built; leave it as it was.
    state = random.getstate()
    random.seed(42)
    try:
        found: Mapping[str, Any] = named_scenarios(preferred_tool_backend=ToolBackend.DEFAULT)
    finally:
        random.setstate(state)
    if len(base_names(found)) != BASE_COUNT:
        raise TargetError(
            f"ToolSandbox holds {len(base_names(found))} base scenarios instead of {BASE_COUNT}; {INSTALL}"
        )
    return found


def base_names(found: Mapping[str, Any]) -> list[str]:
    """The scenarios without distraction tools or scrambling."""
    return [name for name, scenario in found.items() if "NO_DISTRACTION_TOOLS" in scenario.categories]


def base_of(name: str, bases: frozenset[str]) -> str:
    """The base scenario that an augmented one was made from."""
    while name not in bases:
        name = name.rpartition("_")[0]
        if not name:
            raise TargetError("an augmented scenario has no base scenario; the checkout is another version")
    return name


def needs_network(scenario: Any) -> bool:
    """Whether a full score needs a web search: a base scenario offers it, and is not about refraining from it."""
    if "INSUFFICIENT_INFORMATION" in scenario.categories:
        return False
    return bool(NETWORK_TOOLS & set(scenario.starting_context.tool_allow_list or ()))


def splits(found: Mapping[str, Any]) -> dict[str, str]:
    """The split of every base scenario, with or without a key: a fixed hash, 40 / 20 / 40 %."""
    return split_all(base_names(found))


def _known_splits() -> Mapping[str, int]:
    known = _KNOWN_SPLITS.get(source_hash())
    return {} if known is None else known[has_key()]


def describe(user: str | None = None) -> list[TargetInfo]:
    """Both variants with a simulated user, whether the checkout is there or not; imports nothing of it."""
    lines = []
    for variant in VARIANTS:
        name = "toolsandbox" if variant == "base" else f"toolsandbox:{variant}"
        factor = 1 if variant == "base" else 8
        skipped = 0 if has_key() else NETWORK_COUNT * factor
        try:
            player = user_name(user)
            line = TargetInfo(
                name,
                LICENCE,
                {split: count * factor for split, count in _known_splits().items()},
                data_hash(variant, player),
                player,
                skipped=skipped,
            )
        except TargetError as error:
            line = TargetInfo(name, LICENCE, missing=str(error), how_to_get=INSTALL, skipped=skipped)
        lines.append(line)
    return lines
