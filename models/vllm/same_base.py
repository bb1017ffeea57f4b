"""Servers and trainer hold the same base: proven by the log-probabilities of a text, before the first episode.

A server is started by hand, with a name of one's choosing: the name proves nothing. With another model or another
revision behind it, every episode would be sampled by what is not trained.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from environments.contract import Message, Prompt
from errors import ConfigurationError
from models.adapters.fingerprint import COUNT
from models.local.shapes import longrope_mark

if TYPE_CHECKING:
    from models.local.base import BaseModel
    from models.vllm.policy import VllmPolicy

logger = logging.getLogger("trace.models")

# Nats a token, in the mean: bfloat16 on one side and float32 on the other were seen 0.04 apart, other weights are more.
APART = 0.2
# Ids of the text: a beginning for the first that is scored, too.
LENGTH = 3 * COUNT
_ASKED = (
    "A customer bought a blue lamp on Monday and wants to return it. The lamp is broken. What should the shop do first?"
)


def probe_ids(policy: VllmPolicy, base: BaseModel) -> list[int]:
    """A text that both can score, as the base is shown it."""
    talk = base.renderer.start(Prompt("You work at the desk of a shop."), [Message("user", _ASKED)])
    return talk.ids[-min(LENGTH, policy.context - 1, base.policy.context) :]


def prove_same_base(policy: VllmPolicy, base: BaseModel) -> None:
    """Raises `ConfigurationError` when the servers' base is not the trainer's. That all servers have one and the same
    is proven before (`models/vllm/equality.py`), so one of them speaks for all."""
    mark = longrope_mark(base.policy.model.config)
    if mark is not None and policy.context > mark:  # then vLLM uses the long factors for every text, the short ones too
        raise ConfigurationError(
            f"{policy.servers[0].url} takes {policy.context} tokens, and {base.identity.base!r} has LongRoPE, which is "
            f"trained up to {mark} here and is another beyond; start the servers with --max-model-len {mark} or less"
        )
    ids = probe_ids(policy, base)
    count = min(COUNT, len(ids) - 1)
    mine, theirs = np.asarray(base.policy.score(ids, count)), np.asarray(policy.score(ids, count))
    apart = float(np.abs(theirs - mine).mean())
    where, model = " and ".join(server.url for server in policy.servers), policy.servers[0].model
    if not apart <= APART:
        raise ConfigurationError(
            f"{where} does not serve {base.identity.base!r} (revision {base.identity.revision}) as {model!r}: its "
            f"log-probabilities of a text are {apart:.2f} nats a token from the trainer's (at most {APART}); start it "
            "with the same weights (--model, --revision), or set base_model to what it serves"
        )
    logger.info("%s serves the trainer's base: %.4f nats a token apart (at most %.1f)", where, apart, APART)
