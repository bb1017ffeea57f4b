"""Label probabilities: the base model reads one letter per candidate after the request.

A small model prefers some letters for every request; dividing by the probabilities on an empty request removes that
preference (contextual calibration, Zhao et al. 2021, https://arxiv.org/abs/2102.09690, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
import torch

from errors import ConfigurationError
from models.local.policy import LocalPolicy
from models.renderer import Renderer

NONE_DESCRIPTION = "anything else"
# What stands for "no request" when the letters are calibrated.
EMPTY_REQUEST = "N/A"
ROWS_PER_PASS = 32


@dataclass(frozen=True)
class Candidate:
    """A capability that the label prompt offers. "" stands for no adapter; `example` is a request of its kind."""

    capability: str
    description: str = ""
    example: str = ""

    @property
    def line(self) -> str:
        """How the prompt names it."""
        name = self.capability.replace("_", " ")
        return ": ".join(part for part in (name, self.description or ("" if name else NONE_DESCRIPTION)) if part)


def label_prompt(candidates: Sequence[Candidate]) -> str:
    """The part of the prompt that all requests share: kinds, then an example of each that has one."""
    kinds = "\n".join(f"{letter}: {c.line}" for letter, c in zip(ascii_uppercase, candidates, strict=False))
    shown = "".join(
        f"Request: {c.example}\nKind: {x}\n\n" for x, c in zip(ascii_uppercase, candidates, strict=False) if c.example
    )
    return f"Kinds of requests:\n{kinds}\n\n{shown}"


def label_probabilities(
    policy: LocalPolicy, renderer: Renderer, candidates: Sequence[Candidate], requests: Sequence[str]
) -> np.ndarray:
    """Probabilities (n, candidates) of `requests`, calibrated on an empty request; rows sum to 1.

    Raises `ConfigurationError` for more candidates than letters, or a tokenizer that splits a letter.
    """
    if not 1 <= len(candidates) <= len(ascii_uppercase):
        raise ConfigurationError(
            f"{len(candidates)} candidates; the label prompt takes 1 to {len(ascii_uppercase)}: route by retrieval"
        )
    tokenizer = renderer.tokenizer

    def encode(text: str) -> list[int]:
        # A name or an observation that spells a special token stays text; and how special tokens are read is a setting
        # of the tokenizer, which others use at the same time.
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    letters = [encode(f" {letter}") for letter in ascii_uppercase[: len(candidates)]]
    if any(len(ids) != 1 for ids in letters):
        raise ConfigurationError("the tokenizer splits a letter after a space; route by retrieval")
    choices = torch.tensor([ids[0] for ids in letters])
    prefix = encode(label_prompt(candidates))
    texts = [f"Request: {' '.join(text.split())}\nKind:" for text in (EMPTY_REQUEST, *requests)]
    rows = [encode(t) for t in texts]
    logprobs = torch.cat(
        [_next(policy, rows[i : i + ROWS_PER_PASS], prefix, choices) for i in range(0, len(rows), ROWS_PER_PASS)]
    )
    calibrated = torch.softmax(logprobs[1:] - logprobs[:1], dim=-1)
    return np.asarray(calibrated.cpu().numpy(), dtype=np.float64)


@torch.inference_mode()
def _next(
    policy: LocalPolicy, rows: Sequence[Sequence[int]], prefix: Sequence[int], choices: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities (n, choices) of the next token among `choices`."""
    hidden = policy.forward_rows(rows, prefix)
    last = hidden[torch.tensor([len(row) for row in rows]).cumsum(0) - 1]
    return torch.log_softmax(policy.head(last).float(), dim=-1)[:, choices.to(last.device)]
