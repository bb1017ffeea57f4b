"""The generalist is made of what the round trained for: when there is one, its environment, figures and steps."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import GENERALIST
from environments.targets.shop.target import target
from errors import Untrainable
from models.adapters.files import CONFIG
from models.training.lora import PROJECTIONS
from settings import load_settings
from tasks.round.adapters import adapter_id
from tasks.round.results import CalibrateResult, TrainResult
from tasks.synthesis.environments import compose
from tasks.synthesis.learning import generalist
from tasks.synthesis.learning.generalist import (
    beginning_of,
    beginnings_of,
    calibrated_by_parts,
    comes_first,
    compose_generalist,
    specialists,
    wanted,
)

SUCCESS = {"cancel_pending": 0.6, "item_price": 0.3, "wants_person": 0.1, "refund_whole": 0.2}
SHOWN = {"generalist": 3, "demonstrations": 7, "carry": True}
PARTS = ("refund_payment", "look_up_item")


def context_of(**settings: Any) -> Any:
    """A round on the shop that has trained `trained`, without a release before it."""
    at = SimpleNamespace(id="round", target="shop", data_hash=target().data_hash, seed=0)
    given = load_settings(profile="night", **{"train": {"generalist": 3, "demonstrations": 0}, **settings})
    nothing = SimpleNamespace(row=lambda kind, id: None)
    return SimpleNamespace(
        settings=given, target=target(), round=at, store=nothing, keep=None, stored=None, parent=None, budget=None
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The capabilities with a registered adapter, in order; their environments are composed as a round does."""
    names: list[str] = [*PARTS]
    monkeypatch.setattr(generalist, "registered", lambda stored: names)

    def stored(store: Any, at: Any, shop: Any, capability: str, keep: Any) -> Any:
        return compose(shop, at, capability, SUCCESS, 1 / 3)

    monkeypatch.setattr(generalist, "stored_environment", stored)
    return names


def live(context: Any, *capabilities: str) -> Any:
    context.parent = SimpleNamespace(members={c: {"adapter_id": c} for c in capabilities})
    return context


def test_two_capabilities_have_one_and_one_beside_a_generalist_that_is_live(settings_folder: Any) -> None:
    assert wanted(context_of(), PARTS)
    assert not wanted(context_of(), PARTS[:1])
    assert not wanted(live(context_of(), *PARTS), PARTS[:1])
    assert wanted(live(context_of(), GENERALIST), PARTS[:1])
    assert not wanted(live(context_of(), GENERALIST), ())
    assert not wanted(context_of(train={"generalist": 0, "demonstrations": 0}), PARTS)


