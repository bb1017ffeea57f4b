"""Which of several servers gets a request: sessions keep to a server while it answers, and move when it is lost.

A session's conversation lies in the prefix cache of the server that answered it, so its next turn goes there again; a
new session goes to the server with the fewest requests under way. Each server has a circuit breaker: after failures
in a row, or at once where nobody is there, it gets no requests, until it was tried again.

One event loop uses it; nothing here waits or asks. Rollouts (`models/vllm/turns.py`) and the gateway
(`models/serving/upstreams/pool.py`) share it. The circuit-breaker libraries wrap the call: they say yes or no to one
server, and neither choose among several nor hold back a server until its adapters are proven.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# Failures in a row that open a circuit.
FAILURES = 3
# Seconds until an open circuit may be tried; twice as long each time that it fails again.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
# A session leaves a server that has more than twice as many requests under way as the least busy one, and these.
SLACK = 8
# Sessions whose server is remembered; the one that asked longest ago is forgotten first.
SESSIONS = 100_000


@dataclass
class Circuit:
    """Of one server. `again` is when it may be tried (by the clock), None while it is closed, that is, in use; `opened`
    is how often it was opened."""

    busy: int = 0
    failures: int = 0
    opened: int = 0
    again: float | None = None
    pause: float = 0.0


class Balance:
    """The servers by address, with what was seen of them."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.circuits = {address: Circuit() for address in addresses}
        self._homes: dict[str, str] = {}
        self._clock = clock

    @property
    def used(self) -> list[str]:
        """Addresses whose circuit is closed."""
        return [address for address, circuit in self.circuits.items() if circuit.again is None]

    def choose(self, session: str, among: Collection[str], trials: bool = False) -> str | None:
        """The server for a session's next request ("" has none that it keeps to); None when none of `among` is in use.
        `trials`: an open circuit whose pause is over is tried with this request, and with no other for as long again.
        """
        if trials and (due := next((a for a in among if self._due(a)), None)) is not None:
            circuit = self.circuits[due]
            circuit.again = self._clock() + circuit.pause
            return due
        left = [a for a in among if self.circuits[a].again is None]
        if not left:
            return None
        # Servers that are equally busy are told apart by a hash, so that sessions spread over them.
        free = min(left, key=lambda a: (self.circuits[a].busy, _rank(session, a)))
        home = self._homes.pop(session, None)
        if home not in left or self.circuits[home].busy > 2 * self.circuits[free].busy + SLACK:
            home = free
        if session:
            self._homes[session] = home
            if len(self._homes) > SESSIONS:
                del self._homes[next(iter(self._homes))]
        return home

    def forget(self, session: str) -> None:
        """The session is over."""
        self._homes.pop(session, None)

    def answered(self, address: str) -> None:
        """A request was answered: the circuit is closed."""
        circuit = self.circuits[address]
        circuit.failures, circuit.again, circuit.pause = 0, None, 0.0

    def failed(self, address: str) -> bool:
        """A request failed; whether that is one too many."""
        self.circuits[address].failures += 1
        return self.circuits[address].failures >= FAILURES

    def open(self, address: str, since: int | None = None) -> None:
        """The server is not used before its pause is over. `since` is what `opened` was when the request began that
        failed: what was under way when another opened the circuit says nothing new, and makes no pause longer."""
        circuit = self.circuits[address]
        if since not in (None, circuit.opened):
            return
        circuit.opened += 1
        circuit.pause = min(max(FIRST_PAUSE, 2 * circuit.pause), LONGEST_PAUSE)
        circuit.again = self._clock() + circuit.pause

    def _due(self, address: str) -> bool:
        again = self.circuits[address].again
        return again is not None and again <= self._clock()


def _rank(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session} {address}".encode(), digest_size=8).digest()
