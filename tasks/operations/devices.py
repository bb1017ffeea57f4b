"""What trains: a GPU or none, how many processes, how many trainings at once, and whether the settings fit them."""

from __future__ import annotations

import os

from errors import ConfigurationError
from settings import Settings

# Profiles whose trainings take weeks on a processor.
ON_GPUS = ("gpu-small", "gpu", "cluster")
# What CUDA's names of MIG instances, parts of a GPU, begin with.
MIG = "MIG-"


def check_gpu(settings: Settings) -> None:
    """Raise `ConfigurationError` where the profile counts on a GPU for training and this process sees none: it would
    train on the processor, and nobody would be told why nothing moves."""
    if settings.profile not in ON_GPUS or settings.devices.cpu:
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"profile {settings.profile} trains on a GPU, and this process sees none, or torch is a CPU build; check "
            "the driver, torch's build, a container's GPUs or CUDA_VISIBLE_DEVICES ('trace-agent doctor' looks, too), "
            "take profile laptop, or set devices.cpu = true to train on the processor all the same"
        )


def visible_gpus() -> list[str]:
    """The GPUs that this process, and those that it starts, may use, as `CUDA_VISIBLE_DEVICES` names them. Of several
    MIG instances a process sees the first alone, so they are counted by their names."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if count and named and named[0].startswith(MIG):
        return [name for name in named if name.startswith(MIG)]
    return named[:count] if named else [str(number) for number in range(count)]


def training_processes(settings: Settings) -> int:
    """How many processes make a training together: `devices.processes`, or one for each GPU of its share, at least
    one. On MIG instances it is one: each of several would see the first instance of the share alone."""
    gpus = visible_gpus()
    each = 1 if _on_mig(gpus) else len(gpus) // settings.devices.trainings
    return settings.devices.processes or max(1, each)


def _on_mig(gpus: list[str]) -> bool:
    return bool(gpus) and gpus[0].startswith(MIG)


def shares(settings: Settings) -> list[dict[str, str]]:
    """What each of the trainings at once has of this machine, as variables of its processes' environment: as many GPUs
    as every other, or as many threads. A training that is alone has everything."""
    return parts_of_machine(settings.devices.trainings, training_processes(settings))


def parts_of_machine(many: int, processes: int = 1) -> list[dict[str, str]]:
    """This machine's GPUs, or threads, in `many` equal parts of `processes` processes each, as variables of their
    environment; one part alone is everything."""
    if many == 1:
        return [{}]
    if gpus := visible_gpus():
        each = len(gpus) // many
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[each * i : each * (i + 1)])} for i in range(many)]
    import torch

    threads = max(1, torch.get_num_threads() // (many * processes))
    return [{"OMP_NUM_THREADS": str(threads)}] * many


def check_processes(settings: Settings) -> None:
    """Raise `ConfigurationError` where trainings cannot share this machine, or a training's processes its rows."""
    _check_places(settings)
    processes, rows = training_processes(settings), settings.train.groups * settings.train.group_size
    if rows % processes:
        raise ConfigurationError(
            f"train.groups x train.group_size = {rows} rows cannot be shared by {processes} processes; set "
            "devices.processes to a divisor of it (or CUDA_VISIBLE_DEVICES to fewer GPUs), or change the batch"
        )
    if settings.devices.shard:
        _check_parts(settings, processes)


def _check_places(settings: Settings) -> None:
    """Raise `ConfigurationError` where a process would be without a GPU, or a core, of its own."""
    names, many, processes = visible_gpus(), settings.devices.trainings, training_processes(settings)
    gpus = len(names)
    if _on_mig(names) and processes > 1:
        raise ConfigurationError(
            f"devices.processes = {processes} and CUDA_VISIBLE_DEVICES names MIG instances: a process sees one of them "
            "alone, so those of one training cannot have one each; set devices.processes = 1, and devices.trainings to "
            f"at most {gpus} to use several"
        )
    if gpus % many:
        raise ConfigurationError(
            f"devices.trainings = {many} cannot share {gpus} visible GPUs evenly; set it to a divisor of {gpus}, or "
            "CUDA_VISIBLE_DEVICES to another number of them"
        )
    if gpus and processes > gpus // many:
        raise ConfigurationError(
            f"devices.processes = {processes} in each of devices.trainings = {many} need a GPU each, and {gpus} are "
            "visible; lower one of the two"
        )
    if gpus or many == 1:
        return
    from models.local.base import cores_here

    if many * processes > (cores := cores_here()):
        raise ConfigurationError(
            f"devices.trainings = {many} of {processes} processes each need a core for every process, and this one may "
            f"use {cores}; set devices.trainings (or devices.processes) to fewer"
        )


def check_at_once(many: int) -> None:
    """Raise `ConfigurationError` where `many` processes would not have a GPU, or a core, each."""
    if many == 1:
        return
    from models.local.base import cores_here

    if gpus := len(visible_gpus()):
        if gpus % many:
            raise ConfigurationError(
                f"--at-once {many} cannot share {gpus} visible GPUs evenly; give a divisor of {gpus}, or set "
                "CUDA_VISIBLE_DEVICES to another number of them"
            )
    elif many > (cores := cores_here()):
        raise ConfigurationError(
            f"--at-once {many} needs a core for every process, and this one may use {cores}; give at most {cores}"
        )


def _check_parts(settings: Settings, processes: int) -> None:
    """Raise `ConfigurationError` where the base's weights cannot be spread over the processes of a training."""
    if processes < 2:
        raise ConfigurationError(
            f"devices.shard = true and {processes} process trains, which would hold the whole base; set "
            "devices.processes to 2 or more (or make more GPUs visible), or devices.shard = false"
        )
    if settings.policy.backend != "vllm":
        raise ConfigurationError(
            f"devices.shard = true and policy.backend = {settings.policy.backend!r}: a process that holds a part of "
            "the base cannot sample; sample on vLLM servers (policy.backend = 'vllm', policy.url), or set "
            "devices.shard = false"
        )


def check_whole(settings: Settings) -> None:
    """Raise `ConfigurationError` with `devices.shard` where trainings are made in this process."""
    if settings.devices.shard:
        raise ConfigurationError(
            "devices.shard = true, and where methods are compared one process makes all trainings, on the whole base; "
            "set devices.shard = false for it"
        )
