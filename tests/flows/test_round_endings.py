"""How a round ends that met an error: gone on with, or closed so that a schedule begins the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

import flows.improve as flow
from db import RoundState, Store, open_store
from errors import AdapterError, BudgetExceeded, EnvironmentFault, ProviderError, SandboxError, TrainingError
from settings import Settings, load_settings


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(profile="smoke", home=settings_folder / "home")


def states(settings: Settings, *problems: BaseException) -> list[str]:
    """States of all rounds after runs that met these errors."""
    for problem in problems:
        with pytest.raises(type(problem)), flow.opened(settings, fresh=False):
            raise problem
    store: Store
    with open_store(settings.database_url) as store:
        from db import Round

        return [r.state for r in sorted(store.rows(Round), key=lambda r: r.number)]


@pytest.mark.parametrize("problem", [TrainingError("no group"), EnvironmentFault("all lost"), AdapterError("changed")])
def test_what_would_come_again_closes_the_round_and_the_next_run_begins_the_next(
    settings: Settings, problem: Exception
) -> None:
    assert states(settings, problem) == [RoundState.FAILED]
    with flow.opened(settings, fresh=False) as context:
        assert context.round.number == 2


@pytest.mark.parametrize(
    "problem",
    [ProviderError("busy", transient=True), SandboxError("died"), BudgetExceeded("cap"), OSError("disk full")],
)
def test_what_may_pass_leaves_the_round_to_be_gone_on_with(settings: Settings, problem: Exception) -> None:
    assert states(settings, problem) == [RoundState.INTERRUPTED]
    with flow.opened(settings, fresh=False) as context:
        assert context.round.number == 1


def test_the_very_same_error_twice_closes_the_round(settings: Settings) -> None:
    assert states(settings, OSError("disk full"), OSError("no network")) == [RoundState.INTERRUPTED]
    assert states(settings, OSError("no network")) == [RoundState.FAILED]
    assert states(settings, OSError("no network")) == [RoundState.FAILED, RoundState.INTERRUPTED]


def test_a_round_that_was_stopped_by_the_user_is_gone_on_with(settings: Settings) -> None:
    assert states(settings, KeyboardInterrupt(), KeyboardInterrupt()) == [RoundState.INTERRUPTED]
