"""Replies that no honest server gives, and some give all the same: they cost neither the night nor the cap."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel

from db import ReplyRow
from models.providers.analyst import Analyst, AnalystSettings, Question, unfenced
from models.providers.client import ModelClient
from models.providers.spending import OF_ROUND, SpendingCap
from tests.models.providers.scripted_analyst import ScriptedAnalyst, good


class Word(BaseModel):
    answer: str


class Nowhere:
    """A cache that keeps nothing."""

    def get(self, request_hash: str) -> ReplyRow | None:
        return None

    def put(self, row: ReplyRow) -> None:
        return None


@contextmanager
def analyst(step: Mapping[str, Any], **given: Any) -> Iterator[Analyst]:
    """An analyst whose server gives the same reply to everything."""
    with ScriptedAnalyst(lambda number, request: dict(step)) as server:
        settings = AnalystSettings(
            **{
                "model": "hosted_vllm/scripted", "api_base": server.api_base, "backoff_seconds": 0.01, "max_tokens": 64,
                "attempts": 2, "prompt_price": 1.0, "sampled_price": 2.0, **given,
            }
        )  # fmt: skip
        opened = Analyst(settings, ModelClient(SpendingCap(settings.limits, None, OF_ROUND)), Nowhere())
        try:
            yield opened
        finally:
            opened.close()
            opened.client.close()


def question() -> Question[Word]:
    return Question("contrast", [{"role": "user", "content": "Say yes."}], Word)


@pytest.mark.parametrize("blanks", [" ", "\n", "\t "])
def test_a_long_run_of_blanks_in_a_fenced_reply_is_read_at_once(blanks: str) -> None:
    """Models fall into it, and within 8,192 tokens it may have a hundred thousand characters."""
    body = '{"answer": "yes"' + 20_000 * blanks + "}"
    began = time.process_time()
    assert unfenced(f"```json\n{body}\n```\n") == f"{body}\n"
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("a ```b``` c", "a ```b``` c"), (" ```\na\n``` ", "a\n"), ("```json\na\n", "a"), ("```a\n b``` ```", "b``` "),
        ("```", ""), ("``````", ""), ("`````", "``"), ("", ""),
    ],
)  # fmt: skip
def test_only_a_fence_around_the_whole_is_taken_off(text: str, inner: str) -> None:
    assert unfenced(text) == inner


def test_half_a_character_in_a_reply_is_no_outage() -> None:
    """The request for a repair could not hold it: it failed, in every try, as one that may be answered later."""
    with analyst(good('{"answer": "well done \ud83d"}'), model="openai/scripted") as asked:
        assert asked.ask(question()).value.answer == "well done ?"


def test_tokens_below_zero_give_nothing_back_to_the_cap() -> None:
    with analyst(good({"answer": "yes"}, prompt_tokens=-(10**6), sampled_tokens=-5), max_dollars=1.0) as asked:
        asked.ask(question())
        assert asked.client.cap.tokens > 0
        assert asked.client.cap.dollars > 0
