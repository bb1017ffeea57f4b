"""Text that is read as its ids come is what all of them spell together, and costs no more for being long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.renderer import Renderer
from models.serving.openai_api.turn_reader import TurnReader
from tests.tokenizers_trained import chatml_tokenizer, header_tokenizer, metaspace_tokenizer

RENDERERS = {make.__name__: Renderer(make()) for make in (chatml_tokenizer, header_tokenizer, metaspace_tokenizer)}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(RENDERERS)),
    st.lists(st.text("aé漢☃👩‍🚀\ufffd \n", max_size=4) | st.integers(0, 299) | st.just("<|im_end|>"), max_size=20),
    st.integers(1, 3),
)
def test_text_read_id_by_id_is_what_all_ids_spell(name: str, said: list[str | int], step: int) -> None:
    """Broken characters (ids by number) and special tokens among them."""
    renderer = RENDERERS[name]
    ids = [i for one in said for i in ([one] if isinstance(one, int) else renderer.tokenizer.encode(one))]
    reader = TurnReader(renderer, plain=True)
    told = ""
    for at in range(0, len(ids), step):
        told += reader.feed(ids[at : at + step])
        assert reader._spelled() == renderer.text_of(ids[: at + step])
    assert told + reader.finish()[1] == renderer.text_of(ids)


@pytest.mark.parametrize(
    ("stop", "text", "content"),
    [
        (("\n\n", "\n###\n\n"), "Hello\n###\n\nmore", "Hello"),
        (("\n---", "Q:\nUser:"), "Fine. Q:\nUser: more", "Fine. "),
        (("Erklärung：结果",), "Gut. Erklärung：结果 ja", "Gut. "),
        (("é漢x",), "Fine. é漢y", "Fine. é漢y"),
    ],
)
def test_a_stream_shows_nothing_of_a_stop_text(stop: tuple[str, ...], text: str, content: str) -> None:
    """Also where another one begins at its end, and while the bytes of a character in it are still to come."""
    renderer = RENDERERS["chatml_tokenizer"]
    reader, told = TurnReader(renderer, stop=stop), ""
    for one in renderer.text_ids(text):
        told += reader.feed([one])
        if reader.stopped:
            break
    action, rest = reader.finish()
    assert (told + rest, action.content) == (content, content)


def test_a_long_turn_is_not_spelled_anew_for_each_of_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = RENDERERS["chatml_tokenizer"]
    spelled: list[int] = []
    text_of = renderer.text_of

    def counted(ids: Sequence[int]) -> str:
        spelled.append(len(ids))
        return text_of(ids)

    monkeypatch.setattr(renderer, "text_of", counted)
    reader = TurnReader(renderer)
    ids = renderer.text_ids("Order 5 is 漢字☃. " * 20)
    for one in ids:
        reader.feed([one])
    assert sum(spelled) < 4 * len(ids)
