"""What has to hold before a comparison plays its first episode: one clear error for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from db import GENERALIST
from environments.contract import Drawable, Target
from errors import ConfigurationError
from settings import Settings, load_settings
from tasks.comparison.results import read_result, reflection_of, settings_hash
from tasks.methods.catalogue import ABLATED, EVERY
from tasks.methods.gepa import TRACE_GEPA
from tasks.methods.trace import choosing_episodes, least_episodes
from tasks.methods.trained import DEMONSTRATIONS_GRPO
from tasks.round.analyst import analyst_settings
from tasks.round.preflight import check_model
from tasks.round.registry import registry_name

# What trains an adapter for everything and proves nothing.
PLAIN = {"grpo-target", "grpo-target-own", DEMONSTRATIONS_GRPO}


def seed_settings(settings: Settings, seed: int, budget: int) -> Settings:
    """The settings of a seed's home: a folder for each target, budget and kind of settings, always the embedded store
    and registry. A comparison promotes and registers as a round does, which must never reach what answers users."""
    own = {"seed": seed, "budget": budget, "database": "", "tracking": "", "files": ""}
    given = load_settings(**{**settings.model_dump(), **own})
    name = f"{registry_name(given.target)}-{budget}-{settings_hash(given)[:8]}"
    return given.model_copy(update={"home": settings.folder / "compare" / name / f"seed-{seed}"})


def check_budget(settings: Settings, target: Target, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for a budget that does not fill one group of every method that trains, for a method
    whose adapter these settings do not train, and for ablations of what they do not have."""
    if GENERALIST in names and not settings.train.generalist:
        raise ConfigurationError(
            f"method {GENERALIST!r} is TRACE's adapter of all successes, and train.generalist = 0 makes none; set "
            "TRACE_TRAIN__GENERALIST to a number of passes (3 were tried), or leave it out with --methods"
        )
    without = [name for name in names if name in ABLATED and _changes_nothing(settings, name)]
    if without:
        rest = ",".join(name for name in names if name not in without)
        raise ConfigurationError(
            f"{', '.join(without)} would be TRACE itself: the settings (profile {settings.profile!r}) are so already; "
            + (f"give --methods {rest}" if rest else "take another ablation, or another profile")
        )
    training = [name for name in names if EVERY[name].trains]
    if not training:
        return
    diagnosis, validation = (_played(settings, target, split) for split in ("diagnosis", "validation"))
    group = settings.train.groups * settings.train.group_size
    alone = diagnosis * settings.rollout.trials + group + choosing_episodes(settings)
    proven = max(alone, least_episodes(settings, diagnosis, validation, isinstance(target, Drawable)))
    # A round practises and proves; of GEPA's prompt and a round behind it each has half.
    least = dict.fromkeys(training, proven) | dict.fromkeys(PLAIN & {*training}, alone)
    if TRACE_GEPA in training:
        least[TRACE_GEPA] = 2 * proven
    short = [name for name in training if settings.budget < least[name]]
    if short:
        raise ConfigurationError(
            f"a budget of {settings.budget} episodes cannot fill a batch of {settings.train.groups} groups x "
            f"{settings.train.group_size} rollouts for {', '.join(short)} after diagnosis, and prove what was "
            f"learnt; give at least {max(least[name] for name in short)}, or leave them out with --methods"
        )


def _changes_nothing(settings: Settings, name: str) -> bool:
    """Whether an ablation takes away what the settings do not have."""
    changes = EVERY[name].changes
    return changes is not None and all(getattr(settings, field) == value for field, value in changes(settings).items())


def _played(settings: Settings, target: Target, split: str) -> int:
    """How many tasks of a split a round plays."""
    count = len(target.tasks(split))
    return min(count, settings.rollout.tasks or count)


def reflects(names: Sequence[str]) -> bool:
    """Whether a model, where one is configured, writes prompts for one of the methods: GEPA asks the analyst's with the
    analyst `checks` as well."""
    return any(EVERY[name].package == "gepa" for name in names)


def check_reflection(settings: Settings, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` where one of the methods has a model reflect that cannot be asked (`check_model`)."""
    if settings.analyst.model and reflects(names):
        check_model(settings, "analyst", analyst_settings(settings))


def check_files(folder: Path, settings: Settings, target: Target, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for files of the target in the folder that cannot stand in a table with the methods
    that are about to be played: another data hash, budget, base or settings, or prompts by another model."""
    reflection = reflection_of(settings) if reflects(names) else None
    for path in sorted(folder.glob(f"{registry_name(settings.target)}-seed-*.json")):
        result = read_result(path)
        ours = {"data_hash": target.data_hash, "budget": settings.budget, "settings": settings_hash(settings)}
        for name, value in ours.items():
            if getattr(result, name) != value:
                raise ConfigurationError(
                    f"{path.name} has {name.replace('_', ' ')} {getattr(result, name)}, this comparison {value}: they "
                    "cannot stand in one table; give another folder (--out), or the same data, settings and budget"
                )
        for name, figures in result.methods.items():
            if reflection and figures.reflection and figures.reflection != reflection:
                raise ConfigurationError(
                    f"{path.name} has {name} reflected by {figures.reflection}, this comparison by {reflection}: they "
                    "cannot stand in one table; give another folder (--out), or the same analyst.model and settings"
                )
