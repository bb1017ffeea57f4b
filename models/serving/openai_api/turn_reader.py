"""Sampled ids to what a client is shown, as they come: text, or tool calls.

While a turn may still become a call of one of the tools on offer, its text is held back; a call is sent whole at the
end. A "call" of a tool that was not offered is text: a client could not run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from environments.contract import Action
from models.renderer import Renderer
from models.templates.call_formats import CompactCalls
from models.templates.chat_template import THOUGHT

TAG = "<tool_call>"
BROKEN = "\ufffd"  # what decoding gives for the first bytes of a character whose last ones are still to come


class TurnReader:
    """One turn, behind a message of role `before`. `plain` reads no calls (text completions), `one_call` the first of a
    turn's alone."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        plain: bool = False,
        one_call: bool = False,
        before: str = "user",
    ) -> None:
        self._renderer, self._tools, self._stop, self._before = renderer, tools, tuple(stop), before
        self._plain, self._one_call = plain, one_call
        self._names = () if plain else tuple(tool["function"]["name"] for tool in tools)
        self._compact = isinstance(renderer.calls, CompactCalls)
        self._ids: list[int] = []
        # The ids up to the last one that ends with a whole character: how many, and their text. Spelling all of a long
        # turn again for each of its ids would take the server's event loop many seconds.
        self._settled, self._settled_text = 0, ""
        self._shown = 0
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """Take more ids; the text that may be shown now."""
        self._ids.extend(ids)
        text = self._text()
        sure, text = self._sure(text), text.rstrip(BROKEN)
        keep = min(sure, len(text))
        if not self.stopped:
            # The beginning of a stop text may be all that has come of it: the longest one of any.
            keep = min(keep, len(text) - max((_overlap(text, s) for s in self._stop), default=0))
        if keep <= self._shown:
            return ""
        fresh, self._shown = text[self._shown : keep], keep
        return fresh

    def complete(self, ids: Sequence[int]) -> None:
        """The turn's ids, whole: those that were not fed are still to be shown."""
        self._ids, self._settled, self._settled_text = list(ids), 0, ""

    @property
    def count(self) -> int:
        """How many ids were taken."""
        return len(self._ids)

    def finish(self) -> tuple[Action, str]:
        """The whole turn as an action, and the text of it that was held back and not shown."""
        text = self._text(whole=True)
        action = Action(content=text)
        if self._names:
            read = self._renderer.calls.read(text, self._tools)
            if read.tool_calls and all(call.name in self._names for call in read.tool_calls):
                action = replace(read, tool_calls=read.tool_calls[:1]) if self._one_call else read
        # What stands around calls is content without the blanks at its beginning, which may have been shown.
        shown = len(text[: self._shown].lstrip()) if action.tool_calls else self._shown
        return action, action.content[shown:]

    def _text(self, whole: bool = False) -> str:
        """What the ids say, up to the first stop text; without the space that some vocabularies begin with."""
        text = self._spelled()
        if not self._plain:
            # Thoughts are not for clients, nor is what may become their beginning.
            begins = not whole and self._renderer.thinks and THOUGHT.startswith(text.strip())
            text = "" if begins else self._renderer.answer_in(text, self._before) or ""
        # The one that is whole first, as a stream meets them, however much of the text comes at once.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)[1]]
        return text

    def _spelled(self) -> str:
        """What the ids spell."""
        text = self._settled_text + self._renderer.text_of(self._ids[self._settled :])
        if self._renderer.bytewise and not text.endswith(BROKEN):
            self._settled, self._settled_text = len(self._ids), text
        return text

    def _sure(self, text: str) -> int:
        """How much of `text` cannot be part of a call."""
        if not self._names:
            return len(text)
        if self._compact:
            word, opened, _ = text.lstrip().partition("(")
            possible = word in self._names if opened else any(n.startswith(word) for n in self._names)
            return 0 if possible else len(text)
        at = text.find(TAG)
        if at >= 0:
            return at
        return len(text) - _overlap(text, TAG)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, which goes on."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
