"""The one client of language models: whoever asks a model, asks through it.

Analyst, module writer, API policies and simulated users are given a client. It reserves each call against its one
spending cap, makes it, charges what it cost, and stores that under the call's purpose. Retries, schemas and roles are
the callers'.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace

from errors import ProviderError
from models.providers.litellm_client import CallFailed, Completion, ModelCall, price_of, send
from models.providers.spending import SpendingCap, SpendLog, Spent, most_prompt_tokens, most_tokens

# What is reserved for the reply to a call that sets no limit of its own.
UNLIMITED_TOKENS = 1024
# What the client's thread may take beyond a call's own seconds: LiteLLM is imported there.
GRACE_SECONDS = 60.0


class ModelClient:
    """Calls language models within `cap` (none by default) and stores in `log`, if there is one, what each call cost.

    Safe to use from any thread, also from inside an event loop. Its thread starts with the first call. `closed` tells
    those who would try a call again that nobody waits for it any more. `before` is called before each call, and may
    refuse it by an error of its own.
    """

    def __init__(
        self, cap: SpendingCap | None = None, log: SpendLog | None = None, before: Callable[[], object] = bool
    ) -> None:
        self.cap, self.log, self._before = cap or SpendingCap(), log, before
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def complete(self, call: ModelCall) -> Completion:
        """The reply to one call.

        Raises `BudgetExceeded` before a call that may pass the cap, `CallFailed` when the provider fails, and
        `ConfigurationError` for a missing key. A call that failed counts as a call and costs nothing; a reply of which
        the server tells no tokens costs the upper estimate of its text and of the prompt.
        """
        self._before()
        most, cost, began = most_prompt_tokens(call.messages, call.tools), Spent(calls=1), 0.0
        try:
            with self.cap.call(call.model, most, call.max_tokens or UNLIMITED_TOKENS, call.price) as charge:
                began = time.monotonic()
                reply = _told(call, self._wait_for(call), most)
                cost = Spent(1, reply.prompt_tokens, reply.sampled_tokens, reply.dollars)
                charge(cost)
                return reply
        finally:
            if self.log is not None and began:
                self.log.add(call.purpose, call.model, cost, time.monotonic() - began)

    def close(self) -> None:
        """End what is under way and stop the client's thread; safe to call again."""
        self.closed.set()
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=5)
            if not thread.is_alive():
                loop.close()

    def _wait_for(self, call: ModelCall) -> Completion:
        future = asyncio.run_coroutine_threadsafe(send(call), self._running_loop())
        try:
            return future.result(call.seconds + GRACE_SECONDS)
        except TimeoutError as error:  # what keeps the thread busy ends in no call: nothing else would end the wait
            raise CallFailed.overdue(call) from error
        except CancelledError:
            raise ProviderError(f"{call.model}: stopped before the answer; run again", transient=True) from None
        finally:  # also when a deadline interrupts the wait: nobody would take the answer
            future.cancel()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for the client's life: LiteLLM keeps connections per loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="models", daemon=True)
                self._thread.start()
            return self._loop


def _told(call: ModelCall, reply: Completion, prompt: int) -> Completion:
    """The reply with tokens and dollars also where its server tells none: counted as nothing, no cap would ever hold.
    `prompt` is the upper estimate of the prompt's tokens."""
    if not reply.finish or reply.prompt_tokens or reply.sampled_tokens:
        return reply
    sampled = most_tokens("".join([reply.content, *(part for c in reply.calls for part in (c.name, c.arguments))]))
    rates = call.price or price_of(call.model) or (0.0, 0.0)
    dollars = reply.dollars or (prompt * rates[0] + sampled * rates[1]) / 1e6
    return replace(reply, prompt_tokens=prompt, sampled_tokens=sampled, dollars=dollars)


async def _cancel_others() -> None:
    """End what runs in this loop besides: LiteLLM leaves a logging task behind that a closed loop would break."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
