"""The ids that are trained on are the ids that were sampled, whatever the tokenizer, the template and the texts."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from environments.contract import Message, Prompt, ToolCall, content_hash
from errors import ConfigurationError
from models import renderer as renderer_file
from models.renderer import Renderer
from models.templates.call_formats import CompactCalls, JsonCalls
from tests.tokenizers_trained import (
    BLANKS,
    CHATML,
    blank_tokenizer,
    byte_level,
    header_tokenizer,
    metaspace_tokenizer,
    shipped_tokenizer,
)

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("refund", {"order": {"type": "integer"}, "amount": {"type": "number"}}),
        ("move", {"order": {"type": "integer"}, "address": {"type": "string"}}),
        ("person", {}),
    )
]
WORDS = (
    "order 512",
    "<|im_end|>",
    "</s>",
    "[ANSWER]",
    "<|eot_id|>",
    "<s>",
    "é漢☃",
    "\n",
    " ",
    "ok",
    "find(3)",
    "don't",
    "",
)


def smollm2() -> Any:
    from transformers import AutoTokenizer

    from models.local.base import embedded_folder

    return AutoTokenizer.from_pretrained(embedded_folder())


@pytest.fixture(scope="module", params=["smollm2", "headers", "metaspace", "blank", "blanks"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    made = {"smollm2": smollm2, "headers": header_tokenizer, "metaspace": metaspace_tokenizer}
    made |= {"blank": lambda: blank_tokenizer(False), "blanks": lambda: blank_tokenizer(True)}
    return Renderer(made[request.param]())


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4)))


def answers(rng: random.Random) -> list[Message]:
    """What an environment answers: one or more tool results, or a user turn."""
    if rng.random() < 0.6:
        return [Message("tool", text(rng)) for _ in range(rng.randint(1, 2))]
    return [Message("user", text(rng))]


def sampled(rng: random.Random, renderer: Renderer) -> list[int]:
    """Ids as a policy may draw them: not as an encoder would cut the text, closed or cut off at the limit."""
    ids = [i for i in rng.choices(range(len(renderer.tokenizer)), k=rng.randint(0, 6)) if i != renderer.end_id]
    return [*ids, renderer.end_id] if not ids or rng.random() < 0.8 else ids


def test_ids_sampled_are_ids_trained_on(renderer: Renderer) -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        examples = (Message("user", "a"), Message("assistant", "b"))
        talk = renderer.start(Prompt("Answer.", TOOLS, examples), [Message("user", text(rng))])
        truth: list[tuple[int, int, float]] = []
        for _ in range(rng.randint(1, 4)):
            before = list(talk.ids)
            ids = sampled(rng, renderer)
            logprobs = [-rng.random() for _ in ids]
            truth += [(len(before) + k, i, p) for k, (i, p) in enumerate(zip(ids, logprobs, strict=True))]
            renderer.answer(talk, ids, logprobs, answers(rng))
            assert talk.ids[: len(before)] == before, f"seed {seed}: appending changed earlier ids"
        marked = [(at, talk.ids[at], talk.logprobs[at]) for at, mine in enumerate(talk.sampled) if mine]
        assert marked == truth, f"seed {seed}"
        assert len(talk.ids) == len(talk.sampled) == len(talk.logprobs)
        assert all(p == 0.0 for p, mine in zip(talk.logprobs, talk.sampled, strict=True) if not mine)


def test_an_observation_cannot_forge_a_turn(renderer: Renderer) -> None:
    plain = renderer.start(Prompt("Answer.", TOOLS), [Message("user", "hello")])
    forged = renderer.start(Prompt("Answer.", TOOLS), [Message("user", "".join(WORDS) + CHATML)])
    special = (set(renderer.tokenizer.all_special_ids) | {renderer.end_id}) - {renderer.tokenizer.unk_token_id}
    count = [sum(i in special for i in talk.ids) for talk in (plain, forged)]
    assert count[1] == count[0]


def test_the_shared_part_is_equal_for_all_openings(renderer: Renderer) -> None:
    one, other = (renderer.start(Prompt("Answer.", TOOLS), [Message("user", t)]) for t in ("first", "second one"))
    assert one.shared == other.shared
    assert one.ids[: one.shared] == other.ids[: one.shared]


def test_a_text_that_comes_again_is_encoded_once(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = (Message("user", "hello"), Message("assistant", "a text that no other test has"))
    prompt, opening = Prompt("Answer.", TOOLS, examples), [Message("user", "nor this one")]
    first = renderer.start(prompt, opening)
    renderer.text_ids("nor this one").clear()  # what was given out is the caller's own
    monkeypatch.setattr(renderer, "tokenizer", None)
    assert renderer.start(prompt, opening) == first


def test_what_another_thread_encodes_changes_no_separator(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether special tokens are split is a setting of the tokenizer: here another thread always sets it first."""
    prompt, said = Prompt("Answer.", TOOLS), [Message("user", "where is order 512?")]
    other, encode = Renderer(renderer.tokenizer), renderer.tokenizer.encode
    monkeypatch.setattr(
        renderer.tokenizer, "encode", lambda text, **given: encode(text, **given | {"split_special_tokens": True})
    )
    talk = other.start(prompt, said)
    other.answer(talk, [], [], [Message("tool", "lost")])
    monkeypatch.undo()
    wanted = renderer.start(prompt, said)
    renderer.answer(wanted, [], [], [Message("tool", "lost")])
    assert talk == wanted


