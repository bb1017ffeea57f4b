"""The order of a round: capabilities are practised until enough came through, and a stage ends where it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.order as flow
from db import GENERALIST, CapabilityRow
from errors import ConfigurationError, EpisodesSpent
from settings import load_settings
from tasks.round.context import Context
from tasks.round.results import SelectResult, StageResult, TrainResult
from tasks.round.stage import forget, open_context

FOUND = ["rollout", "contrast", "select"]
PROVEN = ["challenge", "route", "evaluate", "gate", "test", "report"]
NAMES = [*FOUND, "synthesize", "calibrate", "train", "register", *PROVEN]


class Recorded:
    """Stands for a stage: remembers that it was called, and for which capability."""

    def __init__(self, name: str, calls: list[str], goes_on: Callable[[str], bool]) -> None:
        self.name, self.calls, self.goes_on = name, calls, goes_on

    def __call__(self, round_id: str, capability: str = "") -> Any:
        self.calls.append(f"{self.name}:{capability}".rstrip(":"))
        return StageResult(skipped="" if self.goes_on(f"{self.name}:{capability}") else "no")


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("TRACE_SELECTION__MOST", "2")
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


@pytest.fixture
def calls(context: Context, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a round up to `last` calls when `selected` are lacking and the stages in `out` let a capability fall out."""

    def play(last: str, selected: str, *out: str) -> list[str]:
        made: list[str] = []
        for group in ("FIND", "PRACTISE", "PROVE"):
            stages = getattr(flow, group)
            recorded = tuple(Recorded(s.name, made, lambda key: key not in out) for s in stages)
            monkeypatch.setattr(flow, group, recorded)
        monkeypatch.setattr(Context, "result", lambda self, kind: SelectResult(selected=selected.split()))
        for _ in flow.stages(context, last):
            pass
        return made

    return play


def test_the_stages_and_their_order() -> None:
    assert list(flow.STAGES) == NAMES


def test_a_name_that_is_no_stage_prints_all_of_them() -> None:
    with pytest.raises(ConfigurationError, match=r"'selct'; choose from rollout, contrast, .*, report"):
        flow.check_name("selct")


@pytest.mark.parametrize("last", FOUND)
def test_finding_ends_at_the_stage_that_is_named(calls: Callable[..., list[str]], last: str) -> None:
    assert calls(last, "a b c") == NAMES[: NAMES.index(last) + 1]


def test_no_more_capabilities_are_trained_than_wanted(calls: Callable[..., list[str]]) -> None:
    assert calls("train", "a b c")[3:] == [
        "synthesize:a", "synthesize:b", "calibrate:a", "calibrate:b", "train:a", "train:b",
    ]  # fmt: skip


def test_the_next_capability_takes_the_place_of_one_that_fell_out(calls: Callable[..., list[str]]) -> None:
    made = calls("report", "a b c d", "synthesize:a", "train:c")
    assert [c for c in made if c.startswith("register")] == ["register:b", "register:d"]
    assert "calibrate:a" not in made
    assert "register:c" not in made
    assert made[-6:] == PROVEN


def test_the_generalist_comes_after_all_others_and_takes_nobodys_place(calls: Callable[..., list[str]]) -> None:
    made = calls("report", "a b c generalist")
    assert [c for c in made if c.startswith(("synthesize", "register"))] == [
        "synthesize:a", "synthesize:b", "register:a", "register:b", "synthesize:generalist", "register:generalist",
    ]  # fmt: skip
    assert made[-6:] == PROVEN
    assert "train:generalist" not in calls("train", "a b generalist"), "a stage that was named ends with the first"
    assert calls("train", "a generalist", "train:generalist", "train:a")[-1] == "train:a"
    out = calls("report", "a b generalist", "synthesize:generalist")
    assert "calibrate:generalist" not in out
    assert out[-6:] == PROVEN


def test_a_generalist_that_comes_first_plays_what_is_mined(
    calls: Callable[..., list[str]], context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "comes_first", lambda context: True)
    made = calls("report", "a generalist")
    assert made[:8] == [
        "rollout", "synthesize:generalist", "calibrate:generalist", "train:generalist", "register:generalist",
        "rollout:generalist", "contrast", "select",
    ]  # fmt: skip
    assert made[8:] == ["synthesize:a", "calibrate:a", "train:a", "register:a", *PROVEN], "and it is not made again"
    assert context.store.rows(CapabilityRow, round_id=context.round.id, name=GENERALIST)
    assert calls("rollout", "a generalist") == ["rollout"]
    assert calls("train", "a generalist")[-1] == "train:a"
    assert calls("contrast", "a")[-2:] == ["rollout:generalist", "contrast"]
    out = calls("report", "a", "train:generalist")
    assert "rollout:generalist" not in out, "what is live is mined where it could not be made"
    assert out[4:6] == ["contrast", "select"]


