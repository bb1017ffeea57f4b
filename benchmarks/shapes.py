"""Tiny models of the architectures that people use, each on a real vLLM server (CPU build) beside the trainer.

    python -m benchmarks.shapes [--kinds llama qwen3 qwen3_moe gemma gpt_oss] [--logs FOLDER]

For each a row: two steps of GRPO with the server as the sampler, export, the adapter loaded by the server, the proof of
life, and the furthest that a token's log-probability on the server lies from the trainer's, at most 0.02 nats. What a
server does not do stands in the row with its error. Half a minute of a core each. Needs `make install-vllm`; exits with
1 when a shape misses what it must reach.
"""

from __future__ import annotations

import argparse
import re
import resource
import tempfile
from pathlib import Path

from tests.integration.shapes.shapes_served import TOLERANCE, furthest, moved, served_shape, trained
from tests.integration.vllm_servers import MISSING, installed
from tests.shapes_made import SHAPES
from tests.tokenizers_trained import chatml_tokenizer

KINDS = ("llama", "qwen3", "qwen3_moe", "gemma", "gpt_oss")
HEAD = ("shape", "GRPO: trainer and server apart", "base, furthest token", "adapter, furthest token",
        "adapter moves the probe", "processor time")  # fmt: skip


def row(kind: str, folder: Path) -> tuple[str, bool]:
    """The table's row of a shape, distances in nats, and whether it reached what it must."""
    began = _processor_seconds()
    try:
        with served_shape(kind, folder, chatml_tokenizer()) as shape:
            made = trained(shape)
            base, adapted = furthest(shape, made)
            gap = max(step.logprob_gap for step in made.steps)
            live = moved(shape, made)
    except Exception as problem:  # one shape that a server cannot hold must not hide the others
        return _line(kind, f"{type(problem).__name__}: {_last_line(str(problem))}"), False
    spent = _processor_seconds() - began
    reached = max(base, adapted, gap) <= TOLERANCE
    return _line(kind, f"{gap:.0e}", f"{base:.0e}", f"{adapted:.0e}", f"{live:.2f}", f"{spent:.0f} s"), reached


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |" * (1 + len(HEAD) - len(cells))


def _processor_seconds() -> float:
    """Of this process and of the servers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(r"Error|error|Exception", line)] or text.splitlines()
    return lines[-1].strip()[-300:]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kinds", nargs="+", choices=tuple(SHAPES), default=KINDS)
    arguments.add_argument("--logs", type=Path, help="where models and servers' logs stay")
    given = arguments.parse_args()
    if not installed():
        raise SystemExit(MISSING)
    print(_line(*HEAD))
    print("|---" * len(HEAD) + "|")
    reached = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in given.kinds:
            folder = (given.logs or Path(scratch)) / kind
            folder.mkdir(parents=True)
            line, well = row(kind, folder)
            print(line, flush=True)
            reached.append(well)
    raise SystemExit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