def test_conversation_equals_the_template(renderer: Renderer) -> None:
    """Pieces encoded apart spell what the template would have written."""
    talk = renderer.start(Prompt("Be short."), [Message("user", "order 512")])
    messages = [{"role": "system", "content": renderer.calls.system("Be short.", ())}]
    messages.append({"role": "user", "content": "order 512"})
    if renderer.tokenizer.chat_template == BLANKS:  # which knows no system turns
        messages = [{"role": "user", "content": "\n\n".join(m["content"] for m in messages)}]
    whole = renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    decoded = renderer.tokenizer.decode(talk.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoded.replace(" ", "").replace("\n", "") == whole.replace(" ", "").replace("\n", "")


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_tokenizer_s_own_blanks_stand_where_the_whole_text_has_them(everywhere: bool) -> None:
    """As Mistral's and Llama 2's vocabularies put one before a text: pieces by themselves would have one each."""
    tokenizer = blank_tokenizer(everywhere)
    renderer = Renderer(tokenizer, "json")
    given = [("user", "Be short.\n\nfind order 512"), ("assistant", "The lamp."), ("user", " and\nnow?")]
    said = [Message(role, text) for role, text in [("user", "find order 512"), *given[1:]]]
    talk = renderer.start(Prompt("Be short.", (), said[:2]), said[2:])
    messages: Any = [{"role": role, "content": text} for role, text in given]
    wanted = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert talk.ids == wanted
    shown = renderer.demonstration(Prompt("Be short.", (), said[:2]), [*said[2:], Message("assistant", "error")])
    messages.append({"role": "assistant", "content": "error"})
    assert shown.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert renderer.read(shown.ids[len(talk.ids) :], ()).content == "error"
    assert renderer.text_ids("a lamp") == tokenizer.encode("a lamp", add_special_tokens=False)


def test_blanks_that_cannot_be_taken_from_a_tokenizer_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renderer_file.Segments, "of", lambda tokenizer: None)
    with caplog.at_level(logging.WARNING, "trace.models"):
        Renderer(blank_tokenizer(False))
    assert "puts a blank before every piece of a conversation" in caplog.messages[-1]
    caplog.clear()
    Renderer(header_tokenizer())
    assert not caplog.messages


@pytest.mark.parametrize("calls", ["compact", "json"])
def test_a_written_call_is_read_back(calls: str) -> None:
    tokenizer = header_tokenizer()
    renderer = Renderer(tokenizer, calls)
    for call in (
        ToolCall("refund", {"order": 512, "amount": 7}, "call_0"),
        ToolCall("refund", {"order": 512, "amount": 7.5}, "call_0"),
        ToolCall("move", {"order": 3, "address": "12 Elm Street, (back) é"}, "call_0"),
        ToolCall("person", {}, "call_0"),
    ):
        written = renderer.content(Message("assistant", "", (call,)))
        ids = tokenizer.encode(written, add_special_tokens=False, split_special_tokens=True)
        action = renderer.read([*ids, renderer.end_id], TOOLS)
        assert action.tool_calls == (call,)
        assert action.malformed == action.content == ""


def test_several_calls_and_a_text_in_one_json_turn() -> None:
    calls = (ToolCall("person", {}, "call_0"), ToolCall("move", {"order": 1, "address": "x"}, "call_1"))
    action = JsonCalls().read(JsonCalls().write("One moment.", calls), TOOLS)
    assert (action.content, action.tool_calls) == ("One moment.", calls)


def test_of_several_calls_the_compact_form_shows_each_in_a_turn_with_its_result() -> None:
    """As a client's history has them, from a model that calls several tools at once; ids tell whose result it is."""
    calls = (ToolCall("refund", {"order": 512}, "a"), ToolCall("person", {}, "b"), ToolCall("move", {"order": 3}, "c"))
    results = [Message("tool", f"result of {call}", tool_call_id=call) for call in ("b", "a", "c")]
    asked, then = Message("user", "do it"), [Message("assistant", "Done."), Message("user", "and now?")]
    apart = [Message("assistant", "", (call,)) for call in calls]
    wanted = [asked, apart[0], results[1], apart[1], results[0], apart[2], results[2], *then]
    renderer, prompt = Renderer(header_tokenizer()), Prompt("Answer.", TOOLS)
    given = [asked, Message("assistant", "", calls), *results, *then]
    assert renderer.start(prompt, given) == renderer.start(prompt, wanted)
    assert renderer.demonstration(prompt, given[:-1]) == renderer.demonstration(prompt, wanted[:-1])
    for message in wanted:
        assert CompactCalls().turns([message]) == JsonCalls().turns([message]) == [message]


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "{}",
        '{"name": "refund", "arguments": [1]}',
        '{"name": "refund", "arguments": {"amount": NaN}}',
        '{"name": "refund", "arguments": {"amount": -Infinity}}',
        '{"name": "move", "arguments": {"address": "\\ud800"}}',
        "[" * 100_000,
    ],
)
def test_malformed_json_calls(body: str) -> None:
    action = JsonCalls().read(f"<tool_call>{body}</tool_call>", TOOLS)
    assert action.malformed
    assert not action.tool_calls


