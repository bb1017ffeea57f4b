"""One folder of weights for what samples and what trains: written once, and compared by its hash."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from errors import ConfigurationError
from models.local.export import export_base
from models.local.model_files import EMBEDDED, embedded_cache, weights_revision

START = Path(__file__).parents[3] / "docker" / "vllm" / "start.sh"


def make_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for file, held in (("model-00001.safetensors", weights), ("model-00002.safetensors", b"more")):
        save_file({"weight": np.frombuffer(held, np.uint8)}, folder / file)
    (folder / "model-00001.safetensors").chmod(0o600)  # as safetensors leaves its files
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def test_a_folder_is_copied_once_without_what_would_be_unpickled(tmp_path: Path) -> None:
    source, folder = make_model(tmp_path / "mine"), tmp_path / "models" / "owner" / "mine"
    revision = export_base(str(source), folder)
    assert revision == weights_revision(source) == weights_revision(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model-00001.safetensors", "model-00002.safetensors"
    ]  # fmt: skip
    readable = [path.stat().st_mode & 0o044 == 0o044 for path in (folder, *folder.iterdir())]
    assert all(readable), "another user's server reads it"
    assert list(folder.parent.iterdir()) == [folder], "nothing half made is left"
    # Once: another model under this name leaves the folder as it is.
    assert export_base(str(make_model(tmp_path / "other", b"others")), folder) == revision


def test_the_embedded_model_is_the_converted_one(tmp_path: Path) -> None:
    made = make_model(embedded_cache(str(tmp_path / "cache")))
    (made / "complete").touch()
    export_base(EMBEDDED, tmp_path / "out", str(tmp_path / "cache"))
    assert weights_revision(tmp_path / "out") == weights_revision(made)
    assert not (tmp_path / "out" / "complete").exists()


def test_a_model_of_hugging_face_comes_with_safetensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, local_dir: Path, **patterns: Any) -> None:
        asked.append({"name": name, **patterns})
        make_model(local_dir / "x").rename(local_dir / "y")
        for file in (local_dir / "y").glob("[cm]*"):
            file.rename(local_dir / file.name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    export_base("owner/name", tmp_path / "out")
    assert asked[0]["name"] == "owner/name"
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0]["allow_patterns"])


def test_what_cannot_be_had_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("401 Client Error: gated")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigurationError, match="'owner/name' cannot be loaded: 401 Client Error"):
        export_base("owner/name", tmp_path / "out")
    with pytest.raises(ConfigurationError, match="neither a folder nor a Hugging Face id"):
        export_base("/nowhere/at/all", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigurationError, match="is there and is no model"):
        export_base(EMBEDDED, tmp_path / "taken")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        export_base(str(make_model(tmp_path / "mine")), tmp_path / "mine" / "config.json" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "taken"]


def test_vllm_starts_under_the_revision_that_rounds_compute(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    folder = make_model(tmp_path / "model")
    done = subprocess.run(
        ["sh", str(START), str(folder), "--enable-lora"], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "base", f"weights-{weights_revision(folder)}", "--enable-lora",
    ]  # fmt: skip
