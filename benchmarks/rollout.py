"""How fast episodes are sampled: whole episodes against their arithmetic floor, and turns against `model.generate`.

    python -m benchmarks.rollout [--episodes 144] [--rows 48] [--tokens 32] [--dtype auto] [--clock wall] [--vllm]

First whole episodes of the shop, played as a round plays them: `--rows` in flight, several turns each, environment and
tails included. Their time is held against the floor of exactly the tokens that were computed, in the model's own
dtype and in fp32, measured before and after in the same run (`benchmarks/floor.py`). Then one turn each of the same
prompts by this project's sampler and by plain `model.generate`, in one batch that is padded on the left, at the same
temperature and number of tokens, with no end of turn. With `--vllm` the same prompts once more, all with one adapter,
by this project's sampler and by vLLM's CPU build (`make install-vllm`), with as many threads; its server is started
with and without compiled graphs, both sides have read the instructions before, and its better time counts. Exits with 1
when the episodes take more than 1.4 times the fp32 floor, or the sampler is less than 8 times as fast as `generate` or
less than 3 times as vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import CLOCKS, Clock, Floor, measure
from environments.contract import Prompt
from environments.targets.shop.target import target
from models.episodes import Episode, Player, Trajectory
from models.local.base import embedded_folder, load_base
from models.policy import Request, Sampling
from models.vllm.server import VllmServer
from tests.adapters_made import make_adapter
from tests.integration.vllm_servers import MISSING, installed, vllm_server


def prompts(renderer: Any, count: int) -> tuple[list[list[int]], int]:
    """First prompts of `count` test tasks, and how many leading ids they share."""
    shop, rows, shared = target(), [], 0
    tasks = list(shop.tasks("test"))
    for task in (tasks * (count // len(tasks) + 1))[:count]:
        environment = shop.environment()
        first = environment.reset(task)
        talk = renderer.start(Prompt.of(environment), first.messages)
        rows.append(talk.ids)
        shared = talk.shared
    return rows, shared


@torch.inference_mode()
def generate(model: Any, rows: list[list[int]], tokens: int, pad: int) -> int:
    """Sample `tokens` for each row by transformers; the number of sampled tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=pad,
    )
    return int(out[:, width:].numel())


def lower(a: Floor, b: Floor) -> Floor:
    """The lower of two measurements, figure by figure."""
    times = (f.name for f in fields(Floor) if f.type == "float")
    return replace(a, **{name: min(getattr(a, name), getattr(b, name)) for name in times})


