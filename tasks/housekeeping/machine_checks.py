"""What the machine gives: installed versions, the home's disk, a GPU, the base model's files, the sandbox."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

import settings as settings_module
from environments.sandbox.workers import choose_level
from models.local.model_files import EMBEDDED, check_base_files, embedded_cache
from settings import Settings
from tasks.housekeeping.findings import Finding, fault, refused, warning, well
from tasks.operations.devices import ON_GPUS

CONSTRAINTS = Path(settings_module.__file__).with_name("constraints.txt")
PYTHONS = ((3, 11), (3, 12))
# A round writes 0.1 to 0.5 GB (checkpoints of three adapters), its databases grow, and SQLite needs room to end well.
LEAST_BYTES, FEW_BYTES = 1 << 30, 5 << 30
# What is said where NVIDIA's tool is not installed, as in many containers with a GPU.
NO_TOOL = "no GPU is to be seen (no nvidia-smi)"
# torch's import from a cold disk.
TORCH_SECONDS = 90.0
_INSTALL = "pip install -c constraints.txt -e '.[EXTRA,...]' in the checkout, with the extras in use ('-e .' for none)"


def machine_findings(settings: Settings) -> Iterator[Finding]:
    """All checks of this file."""
    yield from versions()
    yield from disk(settings)
    yield gpu(settings)
    yield model_files(settings)
    if settings.synthesizer.kind == "llm":
        yield refused("sandbox", lambda: choose_level(settings.sandbox)) or well(
            "sandbox", "generated code is confined"
        )


def versions() -> Iterator[Finding]:
    """Python and packages: what this program cannot do with, and what it was not tested with."""
    here = sys.version_info[:2]
    if here not in PYTHONS:
        yield fault("versions", f"this is Python {here[0]}.{here[1]}", "install with Python 3.11 or 3.12")
    wrong = []
    for text in importlib.metadata.requires("trace-agent") or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _installed(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            wrong.append(wanted.name)
            said = f"{wanted.name} is {found or 'not installed'}, needed is {wanted.specifier}"
            yield fault("versions", said, _INSTALL)
    tested = _tested()
    other = [pin for pin in tested if pin.name not in wrong and not _is(pin, _installed(pin.name))]
    if other:
        named = ", ".join(f"{pin.name} {_installed(pin.name)} (tested: {pin.specifier})" for pin in other)
        yield warning("versions", f"not the versions of {CONSTRAINTS.name}: {named}", _INSTALL)
    elif not wrong and here in PYTHONS:
        against = f"{len(tested)} of {CONSTRAINTS.name}" if tested else "no constraints.txt to compare with"
        yield well("versions", f"Python {here[0]}.{here[1]}, packages as needed ({against})")


def disk(settings: Settings) -> Iterator[Finding]:
    """Space where the home lies, and whether it can be written."""
    place = next(p for p in (settings.folder, *settings.folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    said = f"{free / 1e9:.1f} GB free on the disk of {settings.folder}"
    do = "free space: 'trace-agent clean --older-than 30' removes what no release, report or label needs"
    if free < LEAST_BYTES:
        yield fault("disk", said, do)
    elif free < FEW_BYTES:
        yield warning("disk", said, do)
    else:
        yield well("disk", said)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield fault("home", f"{place} cannot be written", "make it writable for this user, or give another --home")


def gpu(settings: Settings) -> Finding:
    """Whether rounds train on a GPU where the profile counts on one, or the machine has one. torch takes seconds to
    import: it is asked, in a process of its own, only where the profile needs a GPU and nothing else says why not."""
    needs = settings.profile in ON_GPUS and not settings.devices.cpu
    found, none = _listed_gpus()
    names, kept = "; ".join(found), _kept_from_torch(len(found))
    seen = _gpus_of_torch() if needs and kept is None else None
    if seen == 0 and found:
        kept = "torch sees none of them", "bring NVIDIA's driver to the version that torch's CUDA needs"
    if seen or (found and kept is None):
        return well("gpu", names or f"torch sees {seen}, which nvidia-smi does not list")
    why, do = kept or ("", "install NVIDIA's driver, or give the container its GPUs")
    what = ", and ".join(part for part in (names or none, why) if part)
    if needs:
        said = f"{what}, and profile {settings.profile} needs {'it' if found else 'one'}"
        return fault("gpu", said, f"{do}, or take profile laptop")
    if found and settings.devices.cpu:
        return well("gpu", f"{what}; devices.cpu = true: rounds train on the processor")
    if found:
        said = f"{what}: rounds train on the processor"
        return warning("gpu", said, f"{do}, or set devices.cpu = true if that is meant")
    if none != NO_TOOL:
        return warning("gpu", none, "check its driver, if this machine has a GPU")
    return well("gpu", f"{none}; profile {settings.profile} needs none")


def _listed_gpus() -> tuple[list[str], str]:
    """The machine's GPUs as `nvidia-smi` lists them, or why it lists none."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return [], NO_TOOL
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return [], f"nvidia-smi finds no GPU ({problem})"
    found = [line.split(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU ")]
    if done.returncode == 0 and found:
        return found, ""
    said = (done.stdout + done.stderr).strip().splitlines()
    return [], f"nvidia-smi finds no GPU ({said[0] if said else f'status {done.returncode}'})"


def _kept_from_torch(listed: int) -> tuple[str, str] | None:
    """Why torch can see no GPU, of which so many are listed, and what to do; None where nothing keeps it from them."""
    version, visible = _installed("torch") or "", os.environ.get("CUDA_VISIBLE_DEVICES")
    if version.endswith("+cpu"):
        do = "'pip uninstall torch', then 'pip install -c constraints.txt torch' without an index of CPU wheels"
        return f"torch {version} is a CPU build", do
    if visible is None:
        return None
    first = visible.split(",")[0].strip()
    # CUDA shows no GPU from the first name on that it does not know.
    if first in ("", "-1", "NoDevFiles") or (listed and first.isdigit() and int(first) >= listed):
        do = "unset it, or name there the GPUs that rounds may use"
        return f"CUDA_VISIBLE_DEVICES = {visible!r} shows torch none", do
    return None


def _gpus_of_torch() -> int | None:
    """How many GPUs torch sees; None where it does not say. No memory is taken on them."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_SECONDS)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def model_files(settings: Settings) -> Finding:
    """Whether the base model's files are there and whole, as far as can be told without loading them."""
    name = settings.base_model
    if found := refused("model", lambda: check_base_files(name, settings.cache)):
        return found
    if name != EMBEDDED:
        return well("model", f"base model {name}" + ("" if Path(name).is_dir() else " (asked of the hub at the start)"))
    made = embedded_cache(settings.cache)
    if (made / "complete").is_file() and not any(made.glob("*.safetensors")):
        return fault("model", f"{made} is marked as complete and has no weights", "remove that folder")
    return well("model", f"base model {name}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is(pin: Requirement, found: str | None) -> bool:
    """Whether what is installed is what was tested; a package of an extra need not be there. 2.13.0+cpu is 2.13.0."""
    return found is None or pin.specifier.contains(found, prereleases=True)


def _tested() -> list[Requirement]:
    """The versions of `constraints.txt`; none where the program was installed without it."""
    if not CONSTRAINTS.is_file():
        return []
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]
