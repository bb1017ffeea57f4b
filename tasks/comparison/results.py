"""The file that each seed of a comparison leaves: figures by task, and what makes them comparable with another seed's.

JSON, written whole or not at all, read back as the same type. Tables and plots are made of these files alone, so seeds
can be run one at a time and elsewhere. Nothing in a file names a machine, a user or a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from environments.contract import content_hash
from errors import ConfigurationError
from settings import PROFILES, Settings
from settings_parts import read_toml
from tasks.round.registry import registry_name

Outcomes = dict[str, list[float | None]]
# What two files must share to stand in one table, and what to call it.
SAME = {
    "target": "target",
    "data_hash": "data hash",
    "budget": "budget",
    "base": "base model",
    "revision": "version of the base model",
    "settings": "settings",
    "trials": "number of trials",
    "drawn": "origin of its test tasks (drawn for the seed, or fixed)",
    "families": "list of test tasks",
    "shift": "list of shift tasks",
}
# What two seeds with tasks of their own must share is only how many there are of which family.
LISTS = ("families", "shift")
# The folders before the last part of an absolute path, which may follow a provider's name (hosted_vllm//models/base).
_FOLDER = re.compile(r"(?:^|(?<=[^:/]/))/(?:[^/]*/)*(?=[^/])")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_Part):
    """A point of a curve: outcomes on test with `count` capabilities, or after `count` episodes."""

    count: int
    outcomes: Outcomes


class MethodFigures(_Part):
    """What a method came to with one seed. `outcomes` are 1 or 0 by test task and trial (null: lost to the
    infrastructure). `episodes` are those that its budget paid for, by `purposes`, the test split's beside them; tokens,
    seconds and dollars are of the same work, without the test split. `capabilities` are nested, from none to all;
    `rollouts` are checkpoints of one training. `shift` are outcomes on the target's shift test, `trained` the
    capabilities that it trained adapters for; `reflection` is how GEPA's prompts were written (`reflection_of`; null
    where none was, and in files of before); `commit` is the program's version that ran it ("": the file's).
    """

    outcomes: Outcomes
    episodes: int
    purposes: dict[str, int]
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    dollars: float
    notes: tuple[str, ...] = ()
    shift: Outcomes = {}
    trained: tuple[str, ...] = ()
    capabilities: tuple[Point, ...] = ()
    rollouts: tuple[Point, ...] = ()
    reflection: dict[str, Any] | None = None
    commit: str = ""


class SeedResult(_Part):
    """A seed of a comparison. `revision` is the version of the base model, `settings` the hash of everything that
    decides the figures but the seed, `commit` the version of the program, `machine` what it ran on. `families` and
    `shift` are the families of the test split's and of the shift test's tasks, `drawn` whether they are of this seed
    alone; `needs` are the capabilities of each family, `changed` the settings that are others than the profile's (these
    and `revision` were not kept before there were the fields)."""

    format: int = 1
    target: str
    data_hash: str
    seed: int
    budget: int
    profile: str
    base: str
    revision: str = ""
    settings: str
    trials: int
    command: str
    commit: str
    machine: dict[str, str | int | float]
    drawn: bool = False
    families: dict[str, str]
    needs: dict[str, list[str]] = {}
    shift: dict[str, str] = {}
    changed: dict[str, Any] = {}
    methods: dict[str, MethodFigures] = {}

    def with_method(self, name: str, figures: MethodFigures) -> SeedResult:
        """The result with one method more."""
        return self.model_copy(update={"methods": {**self.methods, name: figures}})

    def wrong(self) -> str:
        """Why the file can be no comparison's: a method without an outcome of each task, or with one that is none; ""
        where nothing is."""
        for name, figures in self.methods.items():
            for outcomes, tasks in ((figures.outcomes, self.families), (figures.shift, self.shift)):
                if outcomes.keys() != tasks.keys():
                    return f"{name} has outcomes of {len(outcomes)} tasks, the file has {len(tasks)}"
                wrong = [x for trials in outcomes.values() for x in trials if x not in (0.0, 1.0, None)]
                if wrong:
                    return f"{name} has the outcome {wrong[0]}; one is 0, 1 or null"
        return ""


def settings_hash(settings: Settings) -> str:
    """Hash of everything that decides a comparison's figures but the seed."""
    return content_hash({k: v for k, v in settings.identity().items() if k != "seed"})


def reflection_of(settings: Settings) -> dict[str, Any]:
    """Of the analyst's settings those that decide what GEPA's reflection makes of a prompt, the model without a folder
    of this machine; the model is "" where none is configured, and a script proposes. They are no part of the settings'
    hash where the analyst is `checks`, for nothing else of a comparison asks that model."""
    asked = ("model", "temperature", "max_tokens", "send_temperature") if settings.analyst.model else ("model",)
    given = settings.analyst.model_dump(mode="json", include=set(asked))
    return given | {"model": _FOLDER.sub("", given["model"])}


