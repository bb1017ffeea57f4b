"""A train setting that another one leaves without effect is said once before work starts: of a round, of its dry run
and of a comparison, and never of a profile as it is."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import flows.improve as flow
from db import ReleaseRow, ReleaseState
from flows import compare_methods
from flows.cli import methods
from settings import PROFILES, load_settings
from tasks.methods.catalogue import chosen
from tasks.operations.plan import rehearse
from tasks.operations.without_effect import user_without_effect, without_effect, without_effect_in

NO_GENERALIST = {"demonstrations": 0, "practice": 0, "recall_steps": 0}


def live(*members: str) -> ReleaseRow:
    return ReleaseRow(
        id="r", target="shop", number=1, base="b", data_hash="d", state=ReleaseState.LIVE,
        members={name: {"adapter_id": "" if name.startswith("blend") else name} for name in members},
    )  # fmt: skip


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.toml")))
def test_a_profile_has_none_by_itself(settings_folder: Path, profile: str) -> None:
    assert without_effect(load_settings(profile=profile)) == []
    assert without_effect(load_settings(profile=profile), live("generalist", "refund_payment")) == []


@pytest.mark.parametrize(
    ("profile", "train", "names", "why"),
    [
        ("laptop", {"demonstrations": 0}, ["practice"], "where it is made first, from train.demonstrations"),
        ("laptop", {"demonstrations": 0, "shown": 5}, [], ""),
        ("laptop", {"demonstrations": 0, "shown": 5, "hints": 0}, ["shown", "practice"], "train.hints"),
        ("laptop", {"generalist": 0}, ["demonstrations", "practice", "recall_steps"], "train.generalist = 0"),
        ("laptop", {"generalist": 0, **NO_GENERALIST}, [], ""),
        ("bfcl", {"generalist": 0}, ["demonstrations", "recall_rate"], "train.generalist = 0"),
        ("gpu", {"shown": 5, "practice": 3}, ["shown", "practice"], "train.generalist = 0"),
        ("gpu", {"carry_rate": 1e-4}, ["carry_rate"], "train.carry = false"),
        ("gpu", {"carry_rate": 1e-4, "carry": True}, [], ""),
        ("gpu", {"carry_rate": 1e-4, "generalist": 1, "demonstrations": 5}, [], ""),
    ],
)
def test_what_another_setting_leaves_without_effect_is_named_with_it(
    settings_folder: Path, profile: str, train: dict[str, Any], names: list[str], why: str
) -> None:
    settings = load_settings(profile=profile, train=train)
    said = without_effect(settings)
    assert [line.split()[0] for line in said] == [f"train.{name}" for name in names]
    assert all(why in line for line in said)
    assert all(
        f" = {getattr(settings.train, name)} has no effect" in line for name, line in zip(names, said, strict=True)
    )


def test_what_makes_no_generalist_of_written_environments_is_said(settings_folder: Path) -> None:
    """Nothing goes on from one either, where nothing is carried."""
    written = {"synthesizer": {"kind": "llm", "model": "m"}}
    said = without_effect(load_settings(profile="laptop", train={"carry": False}, **written))
    named = ["generalist", "demonstrations", "practice", "recall_steps", "carry_rate", "focus"]
    assert [line.split()[0] for line in said] == [f"train.{name}" for name in named]
    assert "train.focus = true has no effect" in said[-1]
    assert without_effect(load_settings(profile="gpu", **written)) == []


@pytest.mark.parametrize(
    ("members", "alone"),
    [((), True), (("generalist",), True), (("blend-a",), True), (("generalist", "refund_payment"), False)],
)
def test_a_live_champion_is_gone_on_from_without_carrying(
    settings_folder: Path, members: tuple[str, ...], alone: bool
) -> None:
    settings = load_settings(profile="gpu", train={"carry_rate": 1e-4})
    assert bool(without_effect(settings, live(*members) if members else None)) is alone


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("TRAIN__DEMONSTRATIONS", "0", "train.practice = 8"), ("TARGET_USER", "litellm:m", 'target_user = "litellm:m"')],
)
def test_dry_run_and_log_of_a_round_say_it_once(
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv(f"TRACE_{variable}", value)
    settings = load_settings(profile="laptop", home=settings_folder / "home")
    told = [line for line in rehearse(settings) if "has no effect" in line]
    assert len(told) == 1
    assert told[0].startswith(f"warning: {said} has no effect in the round: ")
    with flow.opened(settings, fresh=False):
        pass
    logged = [r for r in caplog.records if "has no effect" in r.getMessage()]
    assert [(r.levelno, f"warning: {r.getMessage()}") for r in logged] == [(logging.WARNING, told[0])]


@pytest.mark.parametrize(
    ("own", "said"),
    [(None, "has no simulated user to choose"), ("a robot", "has a user of its own, 'a robot'"), ("litellm:m", "")],
)
def test_a_user_that_the_target_is_not_told_of_is_said(settings_folder: Path, own: str | None, said: str) -> None:
    settings, target = load_settings(target_user="litellm:m"), Mock(spec=["user"], user=own)
    told = user_without_effect(settings, target)
    assert told == ([f'target_user = "litellm:m" has no effect in the round: shop {said}'] if said else [])
    assert user_without_effect(load_settings(), target) == []


def test_a_comparison_says_it_once_and_not_of_its_ablations(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_settings(profile="laptop")
    assert without_effect_in(plain, chosen(["ablations"])) == []
    settings = load_settings(profile="laptop", train={"demonstrations": 0})
    assert without_effect_in(settings, ["base", "grpo-target", "demonstrations"]) == [], "none of them is a round"
    for names in (["single"], ["placebo-rewards"], ["ablation-no-focus"]):
        assert without_effect_in(settings, chosen(names)) == without_effect(settings) != []
    played: list[Any] = []
    with_flow: Any = SimpleNamespace(
        CompareParameters=compare_methods.CompareParameters, warn=compare_methods.warn, compare_methods=played.append
    )
    monkeypatch.setattr("flows.cli.ready.ready", lambda *given, **more: with_flow)
    given = {"budget": 900, "seeds": [4, 5], "at_once": 2, "out": settings_folder}
    methods._play(settings, ["trace"], False, given)
    assert len(played) == 1
    assert [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()] == without_effect(settings)
