"""A person's word before a release is promoted: the run pauses in Prefect's UI with the gate's table (setting
`unattended.approve`). No stage is held meanwhile, and the wait counts to no limit of the round; that its process lives
is said all the same, as always while it has the round open (`opened` in `flows/improve.py`)."""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import uuid4

import httpx
from prefect.exceptions import FlowPauseTimeout, Pause
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from db import ReleaseState
from errors import NotApproved
from tasks.gate import proposal_of
from tasks.operations.announcements import tell_question
from tasks.round.context import Context
from tasks.round.results import GateResult
from tasks.unattended.prefect_pages import is_away
from tasks.unattended.stalls import unwatched

logger = logging.getLogger("trace")

POLL_SECONDS = 10


class Approval(RunInput):
    """The form that Prefect's UI shows."""

    promote: bool = Field(default=False, description="make the candidate the live release")
    reason: str = Field(default="", description="why not; it is stored with the verdict")


def ask_approval(context: Context) -> None:
    """Ask, where the settings want it and the gate would promote. What a person declines the gate will refuse. Where
    the round comes here again, as after a store that was away at the gate, it asks nobody again who has answered.

    Where methods are compared (a round with a budget of its own) nobody is asked. Raises `NotApproved` when nobody
    answers within `unattended.approval_hours`.
    """
    wanted = context.settings.unattended
    if not wanted.approve or context.budget is not None or context.found(GateResult) is not None:
        return
    proposal = proposal_of(context)
    if proposal is None or not proposal.decision.promoted or proposal.candidate.state != ReleaseState.CANDIDATE:
        return  # also where it is live already, and only what follows its promotion was not done
    if context.answered == proposal.candidate.id:
        return
    tell_question(context, proposal.candidate.number)
    form: Any = Approval.with_initial_data(description=proposal.table(), promote=False)
    began = time.monotonic()
    try:
        with unwatched():
            answer = _answered(form, 3600 * wanted.approval_hours)
    except FlowPauseTimeout:
        raise NotApproved(
            f"release {proposal.candidate.number} of {context.round.target} waits for approval, and nobody answered "
            f"within unattended.approval_hours = {wanted.approval_hours:g}; run the round again to be asked again"
        ) from None
    finally:
        context.limits.waited(time.monotonic() - began)
    context.declined = "" if answer.promote else answer.reason or "no reason given"
    context.answered = proposal.candidate.id


def _answered(form: Any, seconds: float) -> Any:
    """What a person said in this form, within `seconds`. While Prefect's server is away the question stays asked: the
    server keeps the pause, by a key of its own, and the answer that was given to it. Raises `FlowPauseTimeout`."""
    key, ends, asked_before = uuid4().hex, time.monotonic() + seconds, False
    while True:
        try:
            left = max(1, round(ends - time.monotonic()))
            return pause_flow_run(wait_for_input=form, timeout=left, poll_interval=POLL_SECONDS, key=key)
        except httpx.HTTPError as problem:
            if not is_away(problem):
                raise
            if not asked_before:
                logger.warning("Prefect's server is away (%s); the question is kept until it is back", problem)
            asked_before = True
        except Pause:  # the server is back, and has the run as paused
            if not asked_before:
                raise
        if time.monotonic() >= ends:
            raise FlowPauseTimeout("nobody answered while Prefect's server could be asked")
        time.sleep(POLL_SECONDS)