def changed_settings(settings: Settings, reflects: bool = False) -> dict[str, Any]:
    """Of what decides a comparison's figures, the settings (such as "train.rank") that neither the profile nor its
    defaults have, with their values, but for a folder of this machine, of which the last part is there; what the
    command says otherwise is left out. `reflects` is whether GEPA is among its methods."""
    plain = _by_name(type(settings).model_construct().model_dump(mode="json"))
    profile = read_toml(PROFILES / f"{settings.profile}.toml")
    for name, value in profile.items():
        part = getattr(settings, name)
        read = type(part).model_validate(value).model_dump(mode="json") if isinstance(part, BaseModel) else value
        plain |= _by_name({name: read})
    said = {"profile", "target", "seed", "budget", "base_model"}
    decided = _by_name(settings.identity(whole=True))
    given = (decided | _by_name({"analyst": reflection_of(settings)} if reflects else {})).items()
    return {n: _FOLDER.sub("", v) if isinstance(v, str) else v for n, v in given if n not in said and v != plain.get(n)}


def _by_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with a dot behind the part."""
    found: dict[str, Any] = {}
    for name, value in parts.items():
        found |= {f"{name}.{n}": v for n, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def machine() -> dict[str, str | int | float]:
    """What the figures were made on, in words that name nobody; `gpu` where there is one."""
    import torch

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
    } | gpu


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def path_of(folder: Path, target: str, seed: int) -> Path:
    """Where a seed's file lies."""
    return folder / f"{registry_name(target)}-seed-{seed}.json"


@contextmanager
def alone_writing(path: Path) -> Iterator[None]:
    """Hold a seed's file against other processes that add to it; a file system without locks has no such protection."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_result(path: Path, result: SeedResult) -> None:
    """Write a seed's file so that it is whole or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(result.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_result(path: Path) -> SeedResult:
    """A seed's file. Raises `ConfigurationError` for one that cannot be read."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
        result = SeedResult.model_validate(given)
    except (OSError, UnicodeDecodeError, ValueError) as problem:
        wrong = f"{problem.errors()[0]['loc']}: {problem.errors()[0]['msg']}" if isinstance(problem, ValidationError) \
            else str(problem)  # fmt: skip
        raise ConfigurationError(
            f"{path} is not a result of compare-methods ({wrong}); remove it, or run its seed again"
        ) from None
    if result.format != 1:
        raise ConfigurationError(f"{path} has format {result.format}, this version reads 1; run its seed again")
    if wrong := result.wrong():
        raise ConfigurationError(
            f"{path} is not a result of compare-methods: {wrong}; remove it, or run its seed again"
        )
    return result


def read_results(folder: Path, target: str) -> list[SeedResult]:
    """All seeds of a target in a folder, in order; files of one seed, whose methods were run apart (the second one's
    name goes on: shop-seed-33-more.json), are one result. Raises `ConfigurationError` where two cannot stand in one
    table, or have other outcomes of the same method."""
    paths = sorted(folder.glob(f"{registry_name(target)}-seed-*.json"))
    found: dict[int, SeedResult] = {}
    for path in paths:
        result = read_result(path)
        known = found.setdefault(result.seed, result)
        there = {name: figures.outcomes for name, figures in known.methods.items()}
        if twice := [n for n, figures in result.methods.items() if there.get(n, figures.outcomes) != figures.outcomes]:
            raise ConfigurationError(
                f"{path} has other outcomes of {', '.join(twice)} with seed {result.seed} than another file there; "
                "remove one of the two"
            )
        check_same([known, result])
        found[result.seed] = _joined(known, result)
    results = [found[seed] for seed in sorted(found)]
    check_same(results)
    return results


def _joined(one: SeedResult, other: SeedResult) -> SeedResult:
    """Two files of a seed as one: the methods of both, with the version that ran them, and both commands."""
    if one is other:
        return one
    methods = {
        name: figures.model_copy(update={"commit": figures.commit or result.commit})
        for result in (one, other)
        for name, figures in result.methods.items()
    }
    commands = dict.fromkeys([one.command, other.command])
    revision = one.revision or other.revision
    return one.model_copy(update={"methods": methods, "command": "; ".join(commands), "revision": revision})


def files_of(path: Path) -> list[Path]:
    """The files of a seed that lie beside each other: `path`, and those whose names go on."""
    return [p for p in (path, *sorted(path.parent.glob(f"{path.stem}-*.json"))) if p.is_file()]


def methods_there(path: Path) -> set[str]:
    """The methods that the files of a seed have."""
    return {name for file in files_of(path) for name in read_result(file).methods}


def check_same(results: Sequence[SeedResult]) -> None:
    """Raise `ConfigurationError` when results were made on different data, settings or budgets, or GEPA's prompts by
    different models."""
    for name, said in SAME.items():
        # A file of an earlier version says no revision: it can stand beside any, and hides no difference of others.
        known = [result for result in results if name != "revision" or result.revision]
        for other in known[1:]:
            one, two = getattr(known[0], name), getattr(other, name)
            if name in LISTS and known[0].seed != other.seed and other.drawn:
                one, two = dict(Counter(one.values())), dict(Counter(two.values()))
            if one != two:
                shown = "" if isinstance(one, dict) else f": {one} and {two}"
                raise ConfigurationError(
                    f"seeds {known[0].seed} and {other.seed} of {other.target} have another {said}{shown}; they "
                    "cannot stand in one table: keep them in folders of their own (--out)"
                )
    reflected = [(r.seed, name, f.reflection) for r in results for name, f in r.methods.items() if f.reflection]
    for seed, name, reflection in reflected[1:]:
        first = reflected[0]
        if reflection != first[2]:
            raise ConfigurationError(
                f"{first[1]} of seed {first[0]} and {name} of seed {seed} of {results[0].target} were reflected in "
                f"other ways: {first[2]} and {reflection}; they cannot stand in one table: keep them in folders of "
                "their own (--out)"
            )
