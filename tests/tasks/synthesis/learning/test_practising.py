"""What a generalist practises that is made first, what it becomes where practice brings nothing, and what begins behind
it."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import GENERALIST
from environments.synthesized.composed import ComposedEnvironment
from environments.targets.shop.target import target
from errors import Untrainable
from settings import load_settings
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id
from tasks.round.engine import Playground
from tasks.round.results import LEARNT, TrainResult
from tasks.synthesis.environments import composed_of
from tasks.synthesis.learning import generalist, practising
from tasks.synthesis.learning.practising import practice_of, practised
from tasks.synthesis.learning.recalling import Learnt

KNOWN = {"refund_all": 0.5, "move_pending": 0.5, "order_status": 1.0, "item_options": 0.0}
TRAINED = TrainResult(adapter="own", sha256="new", steps=2, run="practice", ending="steps", chosen=2, start="old")


@pytest.fixture
def environment() -> ComposedEnvironment:
    at: Any = SimpleNamespace(id="round", target="shop", data_hash=target().data_hash, seed=0)
    base = dict.fromkeys(target().families(), 0.0) | {"move_pending": 1.0, "order_status": 0.6}
    own = [family for family, rate in base.items() if rate < 0.5]
    return composed_of(target(), at, GENERALIST, own, base, 1 / 3)


def test_every_family_is_practised_by_what_there_is_to_learn_in_it(environment: ComposedEnvironment) -> None:
    """What cloning has taken away from the base as well, which the generalist's own environment has for retention."""
    assert "move_pending" in environment.spec.retention_families
    known = dict.fromkeys(target().families(), 1.0) | KNOWN
    practice = practice_of(environment, known)
    assert set(practice.spec.families) == set(target().families())
    assert (practice.spec.retention_families, practice.spec.retention_share) == ((), 0.0)
    drawn = Counter(practice.scenario(seed).family for seed in range(1000))
    half, rest = [drawn[f] for f in ("refund_all", "move_pending")], [drawn[f] for f in known if f not in KNOWN]
    assert min(half) > 3 * max(rest)
    assert min(rest) > 0, "and a little of all others, so that they stay"
    assert practice.spec.id not in (environment.spec.id, practice_of(environment, {}).spec.id)
    assert practice_of(environment, known).spec.id == practice.spec.id


class Round:
    """A round whose generalist has learnt, and practises."""

    def __init__(self, folder: Path) -> None:
        given = {"generalist": 1, "demonstrations": 4, "practice": 3}
        self.settings = load_settings(profile="laptop", train=given)
        self.round, self.folder, self.seed = SimpleNamespace(id="round"), folder, 0
        self.target = self.keep = None
        self.configs: dict[str, Any] = {}
        self.store = SimpleNamespace(set_state=lambda kind, i, state, config: self.configs.update({i: config}))
        self.engine = SimpleNamespace(play=lambda ground, episodes, what: [e.task for e in episodes])
        self.ended: list[str] = []
        self.registry = SimpleNamespace(end_run=self.ended.append)
        self.files = SimpleNamespace(fetch=lambda path: folder / path)
        self.runs: list[str] = []

    def tasks(self, split: str) -> list[str]:
        assert split == "diagnosis"
        return [str(n) for n in range(160)]

    def ground(self, purpose: str) -> Playground:
        return Playground(target().environment, "shop", purpose, 0.3, 24, of_target=True)

    def result(self, kind: Any, name: str) -> Any:
        return SimpleNamespace(environment="environment")

    def part_run(self, key: str, name: str, **given: Any) -> str:
        self.runs.append(key)
        return "practice"


@pytest.fixture
def made(
    settings_folder: Path, tmp_path: Path, environment: ComposedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """(context, what has learnt, the courses that were trained on, the adapters that were stored)"""
    courses, stored = list[Any](), list[Any]()
    adapter: Any = SimpleNamespace(id="before", path="learnt", sha256="old", config={"demonstrations": 80})
    monkeypatch.setattr(practising, "stored_environment", lambda *given: environment)
    monkeypatch.setattr(practising, "load_member", lambda c, name, identity: f"{name}/{identity}")
    monkeypatch.setattr(practising, "held", lambda c, name: nullcontext(name))
    monkeypatch.setattr(practising, "success_by_family", lambda store, ids: KNOWN)
    monkeypatch.setattr(practising, "train_on", lambda c, course, start: courses.append((course, start)) or TRAINED)
    monkeypatch.setattr(practising, "finish_adapter", lambda c, *given: stored.append(given) or "old")
    return Round(tmp_path), Learnt(adapter, 36, "learning"), courses, stored


def test_it_goes_on_from_what_has_learnt(made: Any, environment: ComposedEnvironment) -> None:
    context, learnt, courses, stored = made
    result = practised(context, learnt)
    assert result == TRAINED.model_copy(update={"before": "before"})
    assert result.began_from(GENERALIST) == "what it has learnt"
    assert not result.learnt
    ((course, start),) = courses
    assert start == context.folder / "learnt"
    assert course.environment.spec == practice_of(environment, KNOWN).spec
    assert (course.name, course.adapter, course.steps) == (GENERALIST, adapter_id("round", GENERALIST), 3)
    assert not course.transfers, "no environment of it is made anew"
    assert not course.judged
    assert (context.ended, stored) == (["learning"], []), "what learns has a run of its own"


@pytest.mark.parametrize("ending", ["no better", "unpaid", "come apart"])
def test_where_practice_brings_nothing_it_is_what_has_learnt_and_that_is_said(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    context, learnt, _, stored = made

    def train_on(*given: Any) -> TrainResult:
        if ending == "come apart":
            raise Untrainable("the weights after step 2 are not finite")
        changes = {"steps": 0, "ending": "budget"} if ending == "unpaid" else {}
        return TRAINED.model_copy(update={"chosen": 0, **changes})

    monkeypatch.setattr(practising, "train_on", train_on)
    result = practised(context, learnt)
    own = adapter_id("round", GENERALIST)
    assert (result.adapter, result.sha256, result.ending, result.chosen) == (own, "old", LEARNT, 36)
    assert result.goes_on
    assert result.learnt
    assert (result.run, result.before, result.start) == ("practice", "before", "")
    assert [given[:2] for given in stored] == [(own, context.folder / "learnt")]
    assert context.configs == {own: {"demonstrations": 80}}, "it has no other training"
    reason = {"no better": "every checkpoint is worse", "unpaid": "did not pay", "come apart": "not finite"}[ending]
    assert "nothing of its practice is kept: " in caplog.text
    assert reason in caplog.text
    assert reason in result.unkept


def test_what_it_lacks_may_begin_from_what_it_practised_from(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Practice gives up a family where its siblings pay more."""
    given = load_settings(profile="laptop", train={"generalist": 1, "demonstrations": 4})
    rows = {adapter_id("round", BEFORE_PRACTICE): SimpleNamespace(id="before", path="p")}
    context: Any = SimpleNamespace(
        settings=given,
        target=target(),
        round=SimpleNamespace(id="round"),
        parent=None,
        store=SimpleNamespace(row=lambda kind, id: rows.get(id)),
        stored=SimpleNamespace(found=lambda kind, name: True, result=lambda kind, name: SimpleNamespace(adapter="own")),
    )
    found = generalist.beginnings_of(context, "refund_payment")
    assert found == [(GENERALIST, "own"), (BEFORE_PRACTICE, "before")]
    rows.clear()
    assert generalist.beginnings_of(context, "refund_payment") == [(GENERALIST, "own")]
