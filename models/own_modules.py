"""The project's own top-level modules are found before files of the same name in the folder where a user works, which
may have a `settings.py` or a `db/` of its own: most modules are imported only when they are needed, in that folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).absolute().parents[1])
OWN = frozenset({"db", "environments", "errors", "flows", "models", "settings", "settings_parts", "tasks"})


class OwnModules:
    """Finds them beside this package, however it is installed, and nothing else."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [ROOT]) if fullname in OWN else None


def own_first() -> None:
    """Ask for them before anything on `sys.path`; to be called again at no cost."""
    if OwnModules not in sys.meta_path:
        sys.meta_path.insert(0, OwnModules)
