"""What calls of paid models cost, and a cap that no call may pass.

The cost of a call is known when it has been answered, so each one is reserved with an estimate before it is made. A
call that would pass the cap waits while others are under way, for they may turn out cheaper than reserved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from environments.contract import canonical_json
from errors import BudgetExceeded, ConfigurationError
from models.providers.litellm_client import litellm_modules, price_of

# Text and JSON of tool schemas have 3.5 to 4.5 characters a token; fewer make the estimate an upper one.
CHARACTERS_PER_TOKEN = 3
# What a call of a simulated user may answer, which has no limit of its own.
USER_TOKENS = 1024


@dataclass
class Spent:
    """Sums over the calls of one model."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0


def most_tokens(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Tokens that a prompt will hardly exceed."""
    return len(canonical_json([list(messages), list(tools)])) // CHARACTERS_PER_TOKEN + 16 * len(messages)


class SpendingCap:
    """Counts the calls of several models and holds them to `cap` dollars (None: no cap), `before` of which are spent.

    A `price` is dollars per million (prompt, sampled) tokens; it is needed where LiteLLM's table lacks a model. Safe to
    use from several threads."""

    def __init__(self, cap: float | None = None, before: float = 0.0) -> None:
        self.cap, self.before = cap, before
        self.spent: dict[str, Spent] = {}
        self._reserved = 0.0
        self._changed = threading.Condition()

    @property
    def dollars(self) -> float:
        """Dollars spent, those `before` included."""
        return self.before + sum(s.dollars for s in self.spent.values())

    def settle(self) -> None:
        """Begin to count anew; what was spent still counts against the cap."""
        with self._changed:
            self.before, self.spent = self.dollars, {}

    def require_price(self, model: str, given: tuple[float, float] | None = None) -> None:
        """Raise `ConfigurationError` when there is a cap and no price to hold it with."""
        if self.cap is not None and given is None and price_of(model, None, None) is None:
            raise ConfigurationError(
                f"a cap of ${self.cap:g} cannot be held: LiteLLM has no price for {model}; give --price PROMPT,SAMPLED "
                "in dollars per million tokens (0,0 for a server of your own), or leave --max-cost out"
            )

    @contextmanager
    def call(
        self, model: str, prompt_tokens: int, sampled_tokens: int, price: tuple[float, float] | None = None
    ) -> Iterator[Callable[[Any], None]]:
        """Reserve a call of at most so many tokens; the body calls what it is given with LiteLLM's response.

        Raises `BudgetExceeded` before a call that may pass the cap."""
        rates = price or price_of(model, None, None) or (0.0, 0.0)
        most = (prompt_tokens * rates[0] + sampled_tokens * rates[1]) / 1e6
        with self._changed:
            while self.cap is not None and self.dollars + self._reserved + most > self.cap:
                if not self._reserved:
                    raise BudgetExceeded(
                        f"the next call of {model} may cost ${most:.4g} and ${self.dollars:.4g} of the cap of "
                        f"${self.cap:g} are spent; the same command with a higher --max-cost goes on from here"
                    )
                self._changed.wait()
            self._reserved += most
        try:
            yield lambda response: self._charge(model, response, price)
        finally:
            with self._changed:
                self._reserved = max(0.0, self._reserved - most)
                self._changed.notify_all()

    @contextmanager
    def user_call(self, model: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Callable[[Any], None]]:
        """The same for a call of the model that plays the simulated user (`simulated_user.Meter`)."""
        with self.call(model, most_tokens(messages), USER_TOKENS) as charge:
            yield charge

    def _charge(self, model: str, response: Any, price: tuple[float, float] | None) -> None:
        usage = getattr(response, "usage", None)
        prompt = int(getattr(usage, "prompt_tokens", 0) or 0)
        sampled = int(getattr(usage, "completion_tokens", 0) or 0)
        dollars = _cost(model, response, prompt, sampled, price)
        with self._changed:
            sums = self.spent.setdefault(model, Spent())
            sums.calls += 1
            sums.prompt_tokens += prompt
            sums.sampled_tokens += sampled
            sums.dollars += dollars


def _cost(model: str, response: Any, prompt: int, sampled: int, price: tuple[float, float] | None) -> float:
    """Dollars of a response: LiteLLM's own count (it knows cached tokens), or the given price, or 0 where unknown."""
    if price is not None:
        return (prompt * price[0] + sampled * price[1]) / 1e6
    if price_of(model, None, None) is None:
        return 0.0
    litellm, _ = litellm_modules()
    return float(litellm.completion_cost(completion_response=response, model=model))
