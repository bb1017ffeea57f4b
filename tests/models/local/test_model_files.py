"""A base model's files are checked without any library that could load them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from errors import ConfigurationError
from models.local.model_files import check_base_files


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/model", "owner/name/more", "owner/"])
def test_what_is_neither_a_folder_nor_an_id(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"neither a folder nor a Hugging Face id.*give 'smollm2-135m'"):
        check_base_files(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2_x"])
def test_an_id_is_left_to_transformers(name: str) -> None:
    check_base_files(name)


def test_a_file_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="neither a folder"):
        check_base_files("model.gguf")


def test_a_folder_needs_configuration_and_weights(tmp_path: Path) -> None:
    def refused(said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            check_base_files(str(tmp_path))

    refused("config.json cannot be read")
    config = tmp_path / "config.json"
    config.write_text("{")
    refused("is not JSON")
    config.write_text("[]")
    refused("names no model_type")
    config.write_text('{"model_type": "llama"}')
    refused(r"holds no \*.safetensors")
    weights = tmp_path / "model.safetensors"
    save_file({"weight": np.ones((8, 8), np.float32)}, weights)
    check_base_files(str(tmp_path))
    whole = weights.read_bytes()
    for stopped in (b"", whole[:20], whole[:-1]):  # a download that was stopped
        weights.write_bytes(stopped)
        refused(r"model\.safetensors is damaged or not whole.*download it again")
