"""A whole round of `trace-agent improve` on tiny random models of the architectures that people use, on each backend.

    python -m benchmarks.shape_rounds [--kinds llama qwen3 qwen3_moe gemma gpt_oss] [--backends local vllm] [--logs DIR]

A row for each: stages done of all that a round has, adapters registered, validation episodes that an adapter answered,
the furthest that trainer and sampler lie apart in a step of GRPO (mean of a token, at most 0.02 nats), how far the
adapter moves the probe, the gate's verdicts, seconds. The target is one on which noise succeeds now and then
(`tests/integration/targets/signs.py`), templates are the real ones that TRL ships. `vllm` needs `make install-vllm`.
Exits with 1 when a round misses something; what it misses stands in its row.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

from flows.cli.main import QUIET

BACKENDS = ("local", "vllm")
HEAD = ("shape", "backend", "stages done", "registered", "adapter answered", "trainer and sampler apart",
        "moves the probe", "verdicts", "seconds")  # fmt: skip


def row(kind: str, backend: str, folder: Path) -> tuple[str, bool]:
    """The table's row of a shape on a backend, and whether nothing is missing."""
    from prefect.settings import PREFECT_LOGGING_LEVEL, temporary_settings

    from tests.integration.shapes.rounds_played import OWED, TEMPLATES, round_played
    from tests.integration.shapes.shapes_served import TOLERANCE, saved_shape, server_of
    from tests.tokenizers_trained import shipped_tokenizer

    try:
        model = saved_shape(kind, folder / "base", shipped_tokenizer(TEMPLATES[kind]))
        serving = server_of(kind, folder, model) if backend == "vllm" else nullcontext()
        with serving as server, temporary_settings({PREFECT_LOGGING_LEVEL: "ERROR"}):
            played = round_played(model, folder / "home", server)
    except Exception as problem:  # one shape that fails must not hide the others
        return _line(kind, backend, f"{type(problem).__name__}: {str(problem).splitlines()[-1][-300:]}"), False
    wrong = played.short_of(TOLERANCE)
    told = "; ".join(v.removeprefix("answer_in_signs: ") for v in played.verdicts)
    cells = (f"{played.stages} of {len(OWED)}", str(len(played.versions)), str(played.answered), f"{played.gap:.0e}",
             f"{played.live:.1f}", "; ".join([told, *wrong]), f"{played.seconds:.0f}")  # fmt: skip
    return _line(kind, backend, *cells), not wrong


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |" * (1 + len(HEAD) - len(cells))


def main() -> None:
    from tests.integration.shapes.rounds_played import TEMPLATES
    from tests.integration.vllm_servers import MISSING, installed

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kinds", nargs="+", choices=tuple(TEMPLATES), default=tuple(TEMPLATES))
    arguments.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    arguments.add_argument("--logs", type=Path, help="where models, homes and servers' logs stay")
    given = arguments.parse_args()
    if "vllm" in given.backends and not installed():
        raise SystemExit(MISSING)
    print(_line(*HEAD))
    print("|---" * len(HEAD) + "|")
    whole = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in given.kinds:
            for backend in given.backends:
                folder = (given.logs or Path(scratch)) / f"{kind}-{backend}"
                folder.mkdir(parents=True)
                line, well = row(kind, backend, folder)
                print(line, flush=True)
                whole.append(well)
    raise SystemExit(0 if all(whole) else 1)


if __name__ == "__main__":
    # Before the libraries that read them are imported; a round of one's own must not meet these in Prefect's database.
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="prefect-home-") as prefect_home:
        os.environ["PREFECT_HOME"] = prefect_home
        main()
