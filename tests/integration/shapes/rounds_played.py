"""A whole round of the profile `smoke` on a tiny random model of an architecture: what it did, read from its store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from db import AdapterRow, StageRow, TrainingStepRow, VerdictRow, open_store
from flows.improve import ImproveParameters, improve
from flows.order import PRACTISE, STAGES
from tests.integration.shapes.shapes_served import policy_on
from tests.integration.targets.signs import CAPABILITY
from tests.integration.vllm_servers import Server

TARGET = "tests.integration.targets.signs:target"
# The template that a shape's checkpoints come with, as TRL ships it.
TEMPLATES: Mapping[str, str] = {
    "llama": "llama3_2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_instruct_2507",
    "gemma": "gemma",
    "gpt_oss": "gptoss",
}
# What a random model needs beside the profile: its noise is diverse when it is hot alone, two layers are all it has,
# and the gate is lenient, so that a gain on two dozen tasks brings the round to the assembled release.
HOT: Mapping[str, str] = {
    "DTYPE": "float32",
    "ROLLOUT__TEMPERATURE": "1.0",
    "ROLLOUT__TASKS": "0",
    "ROLLOUT__MAX_TOKENS": "6",
    "CALIBRATION__POLICY_EPISODES": "20",
    "TRAIN__STEPS": "12",
    "TRAIN__GROUPS": "6",
    "TRAIN__GROUP_SIZE": "8",
    "TRAIN__TEMPERATURE": "1.0",
    "TRAIN__LEARNING_RATE": "0.006",
    "TRAIN__UPPER_LAYERS": "0",
    "EVALUATION__FRESH": "16",
    "EVALUATION__VALIDATION_TRIALS": "2",
    "EVALUATION__ALPHA": "0.9",
}
# The capability's stages carry its name in the ledger.
OWED = {f"{name}:{CAPABILITY}" if name in {s.name for s in PRACTISE} else name for name in STAGES}


@dataclass(frozen=True)
class Played:
    """What a round left: stages that are done (`missing`: those that are not), registered versions, episodes that an
    adapter answered on validation, the furthest that trainer and sampler were apart in a step of training (nats, mean
    of a token), the nats that the adapter moves the probe, the gate's verdicts, and seconds."""

    stages: int
    missing: tuple[str, ...]
    versions: tuple[str, ...]
    answered: int
    gap: float
    live: float
    verdicts: tuple[str, ...]
    seconds: float
    report: Path

    def short_of(self, tolerance: float) -> list[str]:
        """What a whole round must have and this one has not; none when all is there."""
        wrong = [f"not done: {', '.join(self.missing)}"] if self.missing else []
        if not self.versions:
            wrong.append("no adapter was registered")
        if not self.answered:
            wrong.append("no adapter answered on validation")
        if not self.gap <= tolerance:
            wrong.append(f"trainer and sampler are {self.gap:.3g} nats apart, at most {tolerance} are right")
        if not self.live > 0:
            wrong.append("the adapter does not move the probe")
        if not self.verdicts:
            wrong.append("the gate has no verdict")
        if not self.report.is_file():
            wrong.append(f"no report at {self.report}")
        return wrong


def round_played(model: Path, home: Path, server: Server | None = None) -> Played:
    """Play `trace-agent improve` in this process on the base in the folder `model`, whose turns `server` samples;
    without one the model in this process does."""
    given = {f"TRACE_{name}": value for name, value in HOT.items()}
    if server is not None:
        given |= {f"TRACE_POLICY__{name.upper()}": str(value) for name, value in policy_on(server).items()}
    began = time.monotonic()
    with patch.dict(os.environ, given):
        done = improve(ImproveParameters(target=TARGET, profile="smoke", base_model=str(model), home=home))
    seconds = time.monotonic() - began
    with open_store(f"sqlite:///{home / 'trace.db'}") as store:
        states = {row.name: row.state for row in store.rows(StageRow, round_id=done.round)}
        adapters = store.rows(AdapterRow, round_id=done.round)
        steps = [step for a in adapters for step in store.rows(TrainingStepRow, adapter_id=a.id)]
        answered = [t for t in store.trajectories(done.round, purpose="evaluation") if t.adapter_id and not t.error]
        verdicts = store.rows(VerdictRow, round_id=done.round)
    finished = {name for name in OWED if states.get(name) == "done"}
    return Played(
        len(finished),
        tuple(sorted(OWED - finished)),
        tuple(a.registered_version for a in adapters if a.registered_version),
        len(answered),
        max((step.logprob_gap for step in steps if step.logprob_gap is not None), default=float("nan")),
        max((float(a.metrics.get("liveness", 0.0)) for a in adapters), default=0.0),
        tuple(f"{v.subject}: {v.verdict}" for v in verdicts),
        seconds,
        Path(done.report),
    )
