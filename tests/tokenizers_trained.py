"""Tokenizers trained here, with templates as different as chat models have them, and a random model to go with one."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.local.attention import NAME
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity
from models.renderer import Renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The shape of Llama 3's: a begin-of-text token, headers, an end-of-turn token without a line break.
HEADERS = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The shape of Mistral's: only end-of-turn tokens, roles as bracketed words.
BRACKETS = (
    "<s>{% for m in messages %}{% if m['role'] == 'assistant' %}[ANSWER]{{ m['content'] }}</s>"
    "{% else %}[{{ m['role'] | upper }}]{{ m['content'] }}[/{{ m['role'] | upper }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[ANSWER]{% endif %}"
)
# The shape of Mistral 7B's to v0.3: no system turns, and a blank before what is said.
BLANKS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
SPECIAL = re.compile(r"<\|\w+\|>|<\w+_of_turn>|\[gMASK\]|<sop>")
CORPUS = [
    "Please cancel order 512. The lamp is 22 dollars, red and small. refund(order, amount) find(order) error: no",
    '<tool_call>{"name": "move", "arguments": {"order": 314, "address": "12 Elm Street"}}</tool_call>',
    "You work at the desk of a shop. Answer with one call or one short sentence. ü é 漢字 ☃ user assistant system tool",
]


def _wrapped(tokenizer: Tokenizer, special: list[str], template: str) -> PreTrainedTokenizerFast:
    unknown = "<unk>" if "<unk>" in special else None
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special, unk_token=unknown)
    fast.chat_template = template
    return fast


def byte_level(special: list[str], template: str, size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, special, template)


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, ChatML."""
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"], CHATML)
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def header_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, Llama-3-like headers."""
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_level(special, HEADERS, 330)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram over spaces, Mistral-like brackets; unknown characters are lost, and spaces are words' beginnings."""
    special = ["<unk>", "<s>", "</s>", "[ANSWER]"]
    special += [f"[{slash}{role}]" for role in ("SYSTEM", "USER", "TOOL") for slash in ("", "/")]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    ascii_all = [chr(c) for c in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", initial_alphabet=ascii_all
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return _wrapped(tokenizer, special, BRACKETS)


def blank_tokenizer(everywhere: bool) -> PreTrainedTokenizerFast:
    """BPE over spaces that puts one of its own before a text, or before each part of it between markers (`everywhere`,
    as Llama 2's files say it)."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if everywhere:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = _wrapped(tokenizer, special, BLANKS)
    fast.bos_token, fast.eos_token = "<s>", "</s>"
    return fast


def shipped_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Byte-level, with a real template that TRL ships, such as "qwen3", and the special tokens that it names."""
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = byte_level([*sorted(set(SPECIAL.findall(template))), "<bos>", "</s>"], template, 420)
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", "</s>"
    return tokenizer


def tiny_policy(tokenizer: Any, rows: int = 8, context: int = 512) -> tuple[LocalPolicy, Renderer]:
    """A random Llama (3 layers, hidden 64, 4 heads over 2 key-value heads) in fp32, equal at every call."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        tie_word_embeddings=True,
        attn_implementation=NAME,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.requires_grad_(False)
    renderer = Renderer(tokenizer)
    identity = PolicyIdentity("tiny", "1", "float32", "", renderer.fingerprint)
    return LocalPolicy(model, identity, renderer.stop_ids, rows), renderer


def plain_twin(policy: LocalPolicy) -> Any:
    """The same weights in a model of their own with transformers' eager attention: what the engine is held against."""
    import copy

    config = copy.deepcopy(policy.model.config)
    config._attn_implementation = "eager"
    twin = type(policy.model)._from_config(config, attn_implementation="eager")
    twin.load_state_dict(policy.model.state_dict())
    return twin.to(next(policy.model.parameters()).dtype).eval()


def random_ids(seed: int, length: int, vocabulary: int = 400) -> list[int]:
    """`length` ids, none of the first four (special ones)."""
    rng = random.Random(seed)
    return [rng.randrange(4, vocabulary) for _ in range(length)]
