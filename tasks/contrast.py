"""Stage 2, `trace-agent stage contrast`: candidate capabilities, and a label for every pair of trajectory and
capability (method, section 2): from the verifier's checks, or by a language model."""

from __future__ import annotations

import logging

import pandas as pd

from db.rows.conversations import TRAFFIC
from tasks.mining.checks_analyst import bootstrap_labels, discover_candidates
from tasks.mining.labels import store_candidates, store_labels
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.round.context import Context
from tasks.round.results import ContrastResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.targets.kinds import nameless

logger = logging.getLogger("trace")


@stage("contrast", title="contrast successes with failures")
def contrast(context: Context) -> ContrastResult:
    """Candidates and labels of the diagnosis trajectories that have a reward."""
    found = outcomes(context.store, context.stored.diagnosis().trajectories)
    frame = found.rename(columns={"id": "trajectory_id", "task": "task_id", "success": "passed"})
    if context.settings.analyst.kind == "llm":
        return LlmAnalyst.of(context).contrast(frame, context.settings.selection.required)
    return _contrast_by_checks(context, frame)


def _contrast_by_checks(context: Context, frame: pd.DataFrame) -> ContrastResult:
    """The N runs are bootstrap resamples of the trajectories, so that K of N measures stability. Kinds that cannot name
    a capability are left out: what was played is of use for all others. Of what is only looked at (`traffic`) nothing
    is trained, and any kind will do."""
    store, round_id = context.store, context.round.id
    checks = store.check_frame(None, id=list(frame["trajectory_id"]))
    required = checks["required"].astype(bool)
    wrong = {} if context.round.target == TRAFFIC else nameless(sorted(set(checks[required]["kind"])))
    left_out = {kind: f"{why}, and change data_hash: what is stored keeps its kinds" for kind, why in wrong.items()}
    for kind, why in left_out.items():
        logger.warning("checks of the kind %r are left out: it %s", kind, why)
    checks = checks[~checks["kind"].isin(list(left_out))]
    candidates = discover_candidates(checks, frame)
    known = {c.name for c in candidates}
    store_candidates(store, round_id, "checks", candidates)
    labels = bootstrap_labels(checks, frame, context.settings.selection.runs, context.seed)
    labels = labels[labels["capability"].isin(known)]
    store_labels(store, round_id, labels)
    return ContrastResult(analyst="checks", candidates=sorted(known), labels=len(labels), left_out=left_out)
