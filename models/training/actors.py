"""Who samples for the trainer: the trainer's own model in this process, or vLLM servers that get each step's adapter.

On servers only the adapter travels, as a PEFT folder under a name that is used once; the base is never merged with it.
It is used after the server was seen to answer as the trainer's model does.
"""

from __future__ import annotations

import logging
import math
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from errors import NotFinite, TraceError
from models.adapters.deltas import lora_deltas
from models.adapters.files import export_adapter, order_config
from models.adapters.fingerprint import BASE_APART, LONGEST, moves, prove
from models.local.policy import LocalPolicy
from models.out_of_memory import let_go
from models.policy import TokenPolicy
from models.training.ranks import fingerprint_of
from models.vllm.policy import VllmPolicy

logger = logging.getLogger("trace.models")


class Actor(Protocol):
    """`model` is what is trained, `policy` what samples, `rows` the turns that it computes at once.

    `publish` makes the adapter as it is after `step` available and returns its name; `rest` gives memory back for the
    backward pass; `retire` forgets the last adapter.
    """

    @property
    def model(self) -> Any: ...
    @property
    def policy(self) -> TokenPolicy: ...
    @property
    def rows(self) -> int: ...
    def publish(self, step: int, peft: Any) -> str: ...
    def rest(self) -> None: ...
    def retire(self) -> None: ...


@contextmanager
def retired_after(actor: Actor) -> Iterator[None]:
    """Within, a training is made; the actor is retired however it ends.

    After a problem the failed step lets go of its memory first: servers on the same GPU could not wake beside it. Where
    retiring fails, too, the first problem is the one that is raised: it says what happened, and whether to try again.
    """
    try:
        yield
    except BaseException as problem:
        let_go(problem)
        try:
            actor.retire()
        except Exception as further:
            logger.error(
                "after a training that failed (%s: %s) its sampler could not be given back: %s; servers that are left "
                "asleep are woken at the next start",
                type(problem).__name__,
                problem,
                further,
            )
        raise
    actor.retire()


class LocalActor:
    """The model that is trained samples by itself."""

    name = "training"

    def __init__(self, policy: LocalPolicy) -> None:
        self.model, self.policy, self.rows = policy.model, policy, policy.rows

    def publish(self, step: int, peft: Any) -> str:
        self.policy.load_deltas(self.name, f"step-{step}", lora_deltas(peft))
        return self.name

    def rest(self) -> None:
        self.policy.free_buffers()

    def retire(self) -> None:
        if self.name in self.policy.adapters:
            self.policy.unload_adapter(self.name)


class VllmActor:
    """vLLM servers sample. `folder` is one that they see; `probe` are ids of a text in whose end the adapter is looked
    for (two or more). `name` begins the names of the step's adapters. With `sleeps` the servers share a GPU with the
    training: they sleep from the last turn of a step to the next step's adapter, and are awake again at the end."""

    def __init__(
        self, policy: VllmPolicy, model: Any, folder: Path, probe: Sequence[int], name: str, sleeps: bool = False
    ) -> None:
        self.model, self.policy, self.rows, self.sleeps = model, policy, policy.rows, sleeps
        self._asleep = False
        self.folder, self.probe, self.name = folder, tuple(probe[-LONGEST:]), name
        self._served: dict[str, Path] = {}

    def publish(self, step: int, peft: Any) -> str:
        """Raises `AdapterError` when a server does not answer as the trainer's model does, and `NotFinite` for an
        adapter that has come apart: no server can be blamed for that, and none is asked."""
        if any(not weight.isfinite().all() for key, weight in peft.named_parameters() if "lora_" in key):
            raise NotFinite(f"the adapter of {self.name} after step {step} has weights that are not finite")
        self._wake()
        name = f"{self.name}.step{step}-{uuid.uuid4().hex[:8]}"
        written, folder = self.folder / f".{name}", self.folder / name
        peft.save_pretrained(str(written), safe_serialization=True)
        export_adapter(order_config(written), folder)
        shutil.rmtree(written)
        self._served[name] = folder
        self.policy.load_adapter(name, f"step-{step}", folder)
        expected = fingerprint_of(peft, self.probe)
        if not all(map(math.isfinite, expected.adapted)):
            raise NotFinite(f"the adapter of {self.name} after step {step} gives log-probabilities that are not finite")
        # A first step's adapter is zero and moves nothing: then only the base can be compared.
        proven = self.policy.on_each(lambda server: prove(server, expected, name, still=not moves(expected)))
        for address, found in proven.items():
            logger.info(
                "%s on %s: moves the probe by %.4f nats, base %.3f apart (alarm at %.1f)",
                name,
                address,
                found.moved,
                found.base_apart,
                BASE_APART,
            )
        self._forget(but=name)
        return name

    def rest(self) -> None:
        """Nothing to do where the memory is the servers' alone."""
        if self.sleeps:
            self._asleep = True  # also where only some of them fall asleep: all are woken
            for server in self.policy.servers:
                server.sleep()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _wake(self) -> None:
        """Wake all servers. Raises the first problem when each was asked: one that cannot leaves no other asleep."""
        if self._asleep:
            if torch.cuda.is_available():  # what the backward pass has freed is theirs again
                torch.cuda.empty_cache()
            problems: list[TraceError] = []
            for server in self.policy.servers:
                try:
                    server.wake_up()
                except TraceError as problem:
                    problems.append(problem)
            if problems:
                raise problems[0]
            self._asleep = False

    def retire(self) -> None:
        self._wake()
        self._forget()

    def _forget(self, but: str = "") -> None:
        """Unload and remove what was served, also of a step whose proof failed."""
        for name in [name for name in self._served if name != but]:
            if name in self.policy.adapters:
                self.policy.unload_adapter(name)
            # A copy of what the checkpoint holds.
            shutil.rmtree(self._served.pop(name), ignore_errors=True)
