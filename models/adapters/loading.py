"""A PEFT folder becomes usable on a policy: its bytes are checked, it is loaded under a name, and it is proven live.

Rounds, evaluations and blends load through here. A gateway's fleet has its own way (`models/serving/fleet/fleet.py`):
it fetched and checked the bytes itself, goes on when one of several servers is away, and loads between the turns of
others; it shares the proof (`models/adapters/fingerprint.py`).
"""

from __future__ import annotations

from pathlib import Path

from errors import AdapterError, NotFinite
from models.adapters.files import WEIGHTS, adapter_digest
from models.adapters.fingerprint import Fingerprint, take_fingerprint
from models.policy import Request, Sampling, TrainablePolicy
from models.renderer import Conversation

# Tokens of an adapter's own answer behind the probe.
ANSWER_TOKENS = 12


def load_folder(policy: TrainablePolicy, folder: Path, capability: str, origin: str, digest: str) -> str:
    """Make an adapter's folder usable; returns the name to sample with, which is the policy's to choose.

    `digest` is the SHA-256 that was stored when the adapter was made (`adapter_digest`), `origin` tells its name from
    those of other rounds. Nothing is loaded twice. Raises `AdapterError` for a folder that holds other bytes, and
    `NotFinite` for weights that have come apart: of a server's answers alone they look like a server that is broken.
    """
    found = adapter_digest(folder)
    if found != digest:
        raise AdapterError(
            f"the adapter for {capability!r} in {folder} has SHA-256 {found[:16]}..., stored is {digest[:16]}...; its "
            "files were changed: train it again with --fresh"
        )
    name = policy.adapter_name(capability, origin, digest)
    if name not in policy.adapters or policy.identity(name).adapter != digest:
        check_finite(folder, capability)
        policy.load_adapter(name, digest, folder)
    return name


def check_finite(folder: Path, capability: str) -> None:
    """Raise `NotFinite` for an adapter's folder with a weight that is no number any more."""
    from safetensors import safe_open

    with safe_open(str(folder / WEIGHTS), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            if not file.get_tensor(key).isfinite().all():
                raise NotFinite(
                    f"the adapter for {capability!r} in {folder} has weights that are not finite ({key}); train it "
                    "again with a lower learning rate"
                )


def fingerprint_on(policy: TrainablePolicy, probe: Conversation, adapter: str) -> Fingerprint:
    """What a server that holds the adapter must answer: taken on the probe and the adapter's own greedy answer to it.

    A probe that is longer than the policy's context is cut at its beginning. Raises `AdapterError` when the adapter
    changes nothing.
    """
    ids = probe.ids[-(policy.context - ANSWER_TOKENS) :]
    shared = probe.shared if len(ids) == len(probe.ids) else 0
    (answer,) = policy.generate([Request("fingerprint", ids, Sampling(0.0, ANSWER_TOKENS), adapter, shared)])
    return take_fingerprint(policy, [*ids, *answer.ids], adapter)
