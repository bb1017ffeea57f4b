"""Messages to token ids and back, by appending only.

What a policy sampled enters the next prompt as the very ids it sampled: nothing is decoded and encoded again, so
the ids that are trained on are the ids that were sampled. The turn markers come from the tokenizer's own chat
template (`models/templates/chat_template.py`); a template that rewrites earlier turns is refused.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cachetools import LRUCache, cached
from tokenizers import decoders

from environments.contract import Action, Message, Prompt, content_hash
from errors import ConfigurationError
from models.templates.call_formats import FORMATS
from models.templates.chat_template import THOUGHT, THOUGHT_END, opens_thought, quoted, read_template
from models.templates.segments import Piece, Segments, puts_blank

logger = logging.getLogger("trace.models")

ANSWERS = "assistant"
# Texts whose ids are kept: instructions and worked examples, and what was said last; and the most characters of all of
# them. A gateway's clients send long ones, each once, and ids take ten times the memory of their text.
TEXTS_KEPT, KEPT_CHARACTERS = 4096, 8 << 20


def _special(tokenizer: Any, written: frozenset[int]) -> Iterator[tuple[int, str]]:
    """Tokens that contents may not spell, and their names: those that the tokenizer calls special, and the words of
    their own that a template writes between contents, of whose ids `written` are. Blanks and thoughts are contents."""
    for i, token in tokenizer.added_tokens_decoder.items():
        name = str(token)
        if token.special or (i in written and len(name.strip()) > 1 and name not in (THOUGHT, THOUGHT_END)):
            yield i, name


@dataclass
class Conversation:
    """A conversation as token ids. `sampled` marks the ids that the policy sampled (the ones that are trained on);
    `logprobs` are theirs, 0 elsewhere; `shared` leading ids are equal for all episodes of the target. A message of role
    `before` stands in front of the turn that is to be sampled."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shared: int = 0
    before: str = "user"

    def append(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float] = ()) -> None:
        """Add ids at the end; nothing before them ever changes."""
        self.ids.extend(ids)
        self.sampled.extend([sampled] * len(ids))
        self.logprobs.extend(logprobs if sampled else [0.0] * len(ids))


