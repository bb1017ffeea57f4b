"""A trajectory with its steps and checks, its way into columns and back, and the counts of a write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from db.values.text import clean_text, clean_value, dump_json
from db.values.types import utc_now
from errors import StoreError

if TYPE_CHECKING:  # a command that shows what is stored looks at no array, and numpy is a tenth of its start
    import numpy as np
    from numpy.typing import NDArray

PURPOSES = ("diagnosis", "calibration", "training", "transfer", "routing", "evaluation", "traffic")
BLOBS = ("token_ids", "sampled_mask", "logprobs")


@dataclass(frozen=True)
class StepRow:
    """One action (JSON object) and the messages that answered it; its index is its place in `TrajectoryRow.steps`."""

    action: Mapping[str, Any]
    observation: Sequence[Any]
    sampled_tokens: int = 0
    milliseconds: float = 0.0


@dataclass(frozen=True)
class CheckRow:
    """One verdict of the verifier; its index is its place in `TrajectoryRow.checks`."""

    name: str
    kind: str
    required: bool
    passed: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRow:
    """One episode, whole. `id` hashes what makes it unique (data, task, seed, trial, policy, environment version).

    `token_ids`, `sampled_mask` and `logprobs` are [T] or None: the conversation as ids, which of them the policy
    sampled, and their log-probabilities in nats (0.0 where not sampled). An infrastructure failure has `error_boundary`
    set, and neither reward nor success. `round_id` None is traffic outside a round.
    """

    id: str
    round_id: str | None
    purpose: str
    target: str
    data_hash: str
    environment: str
    task_id: str
    family: str
    split: str
    seed: int
    trial: int
    policy_id: str
    base: str
    termination: str
    reward: float | None = None
    success: bool | None = None
    adapter_id: str | None = None
    group_id: str | None = None
    error_boundary: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Any] = ()
    token_ids: Sequence[int] | NDArray[np.integer] | None = None
    sampled_mask: Sequence[bool] | NDArray[np.bool_] | None = None
    logprobs: Sequence[float] | NDArray[np.floating] | None = None
    steps: Sequence[StepRow] = ()
    checks: Sequence[CheckRow] = ()
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True)
class Written:
    """What a write of trajectories did: rows added, error rows replaced, rows that were there already."""

    added: int
    replaced: int
    unchanged: int


_PLAIN = tuple(
    f.name for f in fields(TrajectoryRow) if f.name not in (*BLOBS, "steps", "checks", "metrics", "messages")
)


def trajectory_values(row: TrajectoryRow) -> dict[str, Any]:
    """The columns of `trajectories` for a row; `StoreError` when the row contradicts itself."""
    from db.values.blobs import encode_ids, encode_logprobs, encode_mask

    _check(row)
    values = {name: clean_value(getattr(row, name), name, "of trajectory", row.id) for name in _PLAIN}
    values["metrics"] = dict(row.metrics)
    values["messages"] = list(row.messages)
    values["n_steps"] = len(row.steps)
    values["token_ids"] = None if row.token_ids is None else encode_ids(row.token_ids)
    values["sampled_mask"] = None if row.sampled_mask is None else encode_mask(row.sampled_mask)
    values["logprobs"] = None if row.logprobs is None else encode_logprobs(row.logprobs)
    return values


def step_values(row: TrajectoryRow) -> list[dict[str, Any]]:
    """The columns of `steps` for a trajectory, JSON written out: ready for `insert_new`."""
    return [
        {
            "trajectory_id": row.id,
            "idx": idx,
            "action": dump_json(step.action),
            "observation": dump_json(step.observation),
            "sampled_tokens": int(step.sampled_tokens),
            "milliseconds": float(step.milliseconds),
        }
        for idx, step in enumerate(row.steps)
    ]


def check_values(row: TrajectoryRow) -> list[dict[str, Any]]:
    """The columns of `checks` for a trajectory: ready for `insert_new`. `StoreError` for a text that is none."""
    for check in row.checks:
        if not all(isinstance(text, str) for text in (check.name, check.kind, check.detail)):
            raise StoreError(f"trajectory {row.id!r} has {check!r:.200}; its name, kind and detail are texts")
    return [
        {
            "trajectory_id": row.id,
            "idx": idx,
            "name": clean_text(check.name),
            "kind": clean_text(check.kind),
            "required": bool(check.required),
            "passed": bool(check.passed),
            "detail": clean_text(check.detail),
        }
        for idx, check in enumerate(row.checks)
    ]


def trajectory_from(
    values: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]]
) -> TrajectoryRow:
    """The row that was stored, with its arrays decoded (None where they were not read or not stored)."""
    from db.values.blobs import decode_ids, decode_logprobs, decode_mask

    given = {name: values[name] for name in _PLAIN}
    decoders = {"token_ids": decode_ids, "sampled_mask": decode_mask, "logprobs": decode_logprobs}
    arrays: dict[str, Any] = {
        name: None if values.get(name) is None else decode(values[name]) for name, decode in decoders.items()
    }
    return TrajectoryRow(
        **given,
        **arrays,
        metrics=values["metrics"],
        messages=values.get("messages", ()),
        steps=tuple(
            StepRow(s["action"], s["observation"], s["sampled_tokens"], s["milliseconds"])
            for s in sorted(steps, key=lambda s: s["idx"])
        ),
        checks=tuple(
            CheckRow(c["name"], c["kind"], c["required"], c["passed"], c["detail"])
            for c in sorted(checks, key=lambda c: c["idx"])
        ),
    )


def _check(row: TrajectoryRow) -> None:
    if row.purpose not in PURPOSES:
        raise StoreError(f"trajectory {row.id!r} has purpose {row.purpose!r}; use one of {', '.join(PURPOSES)}")
    if row.error_boundary is not None and (row.reward is not None or row.success is not None):
        raise StoreError(
            f"trajectory {row.id!r} failed at {row.error_boundary!r} and yet has reward {row.reward!r}, success "
            f"{row.success!r}; an infrastructure failure has neither"
        )
    lengths = {name: len(array) for name in BLOBS if (array := getattr(row, name)) is not None}
    if len(set(lengths.values())) > 1:
        raise StoreError(
            f"trajectory {row.id!r} has arrays of different lengths {lengths}; all are one value per token"
        )
