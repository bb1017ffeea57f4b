"""What a tokenizer's chat template writes between the contents of messages, read off by rendering marked messages.

A conversation is built by appending, so a template is taken only as far as it appends: what it writes before a message
may not depend on what comes later. Three habits of models are met halfway, each with a note for the log:
a template without system or tool turns (Gemma) gets instructions and results inside user turns; one that drops earlier
thoughts (Qwen3) is overruled, because what was sampled stays as it was; one whose turns begin with a channel (gpt-oss)
has them begun in the channel of answers. A template that asks for the date is always told the same one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from errors import ConfigurationError

# Before a template that asks for the date: the prompts of one model are the same on every day.
_CLOCK = "strftime_now"
_STOPPED = "{%- macro strftime_now(form) -%}{{ '2025-01-01' if form == '%Y-%m-%d' else '01 Jan 2025' }}{%- endmacro -%}"
# Every assistant turn in them is an earlier one: templates write the last turn otherwise.
_ORDERS: tuple[tuple[str, ...], ...] = (
    ("system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "tool", "tool", "assistant", "user"),
)
# The roles that may stand one behind the other, in the words of whichever model: what is read off a template.
FOLLOWING = frozenset(pair for order in _ORDERS for pair in pairwise(order))
THOUGHT, THOUGHT_END = "<think>", "</think>"
_RESULT = 'it said "no" \\ or\nso'  # with what JSON escapes
# As other models mark theirs: `<seed:think>`, `[THINK]`, `<|START_THINKING|>`.
_OTHER_THOUGHTS = re.compile(r"<[^<>/\s]*think[^<>/\s]*>|\[THINK\]", re.IGNORECASE)
_THOUGHTS = f"{THOUGHT}\nbecause\n{THOUGHT_END}\n\ntherefore"


class _Fails(ConfigurationError):
    """The template does not take the roles."""


@dataclass(frozen=True)
class Turns:
    """`start` stands before the first content, `between` between contents of two roles, `opening` after the content of
    a role and before a turn that is to be sampled; such a turn without thoughts of its own begins with `first`: with
    the end of a thought that the opening begins, or with blanks that the opening leaves to it.
    `closing` is what the template writes behind a turn that nothing follows. `quoted`: results are written as JSON
    strings, whose quotes are no part of what stands around them. `notes` say where conversations depart from what the
    template would write."""

    start: str
    between: Mapping[tuple[str, str], str]
    opening: Mapping[str, str]
    first: Mapping[str, str]
    closing: str
    quoted: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Dialect:
    """A template, with the roles that it does not know put inside user turns; `quoted`: it writes results as JSON."""

    tokenizer: Any
    system: bool = True
    tool: bool = True
    quoted: bool = False

    def render(self, messages: Sequence[tuple[str, str]], generation: bool = False) -> str:
        """The text of (role, content) messages."""
        given = [
            {"role": "user" if role == "tool" and not self.tool else role, "content": content}
            for role, content in messages
            if self.system or role != "system"
        ]
        try:
            template = str(self.tokenizer.get_chat_template())
            template = f"{_STOPPED}{template}" if _CLOCK in template else template
            text = self.tokenizer.apply_chat_template(
                given, chat_template=template, tokenize=False, add_generation_prompt=generation
            )
        except Exception as problem:  # the template is its author's code: anything may come out of it
            raise _Fails(
                f"the chat template fails on roles {[m['role'] for m in given]}: {problem}; give another template"
            ) from problem
        return str(text)

    def marked(self, order: Sequence[str], generation: bool = False) -> tuple[list[str], list[str], str]:
        """Roles that were written, the text before each one's mark, and the text behind the last. Raises
        `ConfigurationError` for a role that is dropped."""
        shown = [(i, role) for i, role in enumerate(order) if self.system or role != "system"]
        marks = [f"[{i}|{role}]" for i, role in shown]
        text = self.render(list(zip([role for _, role in shown], marks, strict=True)), generation)
        pieces, position = [], 0
        for (_, role), mark in zip(shown, marks, strict=True):
            mark = quoted(mark) if self.quoted and role == "tool" else mark
            found = text.find(mark, position)
            if found < 0:
                raise _Fails(f"the chat template drops {role!r} messages; give one that shows all roles")
            pieces.append(text[position:found])
            position = found + len(mark)
        return [role for _, role in shown], pieces, text[position:]


def quoted(content: str) -> str:
    """A content as a JSON string, as templates write one by `tojson`."""
    return json.dumps(content, ensure_ascii=False)


def opens_thought(opening: str) -> bool:
    """Whether a turn behind this opening begins within a thought."""
    _, begun, rest = opening.rpartition(THOUGHT)
    return bool(begun) and THOUGHT_END not in rest


def read_template(tokenizer: Any) -> Turns:
    """The pieces of the tokenizer's chat template. Raises `ConfigurationError` for one that cannot be appended to."""
    first: ConfigurationError | None = None
    for system, tool in ((True, True), (True, False), (False, True), (False, False)):
        try:
            return _read(*_result_written(_Dialect(tokenizer, system, tool)))
        except _Fails as problem:
            first = first or problem
    assert first is not None
    raise first


