"""Pieces of a text for a tokenizer that puts a blank of its own before what it encodes, as Llama 2's and Mistral's do.

Such a tokenizer cuts a text at its markers, and puts the blank before the first part, or before every one. Pieces that
it encoded one by one would have blanks in the middle of a text. So they are encoded without, and the blank is written
where the text as a whole has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

BLANK = "\u2581"  # as the vocabularies of SentencePiece write it


class Piece(NamedTuple):
    """What stands before a content: `ids`, and what is `left` of its text, to be encoded together with the content.
    `begun`: the tokenizer puts its blank before that."""

    ids: tuple[int, ...]
    left: str = ""
    begun: bool = False


class Segments:
    """`split` what stands between contents, then `encode` each content together with what is left of that. Contents are
    encoded without markers: one that spells a marker stays text."""

    def __init__(self, tokenizer: Any, bare: Tokenizer, scheme: str) -> None:
        self._tokenizer, self._bare, self._scheme = tokenizer, bare, scheme
        names = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, names)) or "(?!)")

    @classmethod
    def of(cls, tokenizer: Any) -> Segments | None:
        """None for a tokenizer that puts no blank before a text, or whose blank cannot be taken away."""
        if not puts_blank(tokenizer) or getattr(tokenizer, "backend_tokenizer", None) is None:
            return None
        made = json.loads(tokenizer.backend_tokenizer.to_str())
        schemes = list[str]()
        for part in _parts(made, "normalizer", "normalizers"):
            if part["type"] == "Prepend":
                part["prepend"] = ""
                schemes.append("prepend")
        for part in _parts(made, "pre_tokenizer", "pretokenizers"):
            if part["type"] == "Metaspace" and part["prepend_scheme"] != "never":
                schemes.append(part["prepend_scheme"])
                part["prepend_scheme"] = "never"
        bare = Tokenizer.from_str(json.dumps(made))
        bare.no_truncation()
        bare.no_padding()
        bare.encode_special_tokens = True
        return cls(tokenizer, bare, schemes[0]) if len(schemes) == 1 else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text that goes on behind another."""
        return list(self._bare.encode(text, add_special_tokens=False).ids)

    def split(self, text: str, begins: bool = False) -> Piece:
        """What stands between contents (`begins`: before all of them), up to its last marker as ids."""
        found = list(self._markers.finditer(text))
        if not found:
            return Piece((), text, begins)
        at, end = found[0].start(), found[-1].end()
        head = self.encode(self.begun(text[:at]) if begins else text[:at])
        marked = self._tokenizer.encode(text[at:end], add_special_tokens=False)
        return Piece((*head, *marked), text[end:], self._scheme != "first")

    def begun(self, text: str) -> str:
        """A part that has the tokenizer's blank before it."""
        if not text or (self._scheme != "prepend" and text.startswith(" ")):
            return text
        return f" {text}"


def puts_blank(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a blank before a text that has none."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))
    return bool(tokens) and str(tokens[0]).startswith(BLANK)


def _parts(made: dict[str, Any], name: str, several: str) -> Iterator[dict[str, Any]]:
    """The normalizers or pre-tokenizers of a tokenizer that is written as JSON, one or a sequence of them."""
    if part := made[name]:
        yield from part[several] if part["type"] == "Sequence" else [part]
