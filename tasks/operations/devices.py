"""What trains: how many processes, and whether the settings fit them."""

from __future__ import annotations

from errors import ConfigurationError
from settings import Settings


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
