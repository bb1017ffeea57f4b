"""Turns on several vLLM servers: how many a second, what they cost this process, and how long a lost server is felt.

    python -m benchmarks.replicas [--per-second 250] [--turns 2000] [--stall-seconds 2]

The servers are stubs in processes of their own, each of which answers `--per-second` turns at most (16 at once), as one
GPU would; what is measured is this side. *ms*: processor time a turn, of this process alone. *silence*: the longest
time without any answer, and *longest*: the longest that a turn took, in seconds. *same*: all sampled tokens are those
that a server samples alone. Servers are killed and stopped (SIGKILL, SIGSTOP) while turns wait on them.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
from collections.abc import Callable
from itertools import pairwise

from models.policy import Generation, PolicyIdentity, Request
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from tests.models.vllm_backend.stub_episodes import Episodes
from tests.models.vllm_backend.stub_processes import StubProcess, stub_processes

SLOTS, CONCURRENCY, TURNS = 16, 128, 10
Losses = dict[int, Callable[[], None]]


class Timed(VllmPolicy):
    """A policy that keeps when turns were answered and how long they took."""

    def watch(self) -> Timed:
        self.sent, self.times, self.took = dict[str, float](), [time.perf_counter()], list[float]()
        return self

    def submit(self, request: Request) -> None:
        self.sent[request.session] = time.perf_counter()
        super().submit(request)

    def poll(self) -> list[Generation]:
        found = super().poll()
        self.times.append(time.perf_counter())
        self.took += [self.times[-1] - self.sent[answer.session] for answer in found]
        return found


def play(name: str, stubs: list[StubProcess], turns: int, stall_seconds: float, losses: Losses) -> None:
    """Play episodes on `stubs`, with `losses` by the number of turns before them, and print a row."""
    servers = [VllmServer(s.url, "base", connections=CONCURRENCY) for s in stubs]
    policy = Timed(servers, PolicyIdentity("stub", "1"), frozenset(), CONCURRENCY, stall_seconds=stall_seconds)

    def answered(number: int) -> None:
        if number in losses:
            losses[number]()

    episodes = Episodes(turns // TURNS, TURNS)
    began, processor = time.perf_counter(), time.process_time()
    same = episodes.play(policy.watch(), answered) == episodes.expected()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    silence, peak = max(b - a for a, b in pairwise(policy.times)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{name:<28} {turns / seconds:>8.0f} {1000 * processor / turns:>6.2f} {peak / 1024:>9.0f} {silence:>8.2f} "
        f"{max(policy.took):>8.2f} {'yes' if same else 'NO':>5}",
        flush=True,
    )
    for stub in stubs:
        stub.go_on()
    policy.close()


def main() -> None:
    """Print a row for 1, 2 and 4 servers, and one for 4 of which three are lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-second", type=float, default=250.0)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--stall-seconds", type=float, default=2.0)
    given = parser.parse_args()
    logging.getLogger("trace.models").setLevel(logging.ERROR)  # that servers are lost is meant here
    seconds = SLOTS / given.per_second
    print(f"{given.per_second:.0f} turns/s a server at most, {CONCURRENCY} in flight, stall {given.stall_seconds} s")
    print(f"{'servers':<28} {'turns/s':>8} {'ms':>6} {'peak MiB':>9} {'silence':>8} {'longest':>8} {'same':>5}")
    for count in (1, 2, 4):
        with stub_processes(count, seconds, SLOTS) as stubs:
            play(str(count), stubs, given.turns * count // 4, given.stall_seconds, {})
    lost: dict[str, Callable[[list[StubProcess]], Losses]] = {
        "4, one killed": lambda s: {half: s[0].kill},
        "4, one stalled": lambda s: {half: s[0].stall},
        "4, two killed, one stalled": lambda s: {half // 2: s[0].kill, half: s[1].stall, 3 * half // 2: s[2].kill},
    }
    half = given.turns // 2
    for name, losses in lost.items():
        with stub_processes(4, seconds, SLOTS) as stubs:
            play(name, stubs, given.turns, given.stall_seconds, losses(stubs))


if __name__ == "__main__":
    main()
