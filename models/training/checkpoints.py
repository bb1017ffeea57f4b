"""What a training keeps on disk: checkpoints to go on from, the weights of every step to choose from, and its ending.

In the folder of a training:
- `checkpoint-N/`: adapter, optimizer, RNG and step, as TRL writes them, of the last two steps; `complete.json` is
  written last, when all else is on the disk, and has the records up to it, so a checkpoint without it was cut off and
  is not resumed from;
- `weights/step-N/`: the adapter's two files after step N, of every step; step 0 is what training began from;
- `ended.json`: how the training ended, where no step could follow.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import AdapterError, StoreError, TraceError
from models.adapters.files import CONFIG, WEIGHTS, adapter_digest, export_adapter, flush, flush_name, order_config
from models.objects import HomeFiles
from models.training.records import StepRecord

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger("trace.models")

# What PyTorch and safetensors say of a file that they could not write, which is no OSError.
UNWRITTEN = ("PytorchStreamWriter failed", "iostream error", "unexpected pos", "I/O error", "No space left")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMPLETE, ENDED = "complete.json", "ended.json"
# What the configuration of a start must share with this training's, and what decides it here.
SHAPE = {
    "r": "train.rank",
    "lora_alpha": "train.alpha",
    "layers_to_transform": "train.upper_layers",
    "target_modules": "models.training.lora.target_modules",
    "use_rslora": "models.training.lora.lora_config",
}


@dataclass(frozen=True)
class Ended:
    """How a training ended that no step could follow: the `ending`, and the verdict on its reward ("" for none)."""

    ending: str
    verdict: str = ""


def last_whole_checkpoint(output: Path) -> tuple[Path, list[StepRecord]] | None:
    """The newest checkpoint that was written to its end, with the records up to it. One whose records a machine's own
    end (a power cut) has left empty counts as cut off."""
    folders = sorted(output.glob("checkpoint-*"), key=_step, reverse=True)
    for folder in folders:
        if (folder / COMPLETE).is_file() and (stored := _read(folder / COMPLETE)) is not None:
            return folder, [StepRecord.read(r) for r in stored]
    return None


@contextmanager
def storing(output: Path) -> Iterator[None]:
    """Within, where nothing but a checkpoint is written, one that a full disk cuts off is one `StoreError`, whichever
    library wrote it. Errors of the project's own say themselves what they are."""
    try:
        yield
    except TraceError:
        raise
    except Exception as problem:
        full = isinstance(problem, OSError) and problem.errno in FULL
        if not full and not any(words in str(problem) for words in UNWRITTEN):
            raise
        first = (str(problem).splitlines() or [""])[0][:200]
        raise StoreError(
            f"a checkpoint in {output} could not be written ({type(problem).__name__}: {first}); free space on its "
            "disk, then the same command goes on from the last whole one"
        ) from problem


def complete(folder: Path, records: Sequence[StepRecord]) -> None:
    """Mark a checkpoint as whole; its weights are kept first. Raises `StoreError` where they cannot be written. All but
    the step before are forgotten then: by number, as a clock that was set back makes the newest the oldest by time."""
    step = _step(folder)
    with storing(folder.parent):
        keep_weights(folder.parent, step, folder)
        flush(folder)
        _write(folder / COMPLETE, [asdict(r) for r in records])
    for earlier in folder.parent.glob("checkpoint-*"):
        if _step(earlier) < step - 1:
            shutil.rmtree(earlier, ignore_errors=True)


def forget_later(output: Path, step: int) -> None:
    """Forget the checkpoints after `step`, the last one that the store has of a training, and how it ended after them.
    A step is stored before its checkpoint is whole, so what is further is of another life of the store: of a backup
    that was made meanwhile, of before a power cut, or of before it was made anew. The store would never get these
    steps, nor their episodes: they are made again."""
    later = [folder for folder in output.glob("checkpoint-*") if _step(folder) > step]
    if any((folder / COMPLETE).is_file() for folder in later):
        logger.warning(
            "the store has step %d of the training in %s as its last, its checkpoints are of later ones: these steps "
            "are made again",
            step,
            output,
        )
        (output / ENDED).unlink(missing_ok=True)
    for folder in later:
        shutil.rmtree(folder)


