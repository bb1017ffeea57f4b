"""Kinds of checks that a round could do nothing with are refused before anything is played."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tasks.round.preflight as preflight_file
from environments.contract import SPLITS, Action, Check, Message, Observation, Score, Target, TargetTask
from environments.targets.catalogue import load_target
from errors import EnvironmentFault, TargetError
from settings import load_settings
from tasks.housekeeping.round_checks import target as doctor_s_target
from tasks.round.preflight import check_by_loading
from tasks.targets.kinds import LOOKED_AT, check_kinds
from tasks.targets.repeats import check_repeats


class Said:
    """Said "yes" it shows the kinds of its solution, else those of the task's failure."""

    tools: Sequence[Mapping[str, Any]] = ()
    instructions = ""
    examples: Sequence[Message] = ()
    max_steps = 2
    made = 0

    def __init__(self, solved: tuple[str, ...], failed: tuple[str, ...]) -> None:
        self.solved, self.failed = solved, failed

    def reset(self, task: TargetTask) -> Observation:
        Said.made += 1
        self.said = ""
        return Observation((Message("user", "Yes?"),))

    def step(self, action: Action) -> Observation:
        self.said = action.content
        return Observation((), done=True)

    def oracle(self) -> Action | None:
        return Action("yes")

    def score(self) -> Score:
        right = self.said == "yes"
        if self.failed == ("broken",) and not right:
            raise EnvironmentFault("no such record")
        kinds = self.solved if right else self.failed
        checks = [Check(kind, kind.rstrip("?"), not kind.endswith("?"), right) for kind in kinds]
        return Score(float(right), right, tuple(checks))

    def close(self) -> None:
        return None


class Fixed:
    """Thirty tasks of two families in each split."""

    name, licence, data_hash = "mine", "Apache-2.0", "d"

    def __init__(self, solved: tuple[str, ...] = (), failed: tuple[str, ...] = ()) -> None:
        self.solved, self.failed = solved, failed

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return [TargetTask(f"{split}-{n}", split, "ab"[n % 2], n) for n in range(30)]

    def environment(self) -> Said:
        return Said(self.solved, self.failed)


class Generating(Fixed):
    """The same with a family that needs `refund_order`."""

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"a": ("refund_order",), "b": ()}

    def generate(self, family: str, seed: int) -> TargetTask:
        return TargetTask(f"{family}-{seed}", "training", family, seed)


def check(target: Target, **settings: Any) -> None:
    check_kinds(load_settings(profile="smoke", **settings), target)


@pytest.mark.parametrize("kind", ["lookUp", "look.up", "Nachfrage_stellen", "höflich", "look up", ""])
def test_a_kind_that_cannot_name_a_capability_is_refused(settings_folder: Path, kind: str) -> None:
    for target in (Fixed(solved=("ok", kind)), Fixed(solved=("ok",), failed=(kind,))):
        with pytest.raises(TargetError, match=f"'mine' has checks of the kind '{kind}', which cannot .* in snake_case"):
            check(target)
    check(Fixed(solved=("ok", f"{kind}?")))  # what is never required is no capability
    check(Fixed(solved=("ok", kind)), analyst={"kind": "llm", "model": "hosted_vllm/any"})


@pytest.mark.parametrize("taken", ["generalist", "release"])
def test_a_kind_whose_name_is_taken_is_refused(settings_folder: Path, taken: str) -> None:
    with pytest.raises(TargetError, match=f"kind '{taken}', which names something else .* another name"):
        check(Fixed(failed=(taken,)))


def test_kinds_that_no_family_needs_are_refused_where_environments_would_be_composed(settings_folder: Path) -> None:
    target = Generating(solved=("refunds",), failed=("tell_price",))
    said = r"of the kinds 'refunds', 'tell_price', and its families\(\) need 'refund_order': none is in both"
    with pytest.raises(TargetError, match=said):
        check(target)
    check(Generating(solved=("refunds",), failed=("refund_order",)))
    check(target, synthesizer={"kind": "llm"}, analyst={"model": "hosted_vllm/any"})
    check(Fixed(solved=("refunds",)))


