"""One cap on what language models cost: calls, tokens and dollars, and no call that may pass any of them.

The cost of a call is known when it has been answered, so each one is reserved at an upper estimate before it is made
and charged afterwards. A call that would pass the cap waits while others are under way, for they may turn out cheaper
than reserved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from environments.contract import canonical_json
from errors import BudgetExceeded, ConfigurationError
from models.providers.litellm_client import price_of

# What a cap says when it refuses a call, by who set it.
OF_ROUND = (
    "the next call may bring the round's {what} to {total:.6g}, over the cap of {limit:.6g} ({spent:.6g} spent or "
    "under way); raise the cap and run again: what was answered is kept"
)
OF_WATCH = (
    "the next call may bring the watch's {what} to {total:.6g}, over the cap of {limit:.6g} ({spent:.6g} spent or "
    "under way); raise analyst.{setting} and watch again: what was played is kept"
)
OF_EVALUATION = (
    "the next call of {model} may cost ${more:.4g} and ${spent:.4g} of the cap of ${limit:g} are spent; the same "
    "command with a higher --max-cost goes on from here"
)


@dataclass
class Spent:
    """What calls cost; tokens are those of prompts and those sampled."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0

    def add(self, other: Spent) -> None:
        """Add the cost of other calls."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.sampled_tokens += other.sampled_tokens
        self.dollars += other.dollars


@dataclass(frozen=True)
class Limits:
    """The most that may be spent: calls, tokens (prompts and replies together), dollars. None is no limit. Raises
    `ConfigurationError` for what is no number from 0 on: not a number is no less than what was spent, ever."""

    calls: int | None = None
    tokens: int | None = None
    dollars: float | None = None

    def __post_init__(self) -> None:
        for what, most in vars(self).items():
            if most is not None and not most >= 0:
                raise ConfigurationError(f"a limit of {most!r} {what} is none; give a number from 0 on")


class SpendLog(Protocol):
    """Where the cost of each call is stored."""

    def add(self, purpose: str, model: str, cost: Spent, seconds: float) -> None: ...


def most_tokens(text: str) -> int:
    """An upper estimate of a text's tokens: a token per two ASCII characters and per byte of any other."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return ascii_characters // 2 + len(text.encode("utf-8", "replace")) - ascii_characters + 1


def most_prompt_tokens(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """An upper estimate of a prompt's tokens, from its messages and tool schemas as JSON."""
    return most_tokens(canonical_json([list(messages), list(tools)]))


class SpendingCap:
    """Counts the calls of any number of models and holds all of them together to `limits`; `before` is spent already.

    `spent` has the answered calls by model. A `refusal` (`OF_ROUND`, ...) is what a refused caller reads.
    `elsewhere` says what others have spent under the same limits; it is asked again before each call, so that only what
    is under way in other processes at that moment can pass them. Safe to use from several threads.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        before: Spent | None = None,
        refusal: str = OF_EVALUATION,
        elsewhere: Callable[[], Spent] = Spent,
    ) -> None:
        self.limits, self.before, self.refusal = limits or Limits(), before or Spent(), refusal
        self._elsewhere = elsewhere
        self.spent: dict[str, Spent] = {}
        # Calls that were made count whether they were answered or not.
        self._made = self._under_way = self._reserved_tokens = 0
        self._reserved_dollars = 0.0
        self._changed = threading.Condition()

    @property
    def dollars(self) -> float:
        """Dollars spent here, those `before` included."""
        with self._changed:
            return self.before.dollars + sum(s.dollars for s in self.spent.values())

    @property
    def tokens(self) -> int:
        """Tokens spent here, those `before` included."""
        with self._changed:
            return sum(s.prompt_tokens + s.sampled_tokens for s in (self.before, *self.spent.values()))

    def settle(self) -> None:
        """Begin to count anew; what was spent still counts against the cap."""
        with self._changed:
            self.before.calls += self._made - sum(s.calls for s in self.spent.values())
            for sums in self.spent.values():
                self.before.add(sums)
            self.spent, self._made = {}, 0

    def require_price(self, model: str, given: tuple[float, float] | None = None, option: str = "--price") -> None:
        """Raise `ConfigurationError` when there is a cap in dollars and no price to hold it with; `option` gives it."""
        if self.limits.dollars is not None and given is None and price_of(model) is None:
            raise ConfigurationError(
                f"a cap of ${self.limits.dollars:g} cannot be held: LiteLLM has no price for {model}; give {option} "
                "PROMPT,SAMPLED in dollars per million tokens (0,0 for a server of your own), or leave --max-cost out"
            )

    @contextmanager
    def call(
        self, model: str, prompt_tokens: int, sampled_tokens: int, price: tuple[float, float] | None = None
    ) -> Iterator[Callable[[Spent], None]]:
        """Reserve a call of at most so many tokens; the body calls what it is given with what the call has cost.

        `price` is dollars per million (prompt, sampled) tokens, needed where LiteLLM's table lacks the model. Raises
        `BudgetExceeded` before a call that may pass the cap."""
        rates = price or price_of(model) or (0.0, 0.0)
        tokens = prompt_tokens + sampled_tokens
        dollars = (prompt_tokens * rates[0] + sampled_tokens * rates[1]) / 1e6
        self._reserve(model, tokens, dollars)
        try:
            yield lambda cost: self._charge(model, cost)
        finally:
            with self._changed:
                self._under_way -= 1
                self._reserved_tokens -= tokens
                # Sums of fractions leave a remainder, and nothing may be reserved when nothing is under way.
                self._reserved_dollars = self._reserved_dollars - dollars if self._under_way else 0.0
                self._changed.notify_all()

    def _reserve(self, model: str, tokens: int, dollars: float) -> None:
        with self._changed:
            while over := self._over(tokens, dollars):
                if over["what"] == "calls" or not self._under_way:
                    raise BudgetExceeded(self.refusal.format(model=model, **over))
                self._changed.wait()
            self._made += 1
            self._under_way += 1
            self._reserved_tokens += tokens
            self._reserved_dollars += dollars

    def _over(self, tokens: int, dollars: float) -> dict[str, Any]:
        """Which limit one more call may pass, as the fields of a refusal; {} for none."""
        if self.limits == Limits():
            return {}
        others = self._elsewhere()
        read = others.prompt_tokens + others.sampled_tokens
        for what, spent, more, limit in (
            ("calls", self.before.calls + others.calls + self._made, 1, self.limits.calls),
            ("tokens", self.tokens + read + self._reserved_tokens, tokens, self.limits.tokens),
            ("dollars", self.dollars + others.dollars + self._reserved_dollars, dollars, self.limits.dollars),
        ):
            if limit is not None and spent + more > limit:
                setting = "max_total_tokens" if what == "tokens" else f"max_{what}"
                found = {"what": what, "spent": spent, "more": more, "total": spent + more, "limit": limit}
                return found | {"setting": setting}
        return {}

    def _charge(self, model: str, cost: Spent) -> None:
        with self._changed:
            self.spent.setdefault(model, Spent()).add(cost)
