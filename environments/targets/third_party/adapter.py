"""What the adapters of foreign benchmarks share: finding the package, splitting, naming capabilities, describing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environments.contract import SPLITS, Message, TargetTask, ToolCall
from environments.targets.third_party.simulated_user import UserModel
from errors import ConfigurationError, TargetError

SCRIPTED = "scripted"
# Before the name of the model that plays the user.
MODEL_USER = "litellm:"
NO_OP_REPLY = "I'm sorry, I cannot do that."
# What a benchmark's own Python tools and verifiers raise when an agent gives them nonsense.
TOOL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class TargetInfo:
    """One line of the catalogue. `missing` is empty when the target can be played here and now; otherwise it says what
    is missing, and `how_to_get` the command that brings it. `skipped` tasks exist but cannot be scored offline.
    `draws`: every round gets new diagnosis and validation tasks."""

    name: str
    licence: str
    splits: Mapping[str, int] = field(default_factory=dict)
    data_hash: str = ""
    user: str = ""
    missing: str = ""
    how_to_get: str = ""
    skipped: int = 0
    draws: bool = False


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def seed_of(text: str) -> int:
    """A fixed 31-bit seed for a task id."""
    return int(_draw("seed:" + text) * 2**31)


def _ranked(ids: Iterable[str], shares: Sequence[tuple[str, float]]) -> dict[str, str]:
    """Ids in the order of a fixed hash, cut into consecutive shares; the last share takes what is left."""
    order = sorted(ids, key=lambda item: (_draw("split:" + item), item))
    where: dict[str, str] = {}
    start = 0
    for position, (split, share) in enumerate(shares):
        end = len(order) if position == len(shares) - 1 else start + round(share * len(order))
        where |= dict.fromkeys(order[start:end], split)
        start = end
    return where


def split_train(ids: Iterable[str]) -> dict[str, str]:
    """Parts of a benchmark's train split: two of three tasks to diagnosis, the rest to validation, by a fixed hash."""
    return _ranked(ids, (("diagnosis", 2 / 3), ("validation", 1 / 3)))


def split_all(ids: Iterable[str]) -> dict[str, str]:
    """Splits of a benchmark that has none: 40 % diagnosis, 20 % validation, 40 % test, by a fixed hash of the id."""
    return _ranked(ids, (("diagnosis", 0.4), ("validation", 0.2), ("test", 0.4)))


def together(shared: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Id -> the first id that it must share a split with. `shared` has what each id contains that no other split may:
    two ids with a text in common are one group, and so are two that each have one in common with a third."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for item, texts in shared.items():
        for text in texts:
            parent[root(f"text {text}")] = root(f"id {item}")
    first: dict[str, str] = {}
    return {item: first.setdefault(root(f"id {item}"), item) for item in shared}


def of_split(tasks: Sequence[TargetTask], split: str) -> Sequence[TargetTask]:
    """The tasks of one split, in the order of the benchmark. Raises TargetError on an unknown split."""
    if split not in SPLITS:
        raise TargetError(f"split {split!r} does not exist; the splits are {', '.join(SPLITS)}")
    return [task for task in tasks if task.split == split]


def split_counts(tasks: Sequence[TargetTask]) -> dict[str, int]:
    """Tasks per split."""
    return {split: len(of_split(tasks, split)) for split in SPLITS}


def capability(*parts: str) -> str:
    """A capability's name: snake_case, at most five words."""
    words = [word for word in re.split(r"[^a-z0-9]+", "_".join(parts).lower()) if word]
    return "_".join(words[:5])


def package_folder(module: str, distribution: str, version: str, how_to_get: str) -> Path:
    """The folder of an installed package, found without importing it.

    Raises TargetError when it is absent, or when the distribution that the adapter was proven with is another version.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(
            f"the package {distribution}=={version} is not installed (no module {module!r}); {how_to_get}"
        )
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise TargetError(
            f"module {module!r} is installed, but not from {distribution} (another package of that name?); {how_to_get}"
        ) from error
    if found != version:
        raise TargetError(f"{distribution} {found} is installed and the adapter is proven with {version}; {how_to_get}")
    return Path(next(iter(spec.submodule_search_locations)))


def file_hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file by its name. Raises TargetError on a file that cannot be read."""
    hashes = {}
    for path in files:
        try:
            hashes[f"{path.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise TargetError(f"cannot read {path}: {error}; install the package again") from error
    return hashes


def folder_hash(folder: Path, patterns: Sequence[str]) -> str:
    """One hash of all files below `folder` that match a pattern, by relative path and content.

    Raises TargetError when no file matches or one cannot be read.
    """
    files = sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()})
    if not files:
        raise TargetError(f"{folder} has no file like {', '.join(patterns)}; install the package again")
    digest = hashlib.sha256()
    for path in files:
        try:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        except OSError as error:
            raise TargetError(f"cannot read {path}: {error}; install the package again") from error
    return digest.hexdigest()


def user_name(user: str | None) -> str:
    """Which simulated user plays: the one given, else the scripted one.

    Raises TargetError on a name that is neither `scripted` nor `litellm:MODEL`.
    """
    name = user or SCRIPTED
    if name != SCRIPTED and not model_of_user(name):
        raise TargetError(f"simulated user {name!r} is unknown; use {SCRIPTED!r} or 'litellm:MODEL'")
    return name


def model_of_user(user: str) -> str:
    """LiteLLM's name of the model that plays a user called `litellm:MODEL`; "" for every other user."""
    return user.removeprefix(MODEL_USER) if user.startswith(MODEL_USER) else ""


def player_of(user: str, model: UserModel | None) -> UserModel | None:
    """What plays a user of this name: the model given, or None for one who needs no model.

    Raises ConfigurationError when the user is a model's and none was given.
    """
    if not model_of_user(user):
        return None
    if model is None:
        raise ConfigurationError(
            f"the simulated user {user!r} needs a model and the target was loaded without one; give load_target a "
            f"user_model (models.providers.simulated_user makes one), or use {SCRIPTED!r}"
        )
    return model


def error_result(text: str, call: ToolCall | None = None) -> Message:
    """The observation that answers a call which could not be carried out."""
    if call is None:
        return Message("tool", text)
    return Message("tool", text, tool_call_id=call.id, name=call.name)
