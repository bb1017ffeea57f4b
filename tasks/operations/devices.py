"""What trains: a GPU or none, how many processes, and whether the settings fit them."""

from __future__ import annotations

from errors import ConfigurationError
from settings import Settings

# Profiles whose trainings take weeks on a processor.
ON_GPUS = ("gpu-small", "gpu", "cluster")


def check_gpu(settings: Settings) -> None:
    """Raise `ConfigurationError` where the profile counts on a GPU for training and this process sees none: it would
    train on the processor, and nobody would be told why nothing moves."""
    if settings.profile not in ON_GPUS or settings.devices.cpu:
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"profile {settings.profile} trains on a GPU, and this process sees none; see to the driver, a container's "
            "GPUs or CUDA_VISIBLE_DEVICES ('trace-agent doctor' looks, too), take profile laptop, or set "
            "devices.cpu = true to train on the processor all the same"
        )


def training_processes(settings: Settings) -> int:
    """How many processes train together: `devices.processes`, or one for each GPU that this process sees, at least
    one."""
    if settings.devices.processes:
        return settings.devices.processes
    import torch

    return max(1, torch.cuda.device_count())


def check_processes(settings: Settings) -> None:
    """Raise `ConfigurationError` where the processes of a training cannot share its rows."""
    processes, rows = training_processes(settings), settings.train.groups * settings.train.group_size
    if rows % processes:
        raise ConfigurationError(
            f"train.groups x train.group_size = {rows} rows cannot be shared by {processes} processes; set "
            "devices.processes to a divisor of it (or CUDA_VISIBLE_DEVICES to fewer GPUs), or change the batch"
        )
    if settings.devices.shard:
        _check_parts(settings, processes)


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
