"""What a round may train decides what is asked of the machine: one that trains nothing needs no memory for it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from flows import improve as flow
from settings import load_settings
from tasks.operations.plan import rehearse

PLAN = "tests.tasks.operations.test_plan"
FIRST = {"generalist": 1, "demonstrations": 3}


@pytest.fixture(autouse=True)
def begun(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no training fits; a round that begins opens nothing."""
    monkeypatch.setenv("TRACE_DEVICES__MEMORY_GIB", "0.1")
    monkeypatch.setattr(flow, "preflight", lambda settings: None)
    monkeypatch.setattr(flow, "alone_on", lambda target: nullcontext())
    monkeypatch.setattr(flow, "play_round", lambda *given: "begun")

    def opened(*given: object) -> Any:
        raise KeyError("begun")

    monkeypatch.setattr(flow, "opened", opened)


def asked(settings_folder: Path, target: str, **given: Any) -> Any:
    return flow.ImproveParameters(target=target, profile="smoke", home=settings_folder / "home", **given)


def test_a_round_that_can_train_nothing_is_not_refused_for_a_trainings_memory(settings_folder: Path) -> None:
    assert flow.improve.fn(asked(settings_folder, f"{PLAN}:fixed")) == "begun"
    with pytest.raises(ConfigurationError, match=r"a training of .* takes at least"):
        flow.improve.fn(asked(settings_folder, f"{PLAN}:target"))
    home = {"home": settings_folder / "home", "profile": "smoke"}
    assert "no training" in "".join(rehearse(load_settings(target=f"{PLAN}:fixed", **home)))
    with pytest.raises(ConfigurationError, match=r"a training of .* takes at least"):
        rehearse(load_settings(target=f"{PLAN}:target", **home))


@pytest.mark.parametrize(
    ("stage", "first", "refused"),
    [("select", False, False), ("rollout", True, False), ("contrast", True, True), ("train", False, True)],
)
def test_a_stage_is_refused_for_it_where_something_is_trained_up_to_it(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, first: bool, refused: bool
) -> None:
    for name, value in FIRST.items():
        monkeypatch.setenv(f"TRACE_TRAIN__{name.upper()}", str(value * first))
    with pytest.raises(ConfigurationError if refused else KeyError, match="takes at least" if refused else "begun"):
        flow.until.fn(stage, asked(settings_folder, f"{PLAN}:target"))