def test_names_of_a_model_that_nothing_is_composed_for_are_told(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named, target = {"kind": "llm", "model": "hosted_vllm/any"}, Generating(solved=("refund_order",))
    check(Fixed(), analyst=named)
    check(target, analyst=named, synthesizer={"kind": "llm"})
    assert not caplog.records
    check(target, analyst=named)
    assert "families() need alone ('refund_order'): for any other name nothing is trained" in caplog.text


def test_scores_without_a_required_check_are_told(settings_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trace"):
        check(Generating(solved=("ok?",)))
    assert "no score of mine had a required check" in caplog.text
    assert "analyst.kind = 'llm'" in caplog.text


def test_few_episodes_are_looked_at_and_those_that_fail_are_told(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Said.made
    with caplog.at_level(logging.WARNING, "trace"):
        check(Fixed(solved=("ok",), failed=("broken",)))
    assert Said.made - before == 2 * LOOKED_AT
    (told,) = caplog.messages
    assert "task 'diagnosis-0' of target 'mine', played by an agent that does nothing: " in told
    assert "no such record" in told
    assert told.endswith(f"(and {LOOKED_AT - 1} more)")


def test_an_episode_that_has_no_end_does_not_hold_up_a_round(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Said):
        max_steps = 300

        def step(self, action: Action) -> Observation:
            time.sleep(0.01)
            return Observation((Message("user", "Yes?"),))

        def score(self) -> Score:
            raise ValueError("it goes on")

    class Going(Fixed):
        def environment(self) -> Said:
            return Endless((), ())

    monkeypatch.setattr("tasks.targets.kinds.LONGEST", 0.1, raising=False)
    monkeypatch.setattr("tasks.targets.repeats.SECONDS", 0.2)
    began = time.monotonic()
    check(Going())
    check_repeats(Going())
    assert time.monotonic() - began < 5


def test_an_environment_that_cannot_be_played_at_all_is_refused(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fixed, "environment", Said((), ()))
    with pytest.raises(TargetError, match=r"no episode could be played; task 'diagnosis-0' .* 'Said' .* not callable"):
        check(Fixed())


@pytest.mark.parametrize("name", ["shop", "bfcl:single"])
def test_targets_that_come_with_the_project_pass(settings_folder: Path, name: str) -> None:
    try:
        target = load_target(name)
    except TargetError as missing:
        pytest.skip(str(missing))
    assert all(target.tasks(split) for split in SPLITS)
    check(target)


def test_a_round_is_refused_before_it_begins_and_the_doctor_says_why(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_file, "target_of", lambda *given: Fixed(solved=("lookUp",)))
    monkeypatch.setattr("tasks.housekeeping.round_checks.load_target", lambda *given: Fixed(solved=("lookUp",)))
    settings = load_settings(profile="smoke", home=settings_folder)
    with pytest.raises(TargetError, match="'lookUp', which cannot name a capability"):
        check_by_loading(settings)
    assert "'lookUp', which cannot name a capability" in str(doctor_s_target(settings))


def test_capabilities_and_families_that_are_spelled_in_two_ways_are_told(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    families = {"a": ("refund_order", "check_status"), "c": ()}
    monkeypatch.setattr(Generating, "families", lambda self: families)
    with caplog.at_level(logging.WARNING, "trace"):
        check(Generating(solved=("refund_order", "status_check")))
    unseen, strangers = caplog.messages
    assert "families() of mine need 'check_status', and no required check is of that kind" in unseen
    assert "(of no family's kinds are 'status_check')" in unseen
    assert "tasks of mine are of the families 'b', which families() has not, and families() has 'c', of" in strangers
    caplog.clear()
    families |= {"a": ("refund_order",), "b": families.pop("c")}
    check(Generating(solved=("refund_order", "status_check")))
    assert caplog.messages == []
