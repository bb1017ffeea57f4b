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
