"""Loading the base model where the machine offers less: it works, slower, and says why."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from transformers import modeling_gguf_pytorch_utils

from errors import ConfigurationError
from models.local import base
from models.local.base import embedded_folder, slow_because


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that the model was converted into, without the seconds that it takes."""
    places: list[Path] = []

    def convert(folder: Path) -> None:
        (folder / "complete").write_text("made")
        places.append(folder)

    monkeypatch.setattr(base, "_convert", convert)
    return places


def test_the_model_is_converted_once_and_kept(tmp_path: Path, converted: list[Path]) -> None:
    first = embedded_folder(str(tmp_path / "cache"))
    assert first == embedded_folder(str(tmp_path / "cache"))
    assert (first / "complete").is_file()
    assert len(converted) == 1
    assert list((tmp_path / "cache").iterdir()) == [first]  # nothing half made stays


def test_a_cache_that_cannot_be_written_is_said_and_done_without(
    tmp_path: Path, converted: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")  # no folder can be made below it, not even by root
    cache = str(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "trace.models"):
        first = embedded_folder(cache)
    assert "every start converts it anew" in caplog.text
    assert "TRACE_CACHE" in caplog.text
    assert (first / "complete").is_file()
    assert embedded_folder(cache) == first
    assert converted == [first]  # once a process


def test_one_that_was_half_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "_convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        embedded_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [True, False])
def test_a_disk_that_fills_up_is_told_and_half_a_model_is_not_taken_for_one(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As safetensors says it, which has no OSError for it."""
    full = [True]

    def convert(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if full.pop():
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        (folder / "complete").write_text("made")

    monkeypatch.setattr(base, "_convert", convert)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "cache" if kept else tmp_path / "file" / "cache")
    with pytest.raises(ConfigurationError, match=r"cannot be stored in .*No space left.*TRACE_CACHE"):
        embedded_folder(cache)
    assert list(tmp_path.rglob("*.json")) == []
    full.append(False)
    assert (embedded_folder(cache) / "complete").is_file()


def test_a_gguf_file_is_read_once_and_as_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "Ġb"])
    writer.add_tensor("w", np.arange(64, dtype=np.float32).reshape(2, 32), raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain, names = gguf.GGUFReader(path), gguf.get_tensor_name_map
    with base._gguf_read_once():
        read = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is read
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert (type(gguf.GGUFReader(path)), gguf.get_tensor_name_map) == (type(plain), names)
    assert {k: f.contents() for k, f in read.fields.items()} == {k: f.contents() for k, f in plain.fields.items()}
    assert [t.data.tolist() for t in read.tensors] == [t.data.tolist() for t in plain.tensors]


@pytest.mark.parametrize(
    ("cores", "threads", "capability", "words"),
    [
        ({0, 1}, 2, "AVX512", []),
        ({0}, 1, "AVX512", ["one core"]),
        ({0, 1, 2, 3}, 2, "AVX512", ["torch uses 2 of 4 cores (OMP_NUM_THREADS is 2)"]),
        ({0, 1}, 2, "AVX2", ["no AVX-512"]),
        ({0}, 1, "DEFAULT", ["one core", "no AVX-512"]),
    ],
)
def test_what_makes_a_machine_slower_is_named(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], threads: int, capability: str, words: list[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    monkeypatch.setattr(base, "cores_here", lambda: len(cores))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    found = slow_because()
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_turning_the_model_into_safetensors_draws_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the log of a night each step of one would be a line."""

    def read(cls: Any, *given: Any, **how: Any) -> Any:
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting")) == [1, 2]
        raise OSError("enough was read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", classmethod(read))
    with pytest.raises(ConfigurationError, match="enough was read"):
        embedded_folder(str(tmp_path))
    assert capsys.readouterr().err == ""
