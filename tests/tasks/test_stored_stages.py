"""What a stage makes for others is in the storage before the stage says so: another home has it at its next step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import tasks.report as report_file
import tasks.route as route_file
from environments.validation.checks import ValidationVerdict
from models.objects import HomeFiles
from models.router.router import Router
from settings import load_settings
from tasks.episodes.pages import INDEX
from tasks.reporting.figures import RoundFigures
from tasks.reporting.lookup import EPISODES, REPORT
from tasks.round.context import Context
from tasks.round.results import SynthesizeResult
from tasks.round.stage import forget, open_context
from tasks.routing.fitting import Fitted
from tasks.synthesis import llm_synthesizer

FIGURES = RoundFigures(round="r", target="shop", data_hash="d", seed=0)


class Reached(BaseException):
    """The stage has come to what follows, where it ends for this test."""


@pytest.fixture
def context(settings_folder: Path) -> Iterator[Context]:
    files = (settings_folder / "share").as_uri()
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home", files=files))
    target = Mock(data_hash=opened.round.data_hash)
    opened.__dict__.update(base=Mock(), target=target, registry=Mock(), run=Mock())
    yield opened
    forget(opened.round.id)


@pytest.fixture
def other(context: Context, settings_folder: Path) -> HomeFiles:
    """Another home with nothing in it."""
    return HomeFiles(settings_folder / "other", context.settings.files)


def then(look: Callable[[], object]) -> Callable[..., Any]:
    """What stands for the stage's next step: it looks, and the stage goes no further."""

    def step(*_: Any, **__: Any) -> Any:
        look()
        raise Reached

    return step


def test_a_router_before_its_candidate(context: Context, other: HomeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router.fit(np.eye(4, dtype=np.float32), ["a", "a", "", ""], ["1", "2", "3", "4"])
    found: list[str] = []
    monkeypatch.setattr(context, "result", lambda *_: Mock(passed=["a"]))
    given = {
        "own_adapter": "x",
        "try_on_diagnosis": {},
        "examples_of": [],
        "member_versions": {},
        "fitted": Fitted(router, 4),
    }
    given |= {"tell_wrong_routes": {}, "lineup_of": Mock(router=None)}
    for name, gives in given.items():
        monkeypatch.setattr(route_file, name, lambda *_, gives=gives, **__: gives)
    place = f"{context.round.id}/router"
    monkeypatch.setattr(
        route_file, "stored_candidate", then(lambda: found.append(Router.load(other.fetch(place)).version))
    )
    with pytest.raises(Reached):
        route_file.route.do(context)
    assert found == [router.version]


def test_pages_before_the_report_is_done(context: Context, other: HomeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    names = (REPORT, f"{EPISODES}/{INDEX}", "figures.json")

    def written(*_: Any) -> str:
        for name in names[:2]:
            path = context.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"this is {name}")
        return "html"

    def look() -> None:
        for name in (REPORT, EPISODES, "figures.json"):
            other.fetch(f"{context.round.id}/{name}")
        found.extend((other.home / context.round.id / name).read_text() for name in names)

    monkeypatch.setattr(report_file, "how_it_ended", Mock())
    monkeypatch.setattr(report_file, "figures_of", lambda *_: FIGURES)
    monkeypatch.setattr(report_file, "write_report", written)
    monkeypatch.setattr(report_file, "log_round", then(look))
    with pytest.raises(Reached):
        report_file.report.do(context)
    assert found == [*(f"this is {name}" for name in names[:2]), FIGURES.model_dump_json(indent=1)]


def test_a_death_while_figures_are_written_leaves_those_from_before(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context.folder / "figures.json").write_text("whole")
    plain = Path.write_text

    def cut_off(path: Path, text: str, **given: Any) -> int:
        if "figures" not in path.name:
            return plain(path, text, **given)
        plain(path, text[:1], **given)
        raise Reached

    monkeypatch.setattr(report_file, "how_it_ended", Mock())
    monkeypatch.setattr(report_file, "figures_of", lambda *_: FIGURES)
    monkeypatch.setattr(report_file, "write_report", Mock())
    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(Reached):
        report_file.report.do(context)
    assert (context.folder / "figures.json").read_text() == "whole"


def test_a_written_environment_with_its_verdict(
    context: Context, other: HomeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: dict[str, Any] = {"capability": "refund_payment", "code_hash": "0123456789abcdef"}
    verdicts = {"validation": ValidationVerdict(True, (), figures).as_dict(), "calibration": {"figures": {}}}
    best = Mock(verdicts=verdicts, source="code = 1\n", number=1, request_hash="", sandbox_level="process")
    made = Mock(accepted=best, versions=(best,))
    monkeypatch.setattr(llm_synthesizer, "synthesize", lambda *_: made)
    monkeypatch.setattr(llm_synthesizer, "show_versions", lambda *_: None)
    writer = llm_synthesizer.EnvironmentWriter(Mock(), context.stored, Mock(), context.settings, Mock(), Mock())
    for name, gives in {"_brief": Mock(), "_judged": [best], "_version_id": "made"}.items():
        monkeypatch.setattr(llm_synthesizer.EnvironmentWriter, name, lambda *_, gives=gives: gives)
    result = writer.write("refund_payment")
    assert isinstance(result, SynthesizeResult)
    assert other.fetch(result.file).read_text() == "code = 1\n"
    beside = other.fetch(result.file.replace(".py", ".json"))
    assert json.loads(beside.read_text())["figures"]["code_hash"] == "0123456789abcdef"
