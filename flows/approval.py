"""A person's word before a release is promoted: the run pauses in Prefect's UI with the gate's table (setting
`unattended.approve`). No stage is held meanwhile, and the wait counts to no limit of the round; that its process lives
is said all the same, as always while it has the round open (`opened` in `flows/improve.py`)."""

from __future__ import annotations

import time
from typing import Any

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from db import ReleaseState
from errors import NotApproved
from tasks.gate import proposal_of
from tasks.operations.announcements import tell_question
from tasks.round.context import Context
from tasks.round.results import GateResult
from tasks.unattended.stalls import unwatched

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
            answer = pause_flow_run(
                wait_for_input=form, timeout=int(3600 * wanted.approval_hours), poll_interval=POLL_SECONDS
            )
    except FlowPauseTimeout:
        raise NotApproved(
            f"release {proposal.candidate.number} of {context.round.target} waits for approval, and nobody answered "
            f"within unattended.approval_hours = {wanted.approval_hours:g}; run the round again to be asked again"
        ) from None
    finally:
        context.limits.waited(time.monotonic() - began)
    context.declined = "" if answer.promote else answer.reason or "no reason given"
    context.answered = proposal.candidate.id
