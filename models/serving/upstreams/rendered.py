"""An upstream that renders prompts itself and samples token ids: from the model in this process, or any such engine."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from environments.contract import Message, Prompt
from errors import ConfigurationError, ContextOverflow, ProviderError
from models.policy import Generation, Request, Sampling
from models.renderer import Conversation, Renderer
from models.serving.openai_api.errors import ApiError, too_long
from models.serving.openai_api.requests import DONE, Envelope, Usage, event, refuse_unsupported, to_messages
from models.serving.openai_api.turn_reader import TurnReader
from models.serving.upstreams.contract import AdapterGone, Replica, TokenEngine, Turn

# Tokens of an answer whose request names no limit.
LONGEST = 128
# Bytes of a request from which its prompt is rendered in another thread.
LONG = 20_000


class RenderedUpstream:
    """Renders as the adapters were trained, has `engine` sample, and reads text and calls from the ids. `longest`
    bounds an answer whose request names no limit, in tokens; `temperature` is that of requests that name none."""

    def __init__(
        self, engine: TokenEngine, renderer: Renderer, longest: int = LONGEST, temperature: float = 1.0
    ) -> None:
        self.engine, self.renderer, self.longest, self.temperature = engine, renderer, longest, temperature

    async def answer(self, turn: Turn) -> dict[str, Any]:
        """The body of the answer."""
        reader, request = await self._begin(turn)
        done = None
        async with aclosing(self._told(turn, request, bool(turn.asked.stop))) as parts:
            async for part in parts:
                if isinstance(part, Generation):
                    done = part
                else:
                    reader.feed(part)
                if reader.stopped:
                    break
        return self._end(turn, reader, request, done)

    async def stream(self, turn: Turn) -> AsyncGenerator[bytes]:
        """The answer as server-sent events."""
        reader, request = await self._begin(turn)
        envelope, chat = Envelope(turn.name, turn.asked.chat), turn.asked.chat
        begun, done = False, None
        async with aclosing(self._told(turn, request, True)) as parts:
            async for part in parts:
                text = ""
                if isinstance(part, Generation):
                    done = part
                else:
                    text = reader.feed(part)
                # With every part: a client may leave after any, and is charged for what was sampled for it.
                turn.heard.usage = Usage(len(request.prompt), reader.count if done is None else len(done.ids))
                if chat and not begun:  # not before the turn was accepted
                    begun = True
                    yield event(envelope.chunk({"role": "assistant", "content": ""}))
                if text:
                    yield event(envelope.chunk({"content": text} if chat else text))
                if reader.stopped:
                    break
        self._end(turn, reader, request, done)
        if rest := reader.finish()[1]:
            yield event(envelope.chunk({"content": rest} if chat else rest))
        if calls := turn.heard.message.get("tool_calls"):
            yield event(envelope.chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
        yield event(envelope.chunk(None, turn.heard.finish))
        if turn.asked.usage_in_stream:
            yield event(envelope.usage_chunk(turn.heard.usage))
        yield DONE

    def ahead(self, prompt: Prompt) -> int:
        """Tokens that every request takes behind this prompt."""
        return len(self.renderer.start(prompt, [Message("user", "")]).ids)

    async def replicas(self) -> list[Replica]:
        return await self.engine.replicas()

    async def close(self) -> None:
        await self.engine.close()

    async def _begin(self, turn: Turn) -> tuple[TurnReader, Request]:
        asked = turn.asked
        refuse_unsupported(asked)
        # A long prompt takes its time to become tokens: others are not kept waiting for it.
        render = self._rendered
        talk, tools = await asyncio.to_thread(render, turn) if asked.size > LONG else render(turn)
        ids, context = talk.ids, self.engine.context
        room = context - len(ids)
        if room < max(1, asked.max_tokens or 1):
            more = f" and {asked.max_tokens} are asked for" if asked.max_tokens else ""
            raise too_long(f"the prompt has {len(ids)} tokens{more}, this model's context is {context}; shorten it")
        longest = asked.max_tokens if asked.max_tokens is not None else min(self.longest, room)
        seed = asked.seed if asked.seed is not None else zlib.crc32(turn.conversation.encode()) + len(ids)
        temperature = self.temperature if asked.temperature is None else asked.temperature
        sampling = Sampling(temperature, longest, seed)
        name = turn.adapter.name if turn.adapter else None
        reader = TurnReader(self.renderer, tools, asked.stop, not asked.chat, asked.one_call, talk.before)
        return reader, Request(turn.conversation, ids, sampling, name, talk.shared if turn.prompt else 0)

    def _rendered(self, turn: Turn) -> tuple[Conversation, Sequence[Mapping[str, Any]]]:
        """The conversation up to the turn that is asked for, and the tools on offer."""
        asked, renderer = turn.asked, self.renderer
        if not asked.chat:
            if not isinstance(asked.prompt, str):
                highest = len(renderer.tokenizer)
                if any(not 0 <= i < highest for i in asked.prompt):
                    raise ApiError(400, f"prompt holds a token id outside 0 to {highest - 1}", param="prompt")
                return Conversation(list(asked.prompt)), ()
            return Conversation(renderer.text_ids(asked.prompt)), ()
        messages = to_messages(asked.messages)
        own = turn.prompt or Prompt()
        instructions, tools = own.instructions, asked.tools or own.tools
        if messages[0].role == "system":
            instructions, messages = messages[0].content, messages[1:]
        if not messages:
            raise ApiError(400, "there is no message after the system's", param="messages")
        try:
            talk = renderer.start(Prompt(instructions, tools, own.examples), messages)
        except ConfigurationError as problem:
            raise ApiError(400, str(problem), param="messages") from None
        return talk, tools

    def _end(self, turn: Turn, reader: TurnReader, request: Request, done: Generation | None) -> dict[str, Any]:
        """The body of the whole answer; fills in what others want to know of it."""
        if done is not None:
            reader.complete(done.ids)
        action, _ = reader.finish()
        finish = "length" if done is not None and done.finish_reason == "length" and not reader.stopped else "stop"
        heard = turn.heard
        heard.usage = Usage(len(request.prompt), reader.count)
        body = Envelope(turn.name, turn.asked.chat).whole(action, finish, heard.usage)
        choice = body["choices"][0]
        heard.message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        heard.finish = choice["finish_reason"]
        return body

    async def _told(self, turn: Turn, request: Request, streamed: bool) -> AsyncGenerator[list[int] | Generation]:
        """The engine's parts, with its errors in the form that a client gets."""
        holders = turn.adapter.replicas if turn.adapter else ()
        try:
            async with aclosing(self.engine.generate(request, streamed, holders)) as parts:
                async for part in parts:
                    yield part
        except ContextOverflow:
            raise too_long("prompt and answer together do not fit this model's context; shorten them") from None
        except AdapterGone:
            raise
        except ProviderError as problem:
            raise ApiError(503, str(problem)) from None
