"""Answers that no vLLM server gives: what stands at the address is something else, and the error says so."""

from __future__ import annotations

from typing import Any

import pytest

from errors import PolicyError, ProviderError
from models.vllm.answers import read_completion

GOOD = {"token_ids": [5, 7], "logprobs": {"token_logprobs": [-0.5, -1]}, "finish_reason": "stop"}


def test_a_completion_is_read() -> None:
    read = read_completion("http://gpu-1", "base", {"model": "base", "choices": [GOOD]})
    assert (read.ids, read.logprobs, read.stopped) == ((5, 7), (-0.5, -1.0), True)


@pytest.mark.parametrize("choices", [None, {}, [], [GOOD, GOOD], ["Done."], [None], [[GOOD]]])
def test_choices_that_are_none(choices: Any) -> None:
    with pytest.raises(ProviderError, match="as choices, not 1; a vLLM server is needed"):
        read_completion("http://gpu-1", "base", {"model": "base", "choices": choices})


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": None},
        {"token_ids": 5},
        {"token_ids": ["5", "7"]},
        {"token_ids": [5]},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"logprobs": None},
        {"logprobs": [-0.5, -1.0]},
        {"logprobs": {"token_logprobs": -0.5}},
        {"logprobs": {"token_logprobs": ["-0.5", {}]}},
    ],
)
def test_a_choice_without_a_log_probability_for_each_token(wrong: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="not one for each token; a vLLM server of version"):
        read_completion("http://gpu-1", "base", {"model": "base", "choices": [GOOD | wrong]})