def keep_weights(output: Path, step: int, saved: Path) -> None:
    """Keep the adapter in `saved` (a folder that PEFT wrote) as that of `step`."""
    folder = _weights(output, step)
    part = folder.with_name(f".{folder.name}")
    shutil.rmtree(part, ignore_errors=True)  # of a process that died here
    export_adapter(order_config(saved), part)
    shutil.rmtree(folder, ignore_errors=True)  # a step that is done again, its checkpoint having been cut off
    part.rename(folder)
    flush_name(folder)


def weights_by_step(output: Path, last: int) -> dict[int, Path]:
    """Folder of the adapter after each step from 0 to `last`. Raises `AdapterError` when one is gone."""
    found = {step: _weights(output, step) for step in range(last + 1)}
    for step, folder in found.items():
        if not folder.is_dir():
            raise AdapterError(f"{folder} with the weights of step {step} is gone; remove {output} and train again")
    return found


def write_ended(output: Path, ended: Ended) -> None:
    """Store how the training ended."""
    with storing(output):
        _write(output / ENDED, asdict(ended))


def read_ended(output: Path) -> Ended | None:
    """How the training ended, if it did before its last step for want of anything to learn."""
    path = output / ENDED
    stored = _read(path) if path.is_file() else None
    return None if stored is None else Ended(**stored)


def put_training(files: HomeFiles, output: Path) -> None:
    """Put a training's folder, which this process alone writes, where another home can go on with it."""
    files.put(output.relative_to(files.home).as_posix(), leave_out=("final",), prune=True)


def fetch_further(files: HomeFiles, output: Path) -> None:
    """Bring a training's folder from where it was put, if it is further there than here."""
    name = output.relative_to(files.home).as_posix()
    here = [path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()]
    if _reached(files.names(name)) > _reached(here):
        files.fetch(name, replace=True)


def _reached(names: Iterable[str]) -> tuple[bool, int]:
    """Whether a training with these files has ended for want of a step, and the step of its last whole checkpoint."""
    names = set(names)
    found = [re.fullmatch(rf"checkpoint-(\d+)/{COMPLETE}", name) for name in names]
    return ENDED in names, max((int(match[1]) for match in found if match), default=0)


def begin(peft: Any, wanted: LoraConfig, output: Path, start: Path | None) -> None:
    """Begin a training: with the weights in `start` if it is given, and what it begins from kept as step 0."""
    if start is not None:
        _start_from(peft, start, wanted)
    saved = output / ".start"
    with storing(output):
        peft.save_pretrained(str(saved), safe_serialization=True)
        keep_weights(output, 0, saved)
        shutil.rmtree(saved)


def _start_from(peft: Any, start: Path, wanted: LoraConfig) -> None:
    """Put the weights of an adapter's folder into a PEFT model that was made with `wanted`.

    Raises `AdapterError` when rank, alpha, layers or projections are others, or the weights do not fit the model.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    adapter_digest(start)  # two plain files, a LoRA configuration, safetensors
    config = json.loads((start / CONFIG).read_text(encoding="utf-8"))
    for name, decided_by in SHAPE.items():
        given, ours = config.get(name), getattr(wanted, name)
        if isinstance(ours, list | set):
            given, ours = sorted(given or ()), sorted(ours)
        if given != ours:
            raise AdapterError(
                f"the adapter in {start} has {name} = {given}, this training {ours}: its weights do not fit; give "
                f"{decided_by} the adapter's value, or train from the base"
            )
    weights = load_file(start / WEIGHTS)
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    expected = {name: tuple(t.shape) for name, t in _state(peft).items()}
    if wrong := sorted(set(shapes.items()) ^ set(expected.items())):
        name = wrong[0][0]
        raise AdapterError(
            f"the adapter in {start} has {name} of shape {shapes.get(name)}, the model has {expected.get(name)}; "
            "it was trained on another base: train from this base"
        )
    set_peft_model_state_dict(peft, weights)


def _state(peft: Any) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = get_peft_model_state_dict(peft)
    return state


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _weights(output: Path, step: int) -> Path:
    return output / "weights" / f"step-{step}"


def _read(path: Path) -> Any:
    """What `_write` wrote; None, with a warning, where it is no JSON any more."""
    try:
        return json.loads(path.read_text())
    except ValueError as problem:
        logger.warning("%s cannot be read (%s); it counts as not written", path, problem)
        return None


def _write(path: Path, content: Any) -> None:
    """Write JSON so that the file is whole or not there."""
    part = path.with_name(f".{path.name}")
    with part.open("w") as written:
        written.write(json.dumps(content))
        written.flush()
        os.fsync(written.fileno())
    part.replace(path)