def play(base: Any, count: int, clock: Clock, split: str) -> tuple[float, Player, list[Trajectory]]:
    """Seconds of `count` whole episodes of the shop, their player, and what was played."""
    shop = target()
    tasks = list(shop.tasks(split))
    todo = [Episode(f"e{i}", tasks[i % len(tasks)], seed=i // len(tasks)) for i in range(count)]
    player = Player(shop.environment, base.policy, base.renderer, Sampling(0.3, 24), base.policy.rows)
    began = clock()
    played = list(player.play(todo))
    return clock() - began, player, played


def episodes(base: Any, count: int, clock: Clock) -> tuple[float, float, Any, int]:
    """Seconds of `count` whole episodes and of them in the environment, the work done, and sampled tokens."""
    policy = base.policy
    before, sampled = replace(policy.work), policy.sampled_tokens
    seconds, player, played = play(base, count, clock, "test")
    assert len(played) == count
    return seconds, player.environment_seconds, policy.work.since(before), policy.sampled_tokens - sampled


def against_vllm(base: Any, asked: list[Request], clock: Clock, repeats: int = 3) -> dict[str, list[float]]:
    """Seconds of the sampler and of vLLM's server for these turns, all with the same adapter, in turns."""
    turns = [replace(request, adapter="one") for request in asked]
    found: dict[str, list[float]] = {"sampler": []}
    with tempfile.TemporaryDirectory(prefix="rollout-") as name:
        folder = make_adapter(base.policy.model, Path(name) / "adapter", rank=16)
        base.policy.load_adapter("one", "one", folder)
        for kind, options in (("eager", ()), ("compiled", ("--no-enforce-eager",))):
            options = ("--max-num-seqs", str(len(turns)), *options)
            threads = torch.get_num_threads()
            with vllm_server(Path(name), max_loras=1, options=options, threads=threads) as running:
                server = VllmServer(running.url, "base", connections=len(turns))
                server.load("one", str(folder))
                ask(server, turns)  # its first requests compile, and read the instructions
                base.policy.generate(turns)
                for _ in range(repeats):
                    for side, play in (("sampler", base.policy.generate), (kind, partial(ask, server))):
                        began = clock()  # both keep the instructions that they have read
                        play(turns)
                        found.setdefault(side, []).append(clock() - began)
                server.close()
        base.policy.unload_adapter("one")
    return found


def ask(server: VllmServer, turns: list[Request]) -> None:
    """All turns at once, as many tokens each as it asks for."""

    def one(turn: Request) -> None:
        given: dict[str, Any] = {
            "model": turn.adapter,
            "prompt": list(turn.prompt),
            "max_tokens": turn.sampling.max_tokens,
        }
        given |= {"ignore_eos": True, "temperature": turn.sampling.temperature, "seed": turn.sampling.seed}
        assert len(server.complete(given).ids) == turn.sampling.max_tokens

    with ThreadPoolExecutor(len(turns)) as pool:
        list(pool.map(one, turns))


def main() -> None:
    from transformers import AutoModelForCausalLM

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--episodes", type=int, default=144)
    arguments.add_argument("--rows", type=int, default=48)
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    arguments.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments.add_argument("--vllm", action="store_true")
    given = arguments.parse_args()
    if given.vllm and not installed():
        raise SystemExit(MISSING)
    if given.vllm and given.clock != "wall":
        raise SystemExit("--vllm compares with another process: leave --clock at wall")
    clock = CLOCKS[given.clock]
    base = load_base(rows=given.rows, dtype=given.dtype)
    dtype, config = next(base.policy.model.parameters()).dtype, base.policy.model.config
    print(f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, {given.clock} time")

    kinds = (dtype,) if dtype == torch.float32 else (dtype, torch.float32)
    first = {kind: measure(config, kind, given.rows, clock) for kind in kinds}
    episodes(base, min(given.rows, given.episodes), clock)  # warm
    base.policy.free_buffers()
    seconds, environment, work, sampled = episodes(base, given.episodes, clock)
    floors = {kind: lower(first[kind], measure(config, kind, given.rows, clock)) for kind in kinds}
    print(
        f"{given.episodes} whole episodes, {given.rows} in flight: {seconds:.2f} s ({environment:.2f} environment), "
        f"{sampled} sampled tokens ({sampled / seconds:.0f}/s), {work.decoded} decoded, {work.prefilled} prefilled"
    )
    ratios = {}
    for kind, floor in floors.items():
        ratios[kind] = seconds / floor.seconds(work)
        print(
            f"floor in {floor.dtype}: {floor.seconds(work):.2f} s, ratio {ratios[kind]:.2f}; without attention's "
            f"products {floor.linear(work):.2f} s, ratio {seconds / floor.linear(work):.2f}"
        )

    rows, shared = prompts(base.renderer, given.rows)
    base.policy.stop_ids = frozenset()  # both sides sample the same number of tokens
    asked = [Request(f"r{i}", row, Sampling(0.7, given.tokens, seed=i), None, shared) for i, row in enumerate(rows)]
    plain = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=dtype).eval()
    base.policy.generate(asked[:2])
    generate(plain, rows[:2], 2, base.renderer.end_id)  # both are warm
    times: dict[str, list[float]] = {"sampler": [], "generate": []}
    for _ in range(2):
        base.policy.free_buffers()
        began = clock()
        base.policy.generate(asked)
        times["sampler"].append(clock() - began)
        began = clock()
        generate(plain, rows, given.tokens, base.renderer.end_id)
        times["generate"].append(clock() - began)
    total = given.tokens * len(rows)
    print(
        f"{len(rows)} prompts of {sum(map(len, rows)) // len(rows)} ids ({shared} shared), {given.tokens} tokens each:"
    )
    for name, found in times.items():
        print(f"{name:9} {total / min(found):8.0f} tokens/s")
    faster = min(times["generate"]) / min(times["sampler"])
    print(f"ratio     {faster:8.2f}")
    reached = faster >= 8 and ratios[torch.float32] <= 1.4
    if given.vllm:
        sides = {name: statistics.median(found) for name, found in against_vllm(base, asked, clock).items()}
        print(f"the same prompts with one adapter, {torch.get_num_threads()} threads each, median:")
        for name, seconds in sides.items():
            print(f"{name if name == 'sampler' else f'vLLM, {name}':14} {total / seconds:8.0f} tokens/s")
        ours = sides.pop("sampler")
        print(f"ratio          {min(sides.values()) / ours:8.2f}")
        reached = reached and min(sides.values()) >= 3 * ours
    raise SystemExit(0 if reached else 1)


if __name__ == "__main__":
    main()
