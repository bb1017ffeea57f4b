"""The tokens of an answer that a server sends: of a stream part by part, as a client may leave before the server has
told their sum, and of one that comes whole.

A server is asked to count as it goes (vLLM's `stream_options.continuous_usage_stats`), so that each part says what
was read and sampled up to it. One that counts only at the end, or never, is counted here as well as it can be: each
part with anything in it is a token, and the prompt has one for every four bytes of the request. Its own sum, where it
comes, replaces that. A whole answer without a count has a token for every four bytes, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from models.serving.openai_api.requests import Usage

# What tokenizers of today make of English, and of a request's JSON around it.
BYTES_A_TOKEN = 4


def usage_of(body: Mapping[str, Any]) -> Usage | None:
    """What a server says of the tokens of an answer, or of a part of one; None where it says nothing. What is no number
    of tokens counts as 0: it would be added to quotas and metrics."""
    usage = body.get("usage")
    if not usage or not isinstance(usage, Mapping):
        return None
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def whole_usage(body: Mapping[str, Any], size: int) -> Usage:
    """The tokens of an answer that came whole to a request of `size` bytes: what the server says of them, and else what
    they come to by their bytes."""
    told, prompt = usage_of(body), size // BYTES_A_TOKEN
    if told is not None:
        return Usage(told.prompt or prompt, told.completion)
    return Usage(prompt, sum(map(_bytes_said, body.get("choices") or ())) // BYTES_A_TOKEN)


def _bytes_said(choice: Mapping[str, Any]) -> int:
    """Bytes of an answer's text, thoughts and calls."""
    message = choice.get("message") or {"text": choice.get("text")}
    said = [value for name, value in message.items() if name != "role" and value]
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in said)
    return sum(len(text.encode(errors="replace")) for text in texts)


def _count(told: Any) -> int:
    return told if isinstance(told, int) and told > 0 else 0


class StreamUsage:
    """One stream. `size` is the request's, in bytes. `running`: the server counts as it goes."""

    def __init__(self, size: int) -> None:
        self.running = False
        self._prompt = size // BYTES_A_TOKEN
        self._sum: Usage | None = None
        # By choice: parts that came with something in them, and tokens that the server has told.
        self._parts, self._told = Counter[int](), dict[int, int]()

    def add(self, chunk: Mapping[str, Any]) -> Usage:
        """The tokens up to and with this part."""
        choices = list(chunk.get("choices") or ())
        for choice in choices:
            self._parts[_index(choice)] += _says_something(choice)
        told = usage_of(chunk)
        if told is not None:
            self._prompt = told.prompt or self._prompt  # a server may count what it sampled alone
            if len(choices) == 1:  # a count of this choice alone: a client may have asked for several
                self._told[_index(choices[0])] = told.completion
                self.running = self.running or not choices[0].get("finish_reason")
            else:
                self._sum = Usage(self._prompt, told.completion)
        return self._sum or Usage(self._prompt, sum({**self._parts, **self._told}.values()))


def _index(choice: Mapping[str, Any]) -> int:
    return int(choice.get("index") or 0)


def _says_something(choice: Mapping[str, Any]) -> bool:
    """Whether a part holds text, thoughts or some of a call: the first says a role alone, the last a reason alone."""
    delta = choice.get("delta") or {"text": choice.get("text")}
    return any(value for name, value in delta.items() if name != "role")