def test_an_environment_that_taught_the_wrong_thing_goes_back_for_another_version(
    calls: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = ["reward-misspecified: reward rose", "reward-misspecified: reward rose", ""]
    withdrawn: list[str] = []

    def result(recorded: Recorded, round_id: str, capability: str = "") -> StageResult:
        recorded.calls.append(f"{recorded.name}:{capability}".rstrip(":"))
        if recorded.name != "train":
            return StageResult()
        return TrainResult(adapter="", sha256="", steps=4, run="", ending="", chosen=1, verdict=verdicts.pop(0))

    monkeypatch.setattr(Recorded, "__call__", result)
    monkeypatch.setattr(flow, "withdraw", lambda context, capability, why: withdrawn.append(why) or len(verdicts) > 0)
    made = calls("register", "a")
    assert made[3:] == [*["synthesize:a", "calibrate:a", "train:a"] * 3, "register:a"]
    assert withdrawn == ["reward-misspecified: reward rose"] * 2


def test_an_environment_is_not_sent_back_for_ever(
    calls: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = TrainResult(
        adapter="", sha256="", steps=4, run="", ending="", chosen=1, verdict="reward-misspecified: reward rose"
    )

    def result(recorded: Recorded, round_id: str, capability: str = "") -> StageResult:
        recorded.calls.append(f"{recorded.name}:{capability}".rstrip(":"))
        return bad if recorded.name == "train" else StageResult()

    monkeypatch.setattr(Recorded, "__call__", result)
    monkeypatch.setattr(flow, "withdraw", lambda context, capability, why: False)
    assert calls("register", "a")[3:] == ["synthesize:a", "calibrate:a", "train:a"]


def test_trainings_at_once_are_of_all_that_came_so_far(
    calls: Callable[..., list[str]], context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose environment goes back are trained again at once, too; one that cannot be made again falls out."""
    bad = "reward-misspecified: reward rose"
    verdicts = {"a": [bad, ""], "b": [bad, bad], "c": [bad], "d": [""]}
    waves: list[list[str]] = []

    def together(given: Context, capabilities: list[str]) -> dict[str, TrainResult]:
        waves.append(list(capabilities))
        made = {c: verdicts[c].pop(0) for c in capabilities}
        return {
            c: TrainResult(adapter="", sha256="", steps=4, run="", ending="", chosen=1, verdict=verdict)
            for c, verdict in made.items()
        }

    asked: list[str] = []

    def withdraw(given: Context, capability: str, why: str) -> bool:
        asked.append(capability)
        return capability != "b" or asked.count("b") < 2

    def result(recorded: Recorded, round_id: str, capability: str = "") -> StageResult:
        recorded.calls.append(f"{recorded.name}:{capability}".rstrip(":"))
        again = recorded.calls.count(f"{recorded.name}:{capability}") > 1
        return StageResult(skipped="no" if (recorded.name, capability, again) == ("calibrate", "c", True) else "")

    settings = load_settings(
        profile="smoke", home=context.settings.home, devices={"trainings": 2}, selection={"most": 3}
    )
    monkeypatch.setattr(context, "settings", settings)
    monkeypatch.setattr(Recorded, "__call__", result)
    monkeypatch.setattr(flow, "train_together", together)
    monkeypatch.setattr(flow, "withdraw", withdraw)
    made = calls("report", "a b c d")
    assert waves == [["a", "b", "c"], ["a", "b"], ["d"]]
    assert asked == ["a", "b", "c", "b"], "each is asked for once a version"
    assert [c for c in made if c.startswith(("calibrate", "train", "register"))] == [
        "calibrate:a", "calibrate:b", "calibrate:c", "calibrate:a", "calibrate:b", "calibrate:c", "register:a",
        "calibrate:d", "register:d",
    ]  # fmt: skip


def test_a_training_that_is_a_job_is_tried_again_as_any_other(
    calls: Callable[..., list[str]], context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a task with retries, also where trainings come one after another."""
    waves: list[list[str]] = []
    done = TrainResult(adapter="", sha256="", steps=4, run="", ending="", chosen=1, verdict="")
    settings = load_settings(profile="smoke", home=context.settings.home, limits={"training_minutes": 5})
    monkeypatch.setattr(context, "settings", settings)
    monkeypatch.setattr(flow, "train_together", lambda given, part: waves.append(part) or dict.fromkeys(part, done))
    calls("train", "a b")
    assert waves == [["a"], ["b"]][: settings.selection.most]


def test_a_capability_that_the_budget_does_not_pay_for_falls_out(
    calls: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded.__call__

    def result(self: Recorded, round_id: str, capability: str = "") -> Any:
        found = recorded(self, round_id, capability)
        if (self.name, capability) in (("train", "a"), ("calibrate", "b")):
            raise EpisodesSpent("9 more episodes would pass the budget")
        return found

    monkeypatch.setattr(Recorded, "__call__", result)
    made = calls("report", "a b c")
    assert [c for c in made if c.startswith(("train", "register"))] == ["train:a", "train:c", "register:c"]
    assert made[-6:] == PROVEN


@pytest.mark.parametrize(("paid", "taken"), [(23, []), (24, ["synthesize:c", "calibrate:c", "train:c", "register:c"])])
def test_the_next_takes_a_place_only_where_the_budget_pays_for_its_calibration_and_a_step(
    calls: Callable[..., list[str]], context: Context, paid: int, taken: list[str]
) -> None:
    """What is left otherwise proves what was trained: an account lets a calibration have that as well."""
    rule, train = context.settings.calibration, context.settings.train
    assert 2 * rule.seeds * rule.samples + train.groups * train.group_size == 24
    budget: Any = SimpleNamespace(for_training=lambda adapter: paid)
    context.budget = budget
    made = calls("challenge", "a b c", "train:b")
    assert [call for call in made if call.endswith(":c")] == taken


def test_training_ends_before_anything_is_proven_when_all_fell_out(calls: Callable[..., list[str]]) -> None:
    made = calls("train", "a b", "calibrate:a", "calibrate:b")
    assert made[3:] == ["synthesize:a", "synthesize:b", "calibrate:a", "calibrate:b"]


@pytest.mark.parametrize("last", ["route", "evaluate", "gate"])
def test_nothing_trained_plays_no_test_split(calls: Callable[..., list[str]], last: str) -> None:
    made = calls(last, "")
    assert made[-1] == last
    assert "test" not in made
    assert "report" not in made


def test_evaluating_promotes_nothing(calls: Callable[..., list[str]]) -> None:
    assert "gate" not in calls("evaluate", "a")
