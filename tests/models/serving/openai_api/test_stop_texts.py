"""Texts that a client wants a turn to end at."""

from __future__ import annotations

from typing import Any

import pytest

from models.renderer import Renderer
from models.serving.openai_api.turn_reader import TurnReader


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (("END", "never"), "one EN two END three", "one EN two "),
        (("two END", "wo"), "one two END three", "one t"),  # the longer one begins first, and is whole later
        (("wo END three", "two END"), "one two END three", "one "),
        (("wo", "two"), "one two", "one "),  # both are whole at once: all of it
    ],
)
def test_a_turn_ends_at_the_first_text_that_is_whole_streamed_or_not(
    tiny_tokenizer: Any, stop: tuple[str, ...], text: str, shown: str
) -> None:
    renderer = Renderer(tiny_tokenizer)
    ids = renderer.text_ids(text)
    reader, told = TurnReader(renderer, (), stop), list[str]()
    for i in ids:
        told.append(reader.feed([i]))
        if reader.stopped:
            break
    assert reader.stopped
    assert "".join(told) + reader.finish()[1] == shown
    whole = TurnReader(renderer, (), stop)
    whole.complete(ids)
    assert (whole.finish()[1], whole.stopped) == (shown, True)