def test_where_a_model_writes_environments_there_is_none_and_it_is_said(
    settings_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trace"):
        assert not wanted(context_of(synthesizer={"kind": "llm"}), PARTS)
    assert "no generalist is made" in caplog.text


def test_its_environment_has_the_families_of_all_and_what_is_not_mastered_and_keeps_the_rest(
    settings_folder: Any, trained: list[str]
) -> None:
    lacking = {"item_price": 0.3, "refund_part": 0.0, "use_coupon": 0.1, "wants_person": 0.0}
    success = {family: lacking.get(family, 0.7) for family in target().families()}
    environment, reason = compose_generalist(context_of(), target(), success)
    assert environment is not None
    assert reason == ""
    parts = {f for c in PARTS for f in compose(target(), context_of().round, c, SUCCESS, 1 / 3).spec.families}
    own = parts | {"use_coupon", "wants_person"}
    assert not parts & {"use_coupon", "wants_person"}
    assert set(environment.spec.families) == own
    kept = set(environment.spec.retention_families)
    assert kept, "something is there to be kept"
    assert not kept & own
    assert kept <= set(success), "what is live succeeds at it"
    drawn = Counter(environment.scenario(seed).family for seed in range(600))
    assert set(drawn) == own | kept
    assert 130 < sum(drawn[f] for f in kept) < 270
    assert {environment.own_scenario(seed).family for seed in range(200)} == own
    again, _ = compose_generalist(context_of(), target(), success, version=2)
    assert again is not None
    assert again.spec.id != environment.spec.id


def test_without_two_adapters_there_is_nothing_to_bring_together(settings_folder: Any, trained: list[str]) -> None:
    trained[:] = [PARTS[0], GENERALIST]
    environment, reason = compose_generalist(context_of(), target(), SUCCESS)
    assert environment is None
    assert reason.startswith("1 of the selected capabilities have an adapter")
    environment, _ = compose_generalist(live(context_of(), GENERALIST), target(), SUCCESS)
    assert environment is not None, "one beside a generalist that is live"
    # What is shown in turns is so where it comes first alone: in later rounds it needs another adapter.
    trained.clear()
    shown = {"generalist": 3, "demonstrations": 0, "shown": 5}
    assert compose_generalist(context_of(train=shown), target(), SUCCESS)[0] is not None
    assert compose_generalist(live(context_of(train=shown), GENERALIST), target(), SUCCESS)[0] is None


def test_where_every_family_is_mastered_there_is_nothing_to_bring_together(
    settings_folder: Any, trained: list[str]
) -> None:
    trained.clear()
    first = context_of(train={"generalist": 1, "demonstrations": 4})
    environment, reason = compose_generalist(first, target(), dict.fromkeys(target().families(), 0.9))
    assert environment is None
    assert "masters every family" in reason
    assert compose_generalist(first, target(), SUCCESS)[0] is not None


def test_its_figures_are_the_means_of_its_parts(settings_folder: Any, trained: list[str]) -> None:
    names = ("mean_reward", "std_reward", "all_success", "all_zero", "informative", "low", "high")
    rates = {PARTS[0]: 0.2, PARTS[1]: 0.6, GENERALIST: 0.9}
    trained.append(GENERALIST)
    context = context_of()
    context.result = lambda kind, capability: CalibrateResult(
        accepted=True, reason="", success_rate=rates[capability], **dict.fromkeys(names, rates[capability])
    )
    found = calibrated_by_parts(context)
    assert found.accepted
    assert found.goes_on
    assert (found.success_rate, found.informative) == (pytest.approx(0.4), pytest.approx(0.4))
    assert "2 parts" in found.reason


def test_each_family_has_as_many_to_learn_from_with_demonstrations(
    settings_folder: Any, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference solutions of every family of the target fill up what has succeeded; no other adapter is needed, and
    nothing is played for it."""
    asked: list[Any] = []
    trained.clear()
    context = context_of(train=SHOWN)
    environment, reason = compose_generalist(context, target(), SUCCESS)
    assert (environment is None, reason) == (False, "")
    had = dict.fromkeys(target().families(), 7) | {"item_price": 0, "swap_delivered": 5, "refund_part": 9}
    rows = [SimpleNamespace(family=f) for f, n in had.items() for _ in range(n)]
    monkeypatch.setattr(generalist, "successes", lambda context: rows)
    monkeypatch.setattr(generalist, "try_on_diagnosis", lambda context, capabilities: None)
    monkeypatch.setattr(generalist, "show_missing", lambda context, environment: pytest.fail("played"))
    monkeypatch.setattr(generalist, "stored_environment", lambda *given: environment)
    monkeypatch.setattr(generalist, "demonstrations", lambda *given: asked.append(given[2]) or ["one"])
    monkeypatch.setattr(generalist, "learn", lambda *given: given)
    context.base = SimpleNamespace(renderer=None)
    learnt = generalist.learn_generalist(context, "e", None)  # type: ignore[arg-type]
    assert asked == [{"item_price": 7, "swap_delivered": 2}]
    assert learnt[2:] == (rows, None, 3, "e", ["one"], ["item_price", "swap_delivered"], None)  # type: ignore[index]
    assert calibrated_by_parts(context).goes_on
    monkeypatch.setattr(generalist, "successes", lambda context: [])
    monkeypatch.setattr(generalist, "demonstrations", lambda *given: [])
    assert generalist.learn_generalist(context, "e", None) is None  # type: ignore[arg-type]
    plain = context_of()
    plain.base = context.base
    monkeypatch.setattr(generalist, "show_missing", lambda context, environment: None)
    monkeypatch.setattr(generalist, "demonstrations", lambda *given: asked.append(given[2]) or [])
    monkeypatch.setattr(generalist, "successes", lambda context: rows)
    generalist.learn_generalist(plain, "e", None)  # type: ignore[arg-type]
    assert asked[-1] == {}, "the setting is off"


class Made(str):
    """A stored adapter, by its name."""

    path = "final"


@pytest.mark.parametrize(("demonstrations", "turns"), [(0, ["none 1", "generalist-1 2"]), (7, ["generalist-1 2"])])
def test_one_that_comes_first_is_shown_scenarios_in_turns(
    settings_folder: Any, trained: list[str], monkeypatch: pytest.MonkeyPatch, demonstrations: int, turns: list[str]
) -> None:
    """What one turn has made plays the next, the last of which makes the generalist; with reference solutions to begin
    from the bare base is shown nothing."""
    trained.clear()
    told, learnt, owed = list[str](), list[Any](), list[dict[str, int]]()
    context = context_of(train={"generalist": 3, "demonstrations": demonstrations, "shown": 5, "recall_steps": 36})
    context.base, context.registry = SimpleNamespace(renderer=None), SimpleNamespace(end_run=told.append)
    environment, _ = compose_generalist(context, target(), SUCCESS)
    monkeypatch.setattr(generalist, "try_on_diagnosis", lambda context, capabilities: None)
    monkeypatch.setattr(generalist, "stored_environment", lambda *given: environment)
    monkeypatch.setattr(generalist, "successes", lambda context: [SimpleNamespace(family="item_price")])
    monkeypatch.setattr(
        generalist, "demonstrations", lambda *given: owed.append(given[2]) or (["one"] if given[2] else [])
    )
    monkeypatch.setattr(
        generalist, "show_lacking", lambda context, environment, turn, latest: told.append(f"{latest or 'none'} {turn}")
    )

    def learn(context: Any, name: str, found: Any, settings: Any, passes: int, environment_id: Any, *given: Any) -> Any:
        learnt.append((name, environment_id, given[0], given[2]))
        return SimpleNamespace(adapter=name, run=f"run of {name}")

    monkeypatch.setattr(generalist, "learn", learn)
    assert comes_first(context)
    assert generalist.learn_generalist(context, "e", None).adapter == GENERALIST  # type: ignore[arg-type, union-attr, comparison-overlap]
    assert told == [*turns[:-1], "run of generalist-1", turns[-1]]
    solutions = ["one"] if demonstrations else []
    assert learnt == [("generalist-1", None, solutions, 18), (GENERALIST, "e", solutions, None)]
    # What has succeeded stands in for solutions as long as nothing was shown, and stands beside them then.
    assert [o.get("item_price", 0) for o in owed] == ([6, 7] if demonstrations else [0, 0])
    assert all(o.get("refund_all", 0) == demonstrations for o in owed)
    # A process that follows one that died in the second turn leaves what the first has made as it is.
    told.clear()
    learnt.clear()
    made, first = Made("stored"), adapter_id("round", "generalist-1")
    context.store = SimpleNamespace(row=lambda kind, id: made if id == first else None)
    generalist.learn_generalist(context, "e", None)  # type: ignore[arg-type]
    assert (told, [name for name, *_ in learnt]) == (["stored 2"], [GENERALIST])
    # Once one is live, there is nothing to be made first, and nothing is shown in turns.
    told.clear()
    monkeypatch.setattr(generalist, "show_missing", lambda context, environment: told.append("missing"))
    generalist.learn_generalist(live(context, GENERALIST), "e", None)  # type: ignore[arg-type]
    assert told == ([] if demonstrations else ["missing"])


def test_it_comes_first_where_there_is_something_to_learn_from_beforehand(settings_folder: Any) -> None:
    assert not comes_first(context_of())
    assert comes_first(context_of(train={"generalist": 3, "demonstrations": 0, "shown": 5}))
    assert not comes_first(context_of(train={"generalist": 3, "demonstrations": 0, "shown": 5, "hints": 0.0}))
    assert not comes_first(context_of(train={"generalist": 0, "demonstrations": 0, "shown": 5}))


def test_without_a_solution_that_fits_the_base_it_learns_from_what_has_succeeded_and_says_so(
    settings_folder: Any, trained: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_long(*given: Any) -> None:
        raise Untrainable("all 14 reference solutions are longer than the base's context of 10 tokens")

    trained.clear()
    context = context_of(train=SHOWN)
    context.base = None
    environment, _ = compose_generalist(context, target(), SUCCESS)
    rows = [SimpleNamespace(family="item_price")]
    monkeypatch.setattr(generalist, "try_on_diagnosis", lambda context, capabilities: None)
    monkeypatch.setattr(generalist, "stored_environment", lambda *given: environment)
    monkeypatch.setattr(generalist, "demonstrations", too_long)
    monkeypatch.setattr(generalist, "learn", lambda *given: given)
    monkeypatch.setattr(generalist, "successes", lambda context: rows)
    learnt = generalist.learn_generalist(context, "e", None)  # type: ignore[arg-type]
    assert (learnt[2], learnt[6]) == (rows, [])  # type: ignore[index]
    assert "learns from what has succeeded alone: all 14 reference solutions are longer" in caplog.text
    monkeypatch.setattr(generalist, "successes", lambda context: [])
    with pytest.raises(Untrainable, match="context of 10 tokens"):
        generalist.learn_generalist(context, "e", None)  # type: ignore[arg-type]


def test_with_demonstrations_it_comes_first_unless_one_is_live(settings_folder: Any, trained: list[str]) -> None:
    """What others' trainings go on from is then known before they are calibrated."""
    first = context_of(train=SHOWN)
    assert comes_first(first)
    assert not wanted(first, PARTS), "it is not made again at the end"
    for other in (context_of(), context_of(train=SHOWN | {"generalist": 0}), live(context_of(train=SHOWN), GENERALIST)):
        assert not comes_first(other)
    assert not comes_first(context_of(train=SHOWN, synthesizer={"kind": "llm"}))
    later = live(context_of(train=SHOWN), GENERALIST, "refund_payment")
    assert wanted(later, PARTS[:1])
    assert not wanted(later, ())
    first.found = {GENERALIST: TrainResult(adapter="mine", sha256="s", steps=1, run="", ending="learnt", chosen=1)}
    first.stored = SimpleNamespace(
        found=lambda kind, name: first.found.get(name), result=lambda kind, name: first.found[name]
    )
    assert beginning_of(first, "look_up_item") == (GENERALIST, "mine")
    first.found.clear()
    assert beginning_of(first, "look_up_item") is None, "it was not registered"
    assert beginning_of(later, "look_up_item") == (GENERALIST, GENERALIST)
    assert beginning_of(later, "refund_payment") == ("refund_payment", "refund_payment"), "a champion goes before it"
    alone = live(context_of(train=SHOWN | {"carry": False}), GENERALIST)
    assert beginning_of(alone, "look_up_item") is None, "trainings share nothing"


def put_modules(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"target_modules": names}))