class Renderer:
    """Turns messages into ids for one tokenizer and one call format.

    The text of a conversation is contents with separators between them; a separator depends on the two roles that it
    stands between. Each piece is encoded by itself (`models/templates/segments.py` has what some tokenizers need for
    that), so appending never changes an id. Contents are encoded without special tokens: an observation that spells an
    end-of-turn marker stays text.
    Raises `ConfigurationError` for a tokenizer without a chat template or with one that is not append-only.
    """

    def __init__(self, tokenizer: Any, calls: str = "compact") -> None:
        if calls not in FORMATS:
            raise ConfigurationError(f"call format {calls!r} does not exist; choose from {', '.join(FORMATS)}")
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError("the tokenizer has no chat template; set one that the model was trained with")
        self.tokenizer, self.calls = tokenizer, FORMATS[calls]()
        # A server asks in several threads. A text is kept beside its ids, because sizes are asked of what is kept; none
        # counts for so little that there could be more than TEXTS_KEPT.
        least = KEPT_CHARACTERS // TEXTS_KEPT
        kept: LRUCache[Any, tuple[str, tuple[int, ...]]] = LRUCache(
            KEPT_CHARACTERS, getsizeof=lambda text_and_ids: max(least, len(text_and_ids[0]))
        )
        self._kept = cached(kept, lock=threading.Lock())(lambda text, alone: (text, self._encoded(text, alone)))
        turns = read_template(tokenizer)
        self._quoted = turns.quoted
        for note in turns.notes:
            logger.warning("the chat template is not followed to the letter: %s", note)
        # All at once: the tokenizer keeps how special tokens are read as a setting of its own, and a server encodes in
        # several threads. Whoever changed it later would change what others are encoding.
        self._segments, self._opened = Segments.of(tokenizer), turns.opening
        if self._segments is None and puts_blank(tokenizer):
            logger.warning("the tokenizer puts a blank before every piece of a conversation, which has more of them so")
        self._start = self._piece(turns.start, begins=True)
        self._between = {pair: self._piece(text) for pair, text in turns.between.items()}
        opening = {role: self._piece(text) for role, text in turns.opening.items()}
        self._opening = {role: (*piece.ids, *self._rest(piece)) for role, piece in opening.items()}
        self._first = {role: self._turn(text, opening[role]) for role, text in turns.first.items()}
        self._blank = {role for role, text in turns.first.items() if text.isspace()}
        pieces = [self._start.ids, *(piece.ids for piece in self._between.values()), *self._opening.values()]
        written = frozenset(i for ids in pieces for i in ids)
        special = dict(_special(tokenizer, written))
        self._special_ids = frozenset(special) - {tokenizer.unk_token_id}
        names = sorted((re.escape(name) for name in special.values() if len(name) > 1), key=len, reverse=True)
        self._spelled = re.compile(f"(?={'|'.join(names)})" if names else "(?!)")
        # By the role that follows: the token that ends a turn, and what is written behind that.
        self._ends = {pair[1]: self._end_in(p.ids) for pair, p in self._between.items() if pair[0] == ANSWERS}
        self.end_id = self._ends["user"][0]
        ends = frozenset(end for end, _ in self._ends.values())
        # What the model writes behind its last turn, where that is not what stands behind the others.
        closing = [i for i in self._marked(turns.closing) if i in self._special_ids]
        self._last = frozenset(closing[:1]) - ends
        self.stop_ids = ends | self._last
        begun, ended = set(map(opens_thought, turns.opening.values())), THOUGHT_END in str(tokenizer.chat_template)
        self.thinks = ended or True in begun
        self._revised = ["thoughts by role"] if len(begun) > 1 else []
        self._revised += ["blanks"] if self._blank or self._segments else []
        self._revised += ["results as JSON"] if turns.quoted else []
        self._revised += ["thoughts of the opening"] if self.thinks and not ended else []
        # Whether ids spell bytes, one after the other: what some spell does not depend on those before them.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self.bytewise = isinstance(decoder, decoders.ByteLevel) and not tokenizer.clean_up_tokenization_spaces

    def _marked(self, text: str) -> tuple[int, ...]:
        """Ids of a separator, whose special tokens are meant."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _piece(self, text: str, begins: bool = False) -> Piece:
        """What stands before a content, or at the beginning."""
        return self._segments.split(text, begins) if self._segments else Piece(self._marked(text))

    def _spelt(self, piece: Piece, content: str) -> str:
        """The text to encode for a content behind this piece."""
        text = piece.left + content
        return self._segments.begun(text) if self._segments and piece.begun else text

    def _rest(self, piece: Piece) -> list[int]:
        """Ids of what is left of a piece that no content is written behind."""
        return self._segments.encode(self._spelt(piece, "")) if self._segments else []

    def _turn(self, first: str, opening: Piece) -> Piece:
        """What a sampled turn begins with, before its answer. A blank and the word behind it may be one token."""
        if first.strip():
            return self._piece(first)
        return Piece((), first, opening.begun and not opening.left)

    def _add(self, conversation: Conversation, piece: Piece, content: str) -> None:
        """Append a content behind this piece."""
        conversation.append(piece.ids, False)
        conversation.append(self._encode(self._spelt(piece, content)), False)

    def _end_in(self, follow: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The token that ends a turn which `follow` stands behind, and what of it is written after that token.

        It is the first marker: Llama 2 has a space before it. A word of the language would cut turns that contain it,
        so without a marker it is what ends a text, beside all of `follow`.
        """
        place = next((place for place, i in enumerate(follow) if i in self._special_ids), None)
        if place is not None:
            return follow[place], follow[place + 1 :]
        if self.tokenizer.eos_token_id is None:
            raise ConfigurationError(
                f"the chat template ends no turn with a token of its own ({self.tokenizer.decode(list(follow))!r} "
                "follows), and the tokenizer has no eos_token; set the one that the model ends its turns with"
            )
        return int(self.tokenizer.eos_token_id), follow

    def _encode(self, text: str) -> list[int]:
        """Ids of contents, where special tokens that are spelled out stay text. Most texts come again with every
        episode, so what was encoded is kept."""
        return list(self._kept(text, self._segments is None)[1])

    def _encoded(self, text: str, alone: bool) -> tuple[int, ...]:
        """Ids of a text that is not kept, which stands `alone`, or within a conversation.

        A Unigram vocabulary holds special tokens as ordinary words too, so contents that come out with one are cut
        within its name.
        """
        encode = self._encode_plain if alone or self._segments is None else self._segments.encode
        ids = encode(text)
        if self._special_ids.isdisjoint(ids):
            return tuple(ids)
        cuts = [0, *(m.start() + 1 for m in self._spelled.finditer(text)), len(text)]
        ids = [i for a, b in pairwise(cuts) for i in encode(text[a:b])]
        if not self._special_ids.isdisjoint(ids):
            raise ConfigurationError("the tokenizer turns plain text into special tokens; use another tokenizer")
        return tuple(ids)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a plain text by itself: special tokens that it spells out stay text."""
        return list(self._kept(text, True)[1])

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    @property
    def fingerprint(self) -> str:
        """Hash of template and call format, and of what is written or read otherwise than in earlier versions; part of
        a policy's identity."""
        return content_hash([self.tokenizer.chat_template, self.calls.name, *self._revised])

    def content(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a message, given the tools on offer."""
        if message.role != ANSWERS:
            return quoted(message.content) if message.role == "tool" and self._quoted else message.content
        return self.calls.write(message.content, message.tool_calls, tools)

    def start(self, prompt: Prompt, first: Sequence[Message]) -> Conversation:
        """A conversation up to its first turn: `first` behind the prompt, which is its shared part."""
        conversation = Conversation()
        system = Message("system", self.calls.system(prompt.instructions, prompt.tools))
        messages = [system, *self.calls.turns(prompt.examples)]
        for index, message in enumerate(messages):
            piece = self._separator(messages[index - 1].role, message.role) if index else self._start
            self._add(conversation, piece, self.content(message, prompt.tools))
        conversation.shared = len(conversation.ids)
        self._extend(conversation, messages[-1].role, self.calls.turns(first), prompt.tools)
        return conversation

    def answer(
        self, conversation: Conversation, ids: Sequence[int], logprobs: Sequence[float], then: Sequence[Message]
    ) -> None:
        """Append a sampled turn exactly as sampled, and, if the episode goes on, what follows up to the next turn."""
        conversation.append(ids, True, logprobs)
        if not then:
            return
        follow = self._separator(ANSWERS, then[0].role)
        end, behind = self._ends[then[0].role]
        closed = bool(ids) and (ids[-1] == end or ids[-1] in self._last)
        self._add(conversation, follow._replace(ids=behind) if closed else follow, self.content(then[0]))
        self._extend(conversation, then[0].role, then[1:])

    def demonstration(self, prompt: Prompt, messages: Sequence[Message]) -> Conversation:
        """A conversation in which the assistant's turns count as sampled, each begun and ended as the model would do
        it; `messages` begin with others' and end with a turn of its own."""
        messages = self.calls.turns(messages)
        turns = [place for place, message in enumerate(messages) if message.role == ANSWERS]
        conversation = self.start(prompt, messages[: turns[0]])
        for place, after in zip(turns, [*turns[1:], len(messages)], strict=True):
            then = messages[place + 1 : after]
            # `answer` refuses roles that nothing can follow.
            end = self._ends.get(then[0].role, self._ends["user"])[0] if then else self.end_id
            first, text = self._first[conversation.before], self.content(messages[place], prompt.tools)
            ids = [*first.ids, *self._encode(self._spelt(first, text)), end]
            self.answer(conversation, ids, [0.0] * len(ids), then)
        return conversation

    def _extend(
        self,
        conversation: Conversation,
        last: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Append messages after one of role `last`, and open the assistant's turn."""
        for message in messages:
            self._add(conversation, self._separator(last, message.role), self.content(message, tools))
            last = message.role
        conversation.append(self.opening(last), False)
        conversation.before = last

    def opening(self, before: str) -> list[int]:
        """The ids that stand between a message of role `before` and a turn that is to be sampled."""
        if before not in self._opening:
            return self.separator(before, ANSWERS)
        return list(self._opening[before])

    def separator(self, before: str, after: str) -> list[int]:
        """The ids that stand between a message of role `before` and one of role `after`, without those of text that is
        encoded together with the latter."""
        return list(self._separator(before, after).ids)

    def _separator(self, before: str, after: str) -> Piece:
        try:
            return self._between[before, after]
        except KeyError:
            raise ConfigurationError(
                f"no turn of {after!r} may follow one of {before!r}; merge such messages into one"
            ) from None

    def read(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], before: str = "user") -> Action:
        """The action that a turn stands for that was sampled behind a message of role `before`, given the tools on
        offer."""
        text = self.text_of(ids)
        answer = self.answer_in(text, before)
        return Action(malformed=text.strip()) if answer is None else self.calls.read(answer, tools)

    def text_of(self, ids: Sequence[int]) -> str:
        """What sampled ids spell, without what ended the turn."""
        return str(self.tokenizer.decode([i for i in ids if i not in self.stop_ids], skip_special_tokens=False))

    def answer_in(self, text: str, before: str = "user") -> str | None:
        """The part of a turn's text behind its thoughts, and behind blanks that the template leaves to it; it may have
        begun the thoughts behind a message of role `before`. None while these have no end."""
        text = text.lstrip() if before in self._blank else text
        if not self.thinks:
            return text
        _, end, answer = text.rpartition(THOUGHT_END)
        if end:
            return answer.lstrip("\n")
        opened = self._opened.get(before, "")
        begun = opens_thought(opened) if THOUGHT in opened else text.lstrip().startswith(THOUGHT)
        return None if begun else text
