"""All that is looked at of a target before a round plays anything, in one call."""

from __future__ import annotations

from environments.contract import Target
from settings import Settings
from tasks.targets.alike import check_alike
from tasks.targets.draws import check_draws
from tasks.targets.kinds import check_kinds
from tasks.targets.mistakes import check_mistakes
from tasks.targets.openings import check_openings
from tasks.targets.parts import tell_of_parts
from tasks.targets.repeats import check_repeats


def look_over(settings: Settings, target: Target) -> None:
    """Raise `TargetError` where a round could do nothing with the target, and warn of what would spoil its figures."""
    check_openings(target)
    check_kinds(settings, target)
    check_alike(target)
    check_repeats(target)
    check_mistakes(target)
    check_draws(target, settings.seed)
    tell_of_parts(target)
