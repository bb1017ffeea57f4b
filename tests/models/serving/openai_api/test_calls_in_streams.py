"""A stream says what the whole answer says: the same text around the same calls."""

from __future__ import annotations

import pytest

from models.renderer import Renderer
from models.serving.openai_api.requests import parse_chat
from models.serving.openai_api.turn_reader import TurnReader
from tests.tokenizers_trained import chatml_tokenizer

CALL = '<tool_call>{"name": "refund", "arguments": {"order": 7}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "refund", "parameters": {"properties": {"order": {}}}}}
RENDERER = Renderer(chatml_tokenizer(), "json")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CALL, ""),
        (f"One moment.\n{CALL}", "One moment."),
        (f"{CALL}\nIt is on its way.", "It is on its way."),
        (f" \nFirst.\n{CALL} then {CALL}", "First.\n then"),
        (f"Both: {CALL}{CALL} 漢 done. \n", "Both:  漢 done."),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 500])
def test_a_stream_loses_no_text_around_a_call(text: str, content: str, step: int) -> None:
    reader, ids = TurnReader(RENDERER, [TOOL]), RENDERER.text_ids(text)
    told = "".join(reader.feed(ids[at : at + step]) for at in range(0, len(ids), step))
    action, rest = reader.finish()
    assert len(action.tool_calls) == text.count(CALL)
    assert action.content == content
    assert (told + rest).strip() == content


def test_a_client_that_takes_one_call_a_turn_gets_the_first() -> None:
    asked = parse_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": False})
    reader = TurnReader(RENDERER, [TOOL], one_call=asked.one_call)
    told = reader.feed(RENDERER.text_ids(f"Both: {CALL}{CALL.replace('7', '8')}"))
    action, rest = reader.finish()
    assert [call.arguments for call in action.tool_calls] == [{"order": 7}]
    assert (told + rest).strip() == "Both:"
