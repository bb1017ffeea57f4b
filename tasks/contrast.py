"""Stage 2, `trace-agent stage contrast`: candidate capabilities, and a label for every pair of trajectory and
capability (method, section 2): from the verifier's checks, or by a language model."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from db import GENERALIST
from errors import TargetError
from tasks.mining.checks_analyst import bootstrap_labels, discover_candidates
from tasks.mining.labels import store_candidates, store_labels
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.round.context import Context
from tasks.round.results import ContrastResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.round.traffic import TRAFFIC

_KIND = re.compile(r"[a-z0-9_]+")
# The adapter of all successes, and the gate's verdict on a release as a whole, stand beside capabilities by name.
_TAKEN = (GENERALIST, "release")


@stage("contrast", title="contrast successes with failures")
def contrast(context: Context) -> ContrastResult:
    """Candidates and labels of the diagnosis trajectories that have a reward."""
    found = outcomes(context.store, context.stored.diagnosis().trajectories)
    frame = found.rename(columns={"id": "trajectory_id", "task": "task_id", "success": "passed"})
    if context.settings.analyst.kind == "llm":
        return LlmAnalyst.of(context).contrast(frame, context.settings.selection.required)
    return _contrast_by_checks(context, frame)


def _contrast_by_checks(context: Context, frame: pd.DataFrame) -> ContrastResult:
    """The N runs are bootstrap resamples of the trajectories, so that K of N measures stability."""
    store, round_id = context.store, context.round.id
    checks = store.check_frame(None, id=list(frame["trajectory_id"]))
    candidates = discover_candidates(checks, frame)
    _check_kinds(context.round.target, [c.name for c in candidates])
    known = {c.name for c in candidates}
    store_candidates(store, round_id, "checks", candidates)
    labels = bootstrap_labels(checks, frame, context.settings.selection.runs, context.seed)
    labels = labels[labels["capability"].isin(known)]
    store_labels(store, round_id, labels)
    return ContrastResult(analyst="checks", candidates=sorted(known), labels=len(labels))


def _check_kinds(target: str, kinds: Sequence[str]) -> None:
    """Raise `TargetError` where a kind of checks cannot be a capability's name: adapters, folders and what Prefect
    shows are named by it. What is only looked at (`traffic`) trains none."""
    if target == TRAFFIC:
        return
    taken = [kind for kind in kinds if kind in _TAKEN]
    if taken:
        raise TargetError(
            f"target {target!r} has checks of the kind {', '.join(map(repr, taken))}, which names something else in a "
            "round; give Check.kind another name, then start again with --fresh"
        )
    wrong = [kind for kind in kinds if not _KIND.fullmatch(kind)]
    if wrong:
        raise TargetError(
            f"target {target!r} has checks of the kind {', '.join(map(repr, wrong))}, which cannot name a capability; "
            "give Check.kind in snake_case (a-z, 0-9 and _, such as 'ask_missing_fact'), then start again with --fresh"
        )
