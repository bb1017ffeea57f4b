"""A round plays the data that it began with: what is played on others would be stored under their hash. And its
adapters are of the base that it began with: others would fit no release beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from environments.contract import TargetTask
from errors import ConfigurationError, TargetError
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.round.adapters import begin_adapter
from tasks.round.context import Context
from tasks.round.results import SelectResult
from tasks.round.stage import adopt, forget, open_context, stage


class FromFile:
    """A target of somebody's own whose data hash is that of a file."""

    name, licence, data_hash = "mine", "MIT", "one"

    def tasks(self, split: str) -> list[TargetTask]:
        return [TargetTask(split, split, "f", 0)]

    def environment(self) -> None: ...


@stage("select")
def selected(context: Context) -> SelectResult:
    return SelectResult(selected=[context.target.data_hash])


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr("tasks.round.traffic.load_target", lambda *given: FromFile())
    opened = open_context(load_settings(profile="smoke", target="mine:target", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


def test_a_stage_whose_data_changed_while_the_round_went_on_is_not_done(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert context.target.data_hash == "one"
    monkeypatch.setattr(FromFile, "data_hash", "two")
    with pytest.raises(TargetError, match="the data of mine:target changed from one to two since round 1 began"):
        selected.do(context)
    monkeypatch.setattr(FromFile, "data_hash", "one")  # put back, and the round goes on
    assert selected.do(context).selected == ["one"]


def test_a_process_that_has_other_data_plays_no_part_of_the_round(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = adopt(context.settings, context.store, context.round)
    monkeypatch.setattr(FromFile, "data_hash", "two")
    with pytest.raises(TargetError, match=r"changed from one to two .*, or are others on "):
        selected.do(joined)


def test_a_round_whose_base_changed_while_it_was_interrupted_trains_nothing_on_the_other(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def there(revision: str) -> None:
        base = SimpleNamespace(identity=PolicyIdentity("org/model", revision))
        monkeypatch.setattr("tasks.round.context.load_base", lambda *given: base)

    def resumed() -> Context:
        forget(context.round.id)
        return open_context(context.settings)

    there("one")
    begin_adapter(context, "mine", None, None, {})
    there("two")
    again = resumed()
    assert again.round.id == context.round.id
    with pytest.raises(
        ConfigurationError, match=r"changed from org/model@one to org/model@two since round 1 .*--fresh"
    ):
        _ = again.base
    there("one")  # put back, and the round goes on
    assert resumed().base.identity.revision == "one"
