"""Stage 6, `trace-agent stage route`: assemble the candidate release, the live one's adapters with those that passed,
and fit the router for exactly these (method, section 6; the router is `models.router.router`, what it is fitted on
`tasks.routing.examples`).
"""

from __future__ import annotations

import logging
from collections import Counter

from tasks.measuring.lineup import lineup_of, try_on_diagnosis
from tasks.round.adapters import own_adapter
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, RouteResult
from tasks.round.stage import stage
from tasks.routing.candidate import ROUTER, member_versions, old_blends, routed_members, save_router, stored_candidate
from tasks.routing.examples import definitions_of, examples_of
from tasks.routing.fitting import fitted
from tasks.tracking.wrong_routes import answers_unlike, tell_wrong_routes

logger = logging.getLogger("trace")


@stage("route", title="assemble the candidate, fit its router")
def route(context: Context) -> RouteResult:
    """Fit on first observations, choose mode and threshold on the share kept out, and store the candidate release."""
    challenged = context.result(ChallengeResult)
    if not challenged.passed:
        return RouteResult(skipped=challenged.skipped or "no adapter was better than what answers today")
    new_adapters = {c: own_adapter(context.stored, c) for c in challenged.passed}
    members = routed_members(context.parent) | new_adapters
    trial_ids = try_on_diagnosis(context, challenged.passed)
    today = lineup_of(context, context.incumbent).router
    kept = today.unlike if today and today.unlike in members else ""
    unlike = answers_unlike(tell_wrong_routes(context, trial_ids), kept)
    examples = examples_of(context, members)
    with context.model:
        fit = fitted(context, examples, unlike, definitions=definitions_of(context, members))
    router = fit.router
    save_router(context, router, ROUTER)
    old = old_blends(context.parent, new_adapters)
    for name in old:
        logger.warning(
            "%s is left out of the candidate: it holds weights that the round has renewed; blend again", name
        )
    evidence = {"new": challenged.passed, "unlike": unlike, **({"blends_left": old} if old else {})}
    candidate = stored_candidate(context, member_versions(context, new_adapters), router, ROUTER, evidence)
    return RouteResult(
        candidate=candidate.id,
        version=router.version,
        mode=router.mode,
        tried=sum(len(ids) for ids in trial_ids.values()),
        examples=fit.examples,
        labels={k or "none": v for k, v in Counter(e.label for e in examples if e.label is not None).items()},
        threshold=router.certain,
        calibration=fit.judged,
        right=fit.right,
    )
