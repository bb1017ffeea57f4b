"""A scenario from random numbers, where what makes it fails for some of them: a generator or module that fails for one
number in a thousand passes every check, and training would meet that number sooner or later, in each try again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from environments.contract import TargetTask
from environments.sandbox.workers import WorkerDied
from errors import BudgetExceeded, CallOverdue, ConfigurationError, EnvironmentFault, PolicyError

# So many numbers are tried.
DRAWS = 20
# What says nothing of the number: where another try does not meet it, the same seed would give two scenarios.
AT_ONCE = (WorkerDied, CallOverdue, PolicyError, BudgetExceeded, ConfigurationError)


def first_made(make: Callable[[int], TargetTask], numbers: Iterable[int]) -> TargetTask:
    """What `make` gives for the first of `numbers` for which it does not raise: the same whenever it is asked. Raises
    `EnvironmentFault` where it raises for `DRAWS` of them, and what is of `AT_ONCE` at once."""
    said = "there are no numbers"
    for number in islice(numbers, DRAWS):
        try:
            return make(number)
        except AT_ONCE:
            raise
        except Exception as problem:  # a user's generator may raise anything
            said = f"the last one raised {type(problem).__name__}: {problem}"
    raise EnvironmentFault(f"no scenario came of {DRAWS} random numbers: {said}; mend what makes the scenarios")
