"""What a model computed, counted in tokens: the yardstick of `benchmarks/floor.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass
class Work:
    """Counts since the start of the process.

    `decoded` and `prefilled` tokens went through all layers, one new token to a row or several; `heads` are rows of
    the head. `trained_forward` and `trained_backward` are tokens times layers of the training pass, `trained_heads`
    rows of the head with their gradient. `seen_...` are the pairs of a token and one that it attends to (itself among
    them, windows left out of account), times layers where the tokens are.
    """

    decoded: int = 0
    prefilled: int = 0
    heads: int = 0
    trained_forward: int = 0
    trained_backward: int = 0
    trained_heads: int = 0
    seen_decoding: int = 0
    seen_prefilling: int = 0
    seen_forward: int = 0
    seen_backward: int = 0

    def count(self, rows: Iterable[tuple[int, int]]) -> None:
        """Add a pass over rows, of each of which so many tokens were there before and so many are new, and whose last
        one goes through the head."""
        for start, new in rows:
            seen = new * start + new * (new + 1) // 2
            self.heads += 1
            if new == 1:
                self.decoded += 1
                self.seen_decoding += seen
            else:
                self.prefilled += new
                self.seen_prefilling += seen

    def count_trained(self, tokens: int, seen: int, layers: int, back: int) -> None:
        """Add a training pass over tokens that attend to so many, forward through `layers` and back through `back`."""
        self.trained_forward += tokens * layers
        self.seen_forward += seen * layers
        self.trained_backward += tokens * back
        self.seen_backward += seen * back

    def since(self, before: Work) -> Work:
        """What was added to `before`."""
        now, then = asdict(self), asdict(before)
        return Work(**{name: now[name] - then[name] for name in now})