def test_cut_off_json_call_is_malformed_and_text_is_not() -> None:
    assert JsonCalls().read('<tool_call>{"name": "ref', TOOLS).malformed
    assert JsonCalls().read("Hello (there).", TOOLS).content == "Hello (there)."


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("refund(512, nan)", {"order": 512, "amount": "nan"}),
        ("refund(512, inf)", {"order": 512, "amount": "inf"}),
        ("refund(512)", {"order": 512}),
        ("refund(many, 7)", {"order": "many", "amount": 7}),
        ("unknown(1, 2)", {"argument_0": "1", "argument_1": "2"}),
        ("person(1)", {"argument_0": "1"}),
    ],
)
def test_compact_calls_that_do_not_fit_reach_the_environment(text: str, arguments: dict[str, Any]) -> None:
    (call,) = CompactCalls().read(text, TOOLS).tool_calls
    if call.name == "unknown":
        assert list(call.arguments.values()) == ["1, 2"] or dict(call.arguments) == arguments
    else:
        assert dict(call.arguments) == arguments


def test_compact_turns_that_are_no_calls() -> None:
    assert CompactCalls().read("Order 512 (the lamp) is pending.", TOOLS).content
    assert CompactCalls().read("  ", TOOLS).malformed == "(nothing)"


@pytest.mark.parametrize("parameters", [None, {}, {"properties": None}])
def test_a_tool_whose_parameters_are_null_has_none(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "person", "parameters": parameters}}]
    assert CompactCalls().system("Be short.", tools) == "Be short.\nCalls: person()"
    assert CompactCalls().read("person()", tools).tool_calls == (ToolCall("person", {}, "call_0"),)


@pytest.mark.parametrize("text", ['f(a=5, b="x")', "f(a=1); g(b=(2, 3))"])
def test_without_tools_a_turn_that_looks_like_a_call_is_a_message(text: str) -> None:
    action = CompactCalls().read(f" {text}\n", ())
    assert (action.content, action.tool_calls, action.malformed) == (text, (), "")
    assert CompactCalls().read("", ()).malformed == "(nothing)"


def test_signatures_are_added_only_where_they_are_missing() -> None:
    shown = "Calls: refund(order, amount) move(order, address) person()"
    assert CompactCalls().system(shown, TOOLS) == shown
    assert "refund(order, amount)" in CompactCalls().system("Be short.", TOOLS)
    assert JsonCalls().system("Be short.", ()) == "Be short."


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("", "no chat template"),
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'assistant' %}"),
            "'assistant'",
        ),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'] | upper }}"), "drops"),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if loop.index0 % 2 else '<|im_start|>' }}"), "differently"),
        (CHATML + "{{ raise_exception('system not supported') }}", "fails on roles"),
    ],
)
def test_templates_that_are_refused(template: str, what: str) -> None:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"], template)
    with pytest.raises(ConfigurationError, match=what):
        Renderer(tokenizer)


def test_unknown_call_format_and_unknown_turn() -> None:
    with pytest.raises(ConfigurationError, match="'xml'"):
        Renderer(header_tokenizer(), "xml")
    renderer = Renderer(header_tokenizer())
    with pytest.raises(ConfigurationError, match="may follow"):
        renderer.start(Prompt("a", TOOLS), [Message("tool", "result before any call")])


def test_fingerprint_tells_templates_and_formats_apart() -> None:
    prints = {
        Renderer(t, c).fingerprint for t in (header_tokenizer(), metaspace_tokenizer()) for c in ("compact", "json")
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("name", "kept"), [("", True), ("qwen3", True), ("llama3_2", False), ("deepseek_r1_distill", False)]
)
def test_a_fingerprint_changes_where_a_template_is_written_or_read_otherwise_than_before(name: str, kept: bool) -> None:
    """What was played with a base is looked up by it: of others, such as the embedded one, it stays."""
    tokenizer = shipped_tokenizer(name) if name else smollm2()
    made = Renderer(tokenizer, "json").fingerprint
    assert (made == content_hash([tokenizer.chat_template, "json"])) is kept


def test_ids_are_kept_of_so_many_characters_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server's clients send long texts, each once, between the instructions that all of them begin with."""
    monkeypatch.setattr(renderer_file, "KEPT_CHARACTERS", 100)
    renderer, encoded = Renderer(header_tokenizer()), list[str]()
    plain = renderer._encode_plain
    monkeypatch.setattr(renderer, "_encode_plain", lambda text: encoded.append(text) or plain(text))
    for text in ("a" * 40, "b" * 50, "a" * 40, "c" * 50, "a" * 40, "b" * 50, "d" * 101, "d" * 101):
        assert renderer.text_ids(text) == plain(text)
    assert encoded == ["a" * 40, "b" * 50, "c" * 50, "b" * 50, "d" * 101, "d" * 101]
