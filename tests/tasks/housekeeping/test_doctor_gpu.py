"""What the doctor says of a GPU: what keeps torch from one is told, and one that only torch sees is enough."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import pytest

from settings import load_settings
from tasks.housekeeping import machine_checks
from tasks.housekeeping.findings import Finding
from tasks.housekeeping.machine_checks import gpu

LISTED = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-2)'"
BROKEN = "echo 'NVIDIA-SMI has failed: no driver' >&2; exit 9"
CPU, CUDA = "2.13.0+cpu", "2.13.0"


@pytest.fixture
def look(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`look(profile, tool, torch, visible, seen)` is what is said of a machine with that `nvidia-smi`, build of torch,
    and value of CUDA_VISIBLE_DEVICES, where torch sees so many GPUs (None: it must not be asked)."""
    version = importlib.metadata.version

    def looked(
        profile: str,
        tool: str = LISTED,
        torch: str = CUDA,
        visible: str | None = None,
        seen: int | None = None,
        **devices: Any,
    ) -> Finding:
        file = settings_folder / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{tool}\n")
        file.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda _: str(file) if tool else None)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: torch if name == "torch" else version(name))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        asked = (lambda: pytest.fail("torch was asked")) if seen is None else (lambda: seen)
        monkeypatch.setattr(machine_checks, "_gpus_of_torch", asked)
        return gpu(load_settings(profile=profile, policy={"backend": "local"}, devices=devices))

    return looked


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"torch": CPU}, "GPU 0: NVIDIA H100, and torch 2.13.0+cpu is a CPU build", "'pip uninstall torch'"),
    ({"visible": ""}, "GPU 0: NVIDIA H100, and CUDA_VISIBLE_DEVICES = '' shows torch none", "unset it, or name"),
    ({"visible": "-1"}, "CUDA_VISIBLE_DEVICES = '-1' shows torch none", "unset it, or name"),
    ({"visible": "1,0"}, "CUDA_VISIBLE_DEVICES = '1,0' shows torch none", "unset it, or name"),
]


@pytest.mark.parametrize(("machine", "said", "do"), WRONG)
def test_what_keeps_torch_from_the_gpu_is_told(look: Any, machine: dict[str, Any], said: str, do: str) -> None:
    found = look("gpu", **machine)
    assert (found.level, said in found.said, found.do.startswith(do)) == ("fault", True, True), found
    assert found.said.endswith("profile gpu needs it")
    found = look("laptop", **machine)
    assert (found.level, said in found.said, found.do.startswith(do)) == ("warning", True, True), found
    assert found.said.endswith("rounds train on the processor")
    meant = look("gpu", cpu=True, **machine)
    assert (meant.level, meant.do) == ("ok", ""), "the processor was asked for"


@pytest.mark.parametrize("visible", [None, "0", "GPU-1", "MIG-2"])
def test_a_gpu_that_rounds_can_use_is_well(look: Any, visible: str | None) -> None:
    for profile, seen in (("gpu", 1), ("laptop", None)):
        found = look(profile, visible=visible, seen=seen)
        assert (found.level, found.said) == ("ok", "GPU 0: NVIDIA H100")


@pytest.mark.parametrize("tool", ["", BROKEN])
def test_a_gpu_that_only_torch_sees_is_well(look: Any, tool: str) -> None:
    """A container may have the GPU and not NVIDIA's tool."""
    found = look("gpu", tool=tool, seen=1)
    assert (found.level, found.said) == ("ok", "torch sees 1, which nvidia-smi does not list")


def test_no_gpu_and_one_with_an_old_driver(look: Any) -> None:
    none = look("gpu", tool="", seen=0)
    assert (none.level, none.said) == ("fault", "no GPU is to be seen (no nvidia-smi), and profile gpu needs one")
    assert look("laptop", tool="").level == "ok"
    broken = look("laptop", tool=BROKEN)
    assert (broken.level, broken.said) == ("warning", "nvidia-smi finds no GPU (NVIDIA-SMI has failed: no driver)")
    old = look("gpu", seen=0)
    assert (old.level, "torch sees none of them" in old.said) == ("fault", True)
    assert old.do.startswith("bring NVIDIA's driver to")


def test_torch_is_asked_in_a_process_of_its_own(settings_folder: Path) -> None:
    (settings_folder / "torch.py").write_text(
        "class cuda:\n    is_available, device_count = staticmethod(lambda: True), staticmethod(lambda: 3)\n"
    )
    assert machine_checks._gpus_of_torch() == 3
    (settings_folder / "torch.py").write_text("raise OSError('libcudart is damaged')\n")
    assert machine_checks._gpus_of_torch() is None
