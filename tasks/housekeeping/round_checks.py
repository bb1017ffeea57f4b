"""What the settings ask of the next round, as its preflight looks at it: nothing is asked or downloaded, and no
model plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

from db.rows.conversations import TRAFFIC
from environments.targets.catalogue import load_target
from models.providers.client import ModelClient
from models.providers.simulated_user import user_model
from models.providers.spending import SpendingCap
from settings import Settings
from tasks.housekeeping.findings import Finding, fault, refused, warning, well
from tasks.round.analyst import analyst_settings, check_user, models_of
from tasks.round.preflight import check_approval, check_model, check_tasks, check_trainings
from tasks.targets.looks import look_over
from tasks.unattended.notices import check_webhook, left_lying, outbox

WAITING_DAYS = 1.0


def round_findings(settings: Settings) -> Iterator[Finding]:
    """All checks of this file; one line for the target, and one for each thing that is switched on."""
    yield target(settings)
    if settings.asks_a_model:
        for part, how in models_of(settings):
            told = f"{how.model}; whether it answers is asked by a round"
            yield refused(part, partial(check_model, settings, part, how)) or well(part, told)
    if settings.devices.trainings > 1:
        yield refused("trainings", lambda: check_trainings(settings)) or well(
            "trainings", f"{settings.devices.trainings} at once: no other setting forbids it"
        )
    name = settings.unattended.webhook_variable
    if name:
        yield refused("webhook", lambda: check_webhook(settings)) or well("webhook", f"{name} holds its address")
    if left := notices(settings):
        yield left
    if settings.unattended.approve:
        yield refused("approval", lambda: check_approval(settings)) or well("approval", "is asked on Prefect's server")


def notices(settings: Settings) -> Finding | None:
    """Notices that nobody has got: those that the webhook's receiver refused, and those that wait for long; None where
    there are none."""
    refused_ones, late = left_lying(settings, WAITING_DAYS)
    if not refused_ones and not late:
        return None
    said = f"{refused_ones} refused, {late} waiting for more than a day, in {outbox(settings)}"
    do = (
        "see that the webhook's variable holds the address of today: the next notice, or housekeeping, sends those "
        "that wait; read what was refused, and delete it"
    )
    return warning("notices", said, do)


def target(settings: Settings) -> Finding:
    """The target loads, has something to learn from, its checks name capabilities, and its simulated user can be
    asked."""
    if settings.target == TRAFFIC:
        return well("target", "conversations of users")

    def load() -> None:
        with closing(ModelClient(SpendingCap(analyst_settings(settings).limits))) as client:
            loaded = load_target(settings.target, settings.target_user, user_model(settings.target_user, client))
        check_tasks(loaded)
        look_over(settings, loaded)
        check_user(settings, loaded)

    try:
        found = refused("target", load)
    except Exception as problem:  # the module of somebody's own target may raise anything
        said = f"{settings.target} does not load ({type(problem).__name__}: {problem})"
        return fault("target", said, "mend it, or name another: 'trace-agent targets' lists them")
    return found or well("target", f"{settings.target} loads")