def _result_written(dialect: _Dialect) -> tuple[_Dialect, list[str]]:
    """The dialect with whether it writes results as JSON, and a note where it changes them otherwise."""
    if not dialect.tool:
        return dialect, []
    text = dialect.render([("system", "be"), ("user", "why"), ("assistant", "so"), ("tool", _RESULT)])
    if _RESULT in text:
        return dialect, []
    if quoted(_RESULT) in text:
        return replace(dialect, quoted=True), []
    return dialect, ["it changes quotes, backslashes or line breaks of results; here they are written as they are"]


def _read(dialect: _Dialect, notes: list[str]) -> Turns:
    between: dict[tuple[str, str], str] = {}
    start = ""
    for order in _ORDERS:
        if not dialect.tool:  # two user turns in a row are what such a template refuses
            order = tuple(role for i, role in enumerate(order) if role != "tool" or order[i - 1] != "tool")
        roles, pieces, _ = dialect.marked(order)
        start = pieces[0]
        for pair, piece in zip(pairwise(roles), pieces[1:], strict=True):
            if between.setdefault(pair, piece) != piece:
                raise ConfigurationError(
                    f"the chat template renders equal turns differently ({between[pair]!r} and {piece!r} between "
                    f"{pair[0]} and {pair[1]}); give an append-only template"
                )
        _check_growing(dialect, order)
    notes = [*notes, *_complete(dialect, between)]
    opening: dict[str, str] = {}
    first: dict[str, str] = {}
    for order in (("system", "user"), ("system", "user", "assistant", "tool")):
        opening[order[-1]], note = _opening(dialect, order, between)
        first[order[-1]] = _first(dialect, order, opening[order[-1]], between[order[-1], "assistant"])
        notes += [note] if note and note not in notes else []
    if "because" not in dialect.render([("user", "why"), ("assistant", _THOUGHTS), ("user", "so")]):
        notes.append(
            "it drops thoughts of earlier turns; here they stay, as sampled, and take their room in the context"
        )
    template = str(dialect.tokenizer.get_chat_template())
    if THOUGHT not in template and (other := _OTHER_THOUGHTS.search(template)):
        notes.append(f"it has {other[0]!r}; thoughts are told by {THOUGHT} and {THOUGHT_END} alone, others are content")
    closing = dialect.marked(("system", "user", "assistant"))[2]
    return Turns(start, between, opening, first, closing, dialect.quoted, tuple(notes))


def _complete(dialect: _Dialect, between: dict[tuple[str, str], str]) -> list[str]:
    """Add what stands around the roles that the template does not know; a note for each."""
    notes = []
    if not dialect.tool:
        between["tool", "tool"] = "\n"
        notes.append("it takes no tool turns; results are shown in user turns")
    if not dialect.system:
        between["system", "user"] = "\n\n"
        notes.append("it takes no system turn; instructions begin the first user turn")
    return notes


def _check_growing(dialect: _Dialect, order: Sequence[str]) -> None:
    """Refuse a template that writes a conversation otherwise once another turn is added to it."""
    whole = dialect.marked(order)[1]
    for end in (i for i, role in enumerate(order) if role == "user" and i + 1 < len(order)):
        roles, pieces, _ = dialect.marked(order[: end + 1])
        for role, before, after in zip(roles, pieces, whole, strict=False):
            if before != after:
                raise ConfigurationError(
                    f"the chat template changes earlier turns when one is added ({before!r} before a {role} message "
                    f"becomes {after!r}); give a template that only appends"
                )


def _opening(dialect: _Dialect, order: Sequence[str], between: Mapping[tuple[str, str], str]) -> tuple[str, str]:
    """What opens a sampled turn after `order`, and a note where that is not the template's generation prompt."""
    opened, earlier = dialect.marked(order, generation=True)[2], between[order[-1], "assistant"]
    if opened.startswith(earlier):
        return opened, ""
    if THOUGHT in earlier and opened.partition(THOUGHT)[:2] == earlier.partition(THOUGHT)[:2]:
        return opened, ""  # the thoughts that it begins are those that are left out of earlier turns
    if earlier.startswith(opened) and earlier[len(opened) :].isspace():
        return opened, ""  # Llama 2: the model writes the blank itself, with its first word
    if earlier.startswith(opened):
        return earlier, f"sampled turns begin behind {earlier[len(opened) :]!r}, as earlier ones do: without thoughts"
    raise ConfigurationError(
        f"the chat template's generation prompt {opened!r} differs from its assistant turns ({earlier!r}); give "
        "another template"
    )


def _first(dialect: _Dialect, order: Sequence[str], opened: str, earlier: str) -> str:
    """What a turn behind `opened` begins with that has no thought. The end of one that was begun is as the template
    writes it in a last turn."""
    if not opens_thought(opened):
        return earlier.removeprefix(opened) if earlier.startswith(opened) else ""
    written = dialect.marked((*order, "assistant"))[1][-1]
    end = written.removeprefix(opened) if written.startswith(opened) else ""
    return end if THOUGHT_END in end else f"\n{THOUGHT_END}\n\n"
