"""An adapter on disk: exactly `adapter_config.json` and `adapter_model.safetensors`, and how it is distinguished
from anything else.

Nothing here loads a tensor, imports torch, or unpickles: an adapter folder may come from outside.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from errors import AdapterError, ConfigurationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG, WEIGHTS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


@dataclass(frozen=True)
class AdapterRecord:
    """What is registered with an adapter. `params` are training settings, `tags` anything further worth searching
    for."""

    capability: str
    base: str
    base_revision: str
    round: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RegisteredAdapter:
    """A version in the registry. `name` is the registered model, `model_id` MLflow's logged model behind the
    version."""

    name: str
    version: str
    capability: str
    sha256: str
    model_id: str
    run_id: str
    tags: Mapping[str, str]

    @property
    def served_name(self) -> str:
        """The name of this version alone, as serving caches need: `<capability>@v<version>-<first 8 of the hash>`."""
        return f"{self.capability}@v{self.version}-{self.sha256[:8]}"


def round_name(capability: str, origin: str, digest: str) -> str:
    """The name under which a round samples with an adapter on servers that others use too; `origin` is the id of the
    round that trained it."""
    return f"{capability}@{origin}-{digest[:8]}"


def check_names(names: Iterable[str], where: str) -> None:
    """Raises AdapterError unless `names` are the two files of an adapter and nothing else."""
    given = sorted(names)
    extra, missing = sorted(set(given) - set(ADAPTER_FILES)), sorted(set(ADAPTER_FILES) - set(given))
    if extra or missing:
        raise AdapterError(
            f"{where} is no adapter folder: unexpected {extra}, missing {missing}; it must hold "
            f"{' and '.join(ADAPTER_FILES)} only "
            "(export_adapter makes such a copy)"
        )


def adapter_digest(folder: Path) -> str:
    """SHA-256 over both files (name, length, bytes), after checking that the folder is an adapter.

    Raises AdapterError for other files, links, a config that is not a LoRA one, or weights that are not safetensors.
    """
    if not folder.is_dir() or folder.is_symlink():
        raise AdapterError(
            f"{folder} is not a folder (links are refused); give the folder that holds the adapter's two files"
        )
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.is_symlink() or not entry.is_file():
            raise AdapterError(f"{entry} is a link or not a plain file; an adapter holds two plain files")
    check_names((entry.name for entry in entries), str(folder))
    _check_config(folder / CONFIG)
    _check_safetensors(folder / WEIGHTS)
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        path = folder / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_location(location: str, adapter: RegisteredAdapter, artifact_root: Path | None, storage: str = "") -> None:
    """Raises AdapterError unless an artifact address lies in the registry's own store: under the local `artifact_root`
    and not through a link, or, where that is None because a server keeps the files, at the server's own proxy
    address. With `storage`, the address of an object storage, also below that."""
    parsed = urlparse(location)
    path = unquote(parsed.path)
    allowed = ".." not in path.split("/") and not parsed.query and not parsed.fragment
    stored = bool(storage) and location.startswith(f"{storage}/")
    if stored and storage.startswith("file:"):
        artifact_root = Path(unquote(urlparse(storage).path)).resolve()
    if stored and not storage.startswith("file:"):
        pass
    elif artifact_root is None:
        allowed = allowed and parsed.scheme == "mlflow-artifacts" and not parsed.netloc
    else:
        folder = Path(path)
        allowed = (
            allowed
            and parsed.scheme in ("", "file")
            and parsed.netloc in ("", "localhost")
            and folder.resolve().is_relative_to(artifact_root)
            and not any(entry.is_symlink() for entry in (folder, *folder.glob("*")))
        )
    if not allowed:
        raise AdapterError(
            f"{adapter.name} version {adapter.version} points to {location!r}, outside the artifact root "
            f"{storage or artifact_root} or through a link; register the adapter again"
        )


def verify(folder: Path, adapter: RegisteredAdapter) -> None:
    """Raises AdapterError unless the folder holds exactly the bytes that were registered."""
    found = adapter_digest(folder)
    if found != adapter.sha256:
        raise AdapterError(
            f"{folder} has SHA-256 {found[:16]}..., but version {adapter.version} of {adapter.name} was "
            f"registered with {adapter.sha256[:16]}...; its files were changed: do not use them, "
            "register the adapter again"
        )


def order_config(folder: Path) -> Path:
    """Put the module names of a saved adapter's configuration in order; returns the folder.

    PEFT keeps them as a set and writes them in an order that changes from process to process: the same weights would
    have another digest each time, and everything that they play another id.
    """
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(config.get(name), list):
            config[name] = sorted(config[name])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return folder


def export_adapter(source: Path, destination: Path) -> Path:
    """Copies only the adapter's two files out of a PEFT folder (which also holds a README and optimizer state).

    `destination` must not exist yet (AdapterError): names of adapters are never reused. Returns it.
    """
    missing = [name for name in ADAPTER_FILES if not (source / name).is_file() or (source / name).is_symlink()]
    if missing:
        raise AdapterError(
            f"{source} lacks {' and '.join(missing)} as plain files; save the PEFT model as safetensors first"
        )
    if destination.exists():
        raise AdapterError(f"{destination} exists; export each adapter into a folder of its own")
    destination.mkdir(parents=True)
    for name in ADAPTER_FILES:
        shutil.copyfile(source / name, destination / name)
    adapter_digest(destination)
    flush(destination)
    return destination


def flush(folder: Path) -> None:
    """Wait until the files of a folder, and its name, are on the disk. A power cut may leave empty what was written in
    the seconds before it, and keep what was written after that: a record of what is empty now."""
    for path in (*(file for file in folder.iterdir() if file.is_file()), folder):
        _flush_one(path)
    flush_name(folder)


def flush_name(folder: Path) -> None:
    """Wait until the name of a folder is on the disk, as when it has another now and its files are there already."""
    _flush_one(folder.parent)


def _flush_one(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    except OSError as problem:
        # Some network file systems know no such thing of folders, whose names they keep at once.
        if not path.is_dir() or problem.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(place)


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterError(f"{path} is not JSON ({error}); save the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise AdapterError(f"{path} describes {kind!r}, not a LoRA adapter; only peft_type LORA is served")


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise AdapterError(f"{path} is not a safetensors file ({error}); save the adapter again") from error
    if not names:
        raise AdapterError(f"{path} holds no tensor; the adapter would change nothing")


def checked_name(name: str, what: str) -> str:
    """`name` if it can be part of a registered model's name, else ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{what} {name!r} cannot be part of a registry name; use letters, digits, '_', '-' and '.'"
        )
    return name


def checked_key(key: str) -> str:
    """`key` if it can stand in a search filter, else ConfigurationError."""
    if not re.fullmatch(r"[\w./@:-]{1,200}", key):
        raise ConfigurationError(f"run key {key!r} must be 1 to 200 letters, digits or ./@:_-")
    return key


def carries_weights(folder: Path) -> bool:
    """Whether any lora_B of an adapter is not 0. Raises `AdapterError` for a file that is no safetensors."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > (folder / WEIGHTS).stat().st_size:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
            begin = file.tell()
            for name, tensor in header.items():
                if ".lora_B" in name:
                    first, end = tensor["data_offsets"]
                    file.seek(begin + first)
                    if any(file.read(end - first)):
                        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise AdapterError(f"{folder / WEIGHTS} cannot be read ({problem!r}); download the adapter again") from problem
    return False
