"""Which dtype this machine computes a model in fastest.

A processor without AMX and AVX-512 BF16 takes three times as long in bf16 as in fp32. One that has them does not always
gain: with AVX-512 BF16 alone bf16 products were seen to take half of fp32's time, and 1.7 times it (`benchmarks.floor`
on two machines). So it is measured, once: the dtype is a part of what a policy is, and must not be another one at the
next start.
"""

from __future__ import annotations

import json
import logging
import os
import time
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from models.local.model_files import cache_folder

logger = logging.getLogger("trace.models")

KEPT = "dtypes.json"
# bf16 is taken below this share of fp32's time: its rounding has to be worth something.
CLEARLY = 0.9
# A training's rows against matrices of the embedded model's size, more of them than a core's caches hold.
ROWS, IN, OUT, MATRICES, TURNS = 256, 576, 1536, 4, 5


def fast_dtype(folder: str = "") -> torch.dtype:
    """bf16 on CUDA and where the processor multiplies it clearly faster than fp32, else fp32. What was measured is kept
    in the cache folder (`folder` as in `cache_folder`); where that cannot be written it is measured at every start."""
    if torch.cuda.is_available():
        return torch.bfloat16
    found = _instructions()
    if not found:
        return torch.float32
    return torch.bfloat16 if _share(cache_folder(folder), f"{_processor()}, {found}") < CLEARLY else torch.float32


@cache
def _share(folder: Path, machine: str) -> float:
    """The time of bf16 as a share of fp32's on this machine, as it was measured when it was first asked for."""
    path, known = folder / KEPT, {}
    try:
        known = {str(name): float(share) for name, share in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        logger.warning("%s cannot be read (%s): what this machine computes fast is measured again", path, problem)
    if machine not in known:
        share = known[machine] = round(bf16_share(), 3)
        logger.info("bf16 takes %.2f times as long as fp32 on this processor (%s)", share, machine)
        _keep(path, known)
    return known[machine]


def _keep(path: Path, known: dict[str, float]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1))
        part.replace(path)
    except OSError as problem:
        logger.info("that is not kept in %s (%s) and will be measured at every start", path.parent, problem.strerror)


def bf16_share() -> float:
    """The processor time of bf16 products as a share of fp32's: the best of some turns of each on one thread, half a
    second in all. Wall time, and two threads, tell more of what else the machine does than of the processor."""
    generator = torch.Generator().manual_seed(0)
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    given = {
        kind: (
            torch.randn(ROWS, IN, generator=generator).to(kind),
            [torch.randn(OUT, IN, generator=generator).to(kind) for _ in range(MATRICES)],
        )
        for kind in best
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for x, matrices in given.values():
            F.linear(x, matrices[0])  # the kernels are chosen at the first call
        for _ in range(TURNS):
            for kind, (x, matrices) in given.items():
                began = time.process_time()
                for matrix in matrices:
                    F.linear(x, matrix)
                best[kind] = min(best[kind], time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    return best[torch.bfloat16] / best[torch.float32]


def _instructions() -> str:
    """What the processor has for bf16: "amx", "avx512_bf16", or "" for nothing that could make it faster."""
    probes = {"amx": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    return next((name for name, probe in probes.items() if getattr(torch.cpu, probe, bool)()), "")


def _processor() -> str:
    """The processor's name and torch's version, whose kernels are measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, torch {torch.__version__}"