def test_a_champion_of_another_shape_is_not_what_a_training_begins_from(
    settings_folder: Any, tmp_path: Path, tiny_model: Any
) -> None:
    """Calibrated it would say nothing of what the training begins with."""
    context = live(context_of(train=SHOWN), GENERALIST, "refund_payment")
    shape = {name: getattr(context.settings.train, name) for name in ("rank", "alpha", "upper_layers")}
    configs = {GENERALIST: shape, "refund_payment": shape | {"rank": 2 * shape["rank"]}}
    context.store = SimpleNamespace(row=lambda kind, id: SimpleNamespace(config=configs[id], path=id))
    context.files, context.base = (
        SimpleNamespace(fetch=lambda name: tmp_path / name),
        SimpleNamespace(policy=tiny_model[0]),
    )
    for name in (GENERALIST, "refund_payment"):
        put_modules(tmp_path / name, *PROJECTIONS)
    assert beginnings_of(context, "refund_payment") == [(GENERALIST, GENERALIST)]
    configs["refund_payment"] = shape
    assert beginnings_of(context, "refund_payment") == [("refund_payment",) * 2, (GENERALIST,) * 2]
    put_modules(tmp_path / "refund_payment", *PROJECTIONS, "gate_up_proj")  # by an earlier version
    assert beginnings_of(context, "refund_payment") == [(GENERALIST, GENERALIST)]
    put_modules(tmp_path / "refund_payment", *PROJECTIONS)
    configs[GENERALIST] = shape | {"alpha": 1}
    assert beginnings_of(context, "refund_payment") == [("refund_payment",) * 2]
    assert beginnings_of(context, "look_up_item") == [None]


def test_it_is_no_capability() -> None:
    assert specialists(["b", GENERALIST, "a"]) == ["b", "a"]
