"""A base model as one folder of safetensors, for every process that is to have the very same weights: the one that
trains, and vLLM. Written once; what is there already stays."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from errors import ConfigurationError
from models.adapters.files import flush
from models.local.model_files import EMBEDDED, check_base_files, not_loadable, problem_of_folder, weights_revision

logger = logging.getLogger("trace.models")
# What a model needs to be loaded. No weights but safetensors: the other kinds are pickles.
KEPT = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def export_base(name: str, folder: Path, cache: str = "") -> str:
    """Write the base model `name` (as the setting base_model) into `folder`, unless a model lies there; the revision of
    its weights. The folder appears whole or not at all. Raises `ConfigurationError` for a model that cannot be had, a
    folder that cannot be written, or one that holds something else."""
    if folder.exists():
        if problem := problem_of_folder(folder):
            raise ConfigurationError(f"{folder} is there and is no model ({problem}); remove it, or name another")
        logger.info("%s holds a model: taken as it is", folder)
        return weights_revision(folder)
    check_base_files(name, cache)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _fill(part, name, cache)
            if missing := problem_of_folder(part):
                raise not_loadable(name, missing)
            part.chmod(0o755)  # mkdtemp's are the owner's alone; other users' processes read this one
            flush(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as problem:
        raise ConfigurationError(
            f"{folder} cannot be written ({problem.strerror or problem}); free space, or name another folder"
        ) from problem
    return weights_revision(folder)


def _fill(part: Path, name: str, cache: str) -> None:
    """Put the files of a model into an empty folder."""
    if name == EMBEDDED:
        from models.local.base import embedded_folder  # torch

        source = embedded_folder(cache)
    elif Path(name).is_dir():
        source = Path(name)
    else:
        _fetch(part, name)
        return
    for file in sorted({file for pattern in KEPT for file in source.glob(pattern)}):
        shutil.copyfile(file, part / file.name)


def _fetch(part: Path, name: str) -> None:
    """The files of a model on Hugging Face (HF_TOKEN, where it asks for one)."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, local_dir=part, allow_patterns=list(KEPT), ignore_patterns=["*/*"])
    except (OSError, ValueError) as problem:
        raise not_loadable(name, str(problem)) from problem
    shutil.rmtree(part / ".cache", ignore_errors=True)
