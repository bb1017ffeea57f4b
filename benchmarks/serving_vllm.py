"""How much adapters cost on a vLLM server: tokens per second with 1, 4 and 16 of them in flight, against the base.

    python -m benchmarks.serving_vllm [--url http://127.0.0.1:8000] [--requests 64] [--tokens 32] [--concurrency 32]

Without `--url` the CPU build in `.venv-vllm` is started on the embedded model (`make install-vllm`). With it, the
server must serve that model as `--model` with `--max-loras 16` and see this machine's temporary folder (`--folder`).
Every side answers the same prompts with as many tokens, no end of turn; each adapter is the same random LoRA under
another name, so what is measured is the number of adapters in a batch. Sides alternate over `--repeats`; the
median is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from models.local.base import load_base
from models.vllm.server import VllmServer
from tests.adapters_made import make_adapter
from tests.integration.vllm_servers import MISSING, installed, vllm_server

COUNTS = (0, 1, 4, 16)


def rate(server: VllmServer, names: list[str], prompts: list[list[int]], tokens: int, concurrency: int) -> float:
    """Tokens per second when request i goes to model i modulo their number."""

    def ask(i: int) -> int:
        body = {"model": names[i % len(names)], "prompt": prompts[i], "max_tokens": tokens, "ignore_eos": True}
        return len(server.complete(body | {"temperature": 1.0, "seed": i}).ids)

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        sampled = sum(pool.map(ask, range(len(prompts))))
    return sampled / (time.perf_counter() - began)


def main() -> None:
    """Print a row for each number of adapters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="base")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where adapters are put for the server to read")
    given = parser.parse_args()
    if not given.url and not installed():
        raise SystemExit(f"{MISSING}, or give --url")
    with ExitStack() as stack:
        folder = Path(given.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-")))
        base = load_base()
        adapter = make_adapter(base.policy.model, folder / "adapter", rank=16)
        start = base.renderer.tokenizer("Please tell me what you can do about the order that I placed last week")
        prompts = [start["input_ids"][: 8 + i % 6] for i in range(given.requests)]
        del base
        url = given.url or stack.enter_context(vllm_server(folder, max_loras=max(COUNTS))).url
        server = VllmServer(url, given.model, connections=given.concurrency)
        names = [f"bench@v{i}-{time.time_ns() % 10**8:08d}" for i in range(max(COUNTS))]
        try:
            for name in names:
                server.load(name, str(adapter))
            sides = {n: names[:n] or [given.model] for n in COUNTS}
            for side in sides.values():  # first requests compile, read weights and fill buffers
                rate(server, side, prompts[: len(side)], 4, given.concurrency)
            measured: dict[int, list[float]] = {n: [] for n in COUNTS}
            for _ in range(given.repeats):
                for n, side in sides.items():
                    measured[n].append(rate(server, side, prompts, given.tokens, given.concurrency))
        finally:
            for name in names:
                server.unload(name)
            server.close()
    print(f"{given.requests} requests x {given.tokens} tokens, {given.concurrency} at once, median of {given.repeats}")
    print(f"{'adapters':>8} {'tokens/s':>9} {'of base':>8}")
    reference = statistics.median(measured[0])
    for n, rates in measured.items():
        middle = statistics.median(rates)
        print(f"{n or 'base':>8} {middle:>9.1f} {middle / reference:>8.2f}")


if __name__ == "__main__":
    main()
