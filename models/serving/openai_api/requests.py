"""Chat completions as OpenAI's API has them: what is asked, checked, and turned into this project's messages.

Checked here is what the gateway itself relies on. What only a server behind it understands (images, audio, sampling
options) is passed on to such a server, and refused by name where this process answers.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from environments.contract import Action, Message, Role, ToolCall
from models.serving.openai_api.errors import ApiError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_MESSAGES = 4096
# Levels of a body. Python gives up at about a thousand, and not everywhere at the same one.
MOST_LEVELS = 100
# Stop texts (OpenAI's limit) and characters of each: every one is searched for after each token.
MOST_STOPS, LONGEST_STOP = 4, 256
# What this process cannot do, by parameter, with the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "top_p": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    # What servers take beside OpenAI's own: vLLM's options of sampling, and tools as they were before `tools`.
    "repetition_penalty": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "prompt_logprobs": (None,),
    "include_stop_str_in_output": (None, False),
    "truncate_prompt_tokens": (None,),
    # And of how a server renders the prompt.
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    # Its options of a form that the answer must have, by today's name and by earlier ones.
    "structured_outputs": (None, {}),
    "structural_tag": (None,),
    **{f"guided_{kind}": (None,) for kind in ("json", "regex", "choice", "grammar")},
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
}


@dataclass(frozen=True)
class ChatRequest:
    """One request, checked. `size` is its length in bytes; `messages` are the raw ones; `prompt` is a text
    completion's ("" for chat). `answers` is how many are asked for (`n`). `body` is what came, for a server behind the
    gateway. `one_call`: the client takes no more than one tool call a turn (`parallel_tool_calls` is false).
    `usage_in_stream`: it asks for the count of a stream's tokens, and with `usage_in_parts` for that up to each part,
    too."""

    model: str
    chat: bool
    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] = ""
    tools: Sequence[Mapping[str, Any]] = ()
    one_call: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    usage_in_parts: bool = False
    answers: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: `prompt` read and `completion` sampled."""

    prompt: int = 0
    completion: int = 0

    def as_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer share. `model` names who answered."""

    model: str
    chat: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, action: Action, finish: str, usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": action.content or None, "refusal": None}
            if action.tool_calls:
                message["tool_calls"] = calls_as_dicts(action.tool_calls)
                choice["finish_reason"] = "tool_calls"
            elif message["content"] is None:
                message["content"] = action.malformed
            choice["message"] = message
        else:
            choice["text"] = action.content
        return self._head("chat.completion" if self.chat else "text_completion") | {
            "choices": [choice],
            "usage": usage.as_dict(),
        }

    def chunk(self, delta: Mapping[str, Any] | str | None, finish: str | None = None) -> dict[str, Any]:
        """One part of a streamed answer; a text completion's delta is a text."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"delta": delta or {}} if self.chat else {"text": delta or ""}
        return self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last part of a stream that was asked for its usage."""
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return head | {"choices": [], "usage": usage.as_dict()}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def event(value: Mapping[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n".encode()


DONE = event("[DONE]")


def calls_as_dicts(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as OpenAI's API writes them; ids are made where there is none that is unique."""
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments), ensure_ascii=False)},
        }
        for c in calls
    ]


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises `ApiError` (400)."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise ApiError(400, f"the body is not JSON: {str(problem)[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; send an object")
    try:
        _check_json(body)
    except ValueError as problem:
        raise ApiError(400, f"the body {problem}") from None
    return body


def _check_json(value: Any) -> None:
    """Raises `ValueError` for what `json.loads` takes and others cannot: halves of surrogate pairs, which no tokenizer,
    database or server gets encoded, numbers that are none, and nesting that is too deep for whoever reads it next."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            break
    else:
        raise ValueError(f"is nested more than {MOST_LEVELS} levels deep; send it flatter")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds a text with half of a surrogate pair; send whole characters") from None
    except ValueError:
        raise ValueError("holds NaN, or a number that is too large, which are not JSON; send another value") from None


def parse_chat(body: dict[str, Any], size: int = 0) -> ChatRequest:
    """A request to `/v1/chat/completions`. Raises `ApiError` (400) naming the parameter that is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise ApiError(400, f"{len(messages)} messages; at most {MOST_MESSAGES} are taken", param="messages")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise ApiError(
                400,
                f"messages[{index}] has role {role!r:.60}; use one of {', '.join(ROLES)}",
                param=f"messages[{index}].role",
            )
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise ApiError(400, 'tools must be a list of {"type": "function", "function": {"name": ...}}', param="tools")
    for index, tool in enumerate(tools):
        where, parameters = f"tools[{index}].function.parameters", tool["function"].get("parameters")
        if not _is_schema(parameters):
            raise ApiError(400, f"{where} is {parameters!r:.60}; give a JSON schema, or null for none", param=where)
    if body.get("tool_choice") == "none":
        tools = []
    return _common(body, True, size=size, messages=messages, tools=tools)


def parse_completion(body: dict[str, Any], size: int = 0) -> ChatRequest:
    """A request to `/v1/completions`: one prompt, a text or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and prompt and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if not (ids or (isinstance(prompt, str) and prompt)):
        raise ApiError(400, "prompt must be one text, or one list of token ids, that is not empty", param="prompt")
    return _common(body, False, size=size, prompt=cast("str | list[int]", prompt))


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _is_schema(parameters: Any) -> bool:
    """Whether a tool's parameters are an object whose properties are schemas; null means none, as clients send it."""
    properties = {} if parameters is None else parameters.get("properties") if isinstance(parameters, dict) else 0
    return properties is None or (isinstance(properties, dict) and all(map(_is_property, properties.values())))


def _is_property(schema: Any) -> bool:
    """Whether it is a schema as far as calls are read by it: types, and the schemas that it chooses from."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    parts = [schema.get("anyOf"), schema.get("oneOf")]
    return all(part is None or (isinstance(part, list) and all(map(_is_property, part))) for part in parts)


def _common(body: dict[str, Any], chat: bool, **given: Any) -> ChatRequest:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a name; /v1/models lists them", param="model")
    options = body.get("stream_options") or {}
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise ApiError(400, "stop must be a text or a list of texts", param="stop")
    if len(stop) > MOST_STOPS or any(len(s) > LONGEST_STOP for s in stop):
        most = f"at most {MOST_STOPS} of at most {LONGEST_STOP} characters each"
        raise ApiError(400, f"stop has too many texts, or one that is too long; give {most}", param="stop")
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    # Of chats alone: a server takes no notice of it in a text completion, whose answer may be as long as max_tokens.
    longest = _number(body, "max_completion_tokens", 1, 1 << 20, whole=True) if chat else None
    if longest is None:
        longest = _number(body, "max_tokens", 1, 1 << 20, whole=True)
    answers = _number(body, "n", 1, 1 << 20, whole=True)
    temperature = _number(body, "temperature", 0, 2)
    seed = _number(body, "seed", -(1 << 63), (1 << 63) - 1, whole=True)
    return ChatRequest(
        model=model,
        chat=chat,
        body=body,
        one_call=not _yes(body, "parallel_tool_calls", unsaid=True),
        stream=_yes(body, "stream"),
        usage_in_stream=_yes(options, "include_usage", "stream_options."),
        usage_in_parts=_yes(options, "continuous_usage_stats", "stream_options."),
        answers=1 if answers is None else int(answers),
        max_tokens=None if longest is None else int(longest),
        temperature=temperature,
        seed=None if seed is None else int(seed) % (1 << 63),
        stop=tuple(stop),
        **given,
    )


def _yes(options: Mapping[str, Any], name: str, where: str = "", unsaid: bool = False) -> bool:
    value = options.get(name)
    if value is None:
        return unsaid
    if not isinstance(value, bool):
        raise ApiError(400, f"{where}{name} is {value!r:.40}; give true or false", param=f"{where}{name}")
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float, whole: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ApiError(400, f"{name} is {value!r:.40}; give {kind} from {low} to {high}", param=name)
    return cast("float", value)


def refuse_unsupported(asked: ChatRequest) -> None:
    """Raises `ApiError` for what cannot be done where the gateway renders the prompt and reads the answer, whoever
    samples it; a server that gets the request as it came decides for itself."""
    here = "where the gateway renders the prompt"
    wanted = [name for name, nothing in REFUSED.items() if asked.body.get(name) not in nothing]
    if not asked.chat and not isinstance(asked.body.get("logprobs"), bool | None):  # 0 asks for the sampled tokens'
        wanted.append("logprobs")
    if wanted:
        raise ApiError(400, f"{wanted[0]} is not supported {here}; leave it out", param=wanted[0])
    if asked.body.get("tool_choice") not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice can be auto or none {here}", param="tool_choice")
    kind = asked.body.get("response_format")
    if kind is not None and not (isinstance(kind, dict) and kind.get("type") in (None, "text")):
        raise ApiError(400, f"response_format can be text only {here}", param="response_format")


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, nothing, or text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ApiError(400, f"{where} holds something that is not text; send text", param=where)


def to_messages(raw: Sequence[Mapping[str, Any]]) -> list[Message]:
    """This project's messages; neighbours of role user or system become one, as an append-only template wants it."""
    messages: list[Message] = []
    for index, one in enumerate(raw):
        where = f"messages[{index}]"
        role = cast("Role", ROLES[one["role"]])
        text = text_of(one.get("content"), f"{where}.content")
        called = one.get("tool_calls") or []
        if not isinstance(called, list):
            what = f"{where}.tool_calls"
            raise ApiError(400, f"{what} is {called!r:.60}; give a list of calls, or leave it out", param=what)
        calls = tuple(_call(call, f"{where}.tool_calls") for call in called)
        if messages and role in ("user", "system") and messages[-1].role == role:
            messages[-1] = Message(role, f"{messages[-1].content}\n{text}")
        else:
            given = one.get("tool_call_id")
            messages.append(Message(role, text, calls, given if isinstance(given, str) else ""))
    return messages


def _call(call: Any, where: str) -> ToolCall:
    try:
        function = call["function"]
        written = function.get("arguments") or "{}"
        arguments = dict(json.loads(written) if isinstance(written, str) else written)
        _check_json(arguments)
        return ToolCall(str(function["name"]), arguments, str(call.get("id") or ""))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ApiError(400, f"{where} is not a list of calls with a name and JSON arguments", param=where) from None
