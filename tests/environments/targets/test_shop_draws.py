"""The shop's draws: every night new tasks, and training, fixed splits and draws never share a content."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from environments.contract import SPLITS, Draw, Drawable, ShiftTested, TargetTask
from environments.picking import for_training
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import load_target
from environments.targets.shop import draws, lines, shifted, world
from environments.targets.shop.families import COMPOSED, FAMILIES
from environments.targets.shop.target import ShopTarget, target
from errors import TargetError
from models.episodes import Episode, Player, play_all
from models.policy import MessagePolicy, Sampling
from models.scripted import NoopPolicy, OraclePolicy
from tests.integration.targets.small_shop import SmallShop

SHOP = target()
DRAWN = ("diagnosis", "validation")
NIGHTS = 40
NIGHTS_TO_LAST = 60
FRESH_PER_FAMILY = 150


def contents(tasks: Iterable[TargetTask]) -> list[str]:
    return [SHOP.content(task) for task in tasks]


@pytest.fixture(scope="module")
def nights() -> list[dict[str, tuple[TargetTask, ...]]]:
    """The tasks of 40 rounds in a row, each with what the earlier ones drew."""
    used: set[str] = set()
    drawn = []
    for number in range(1, NIGHTS + 1):
        draw = Draw(11, number, frozenset(used))
        drawn.append({split: tuple(SHOP.drawn(split, draw)) for split in DRAWN})
        used |= {c for tasks in drawn[-1].values() for c in contents(tasks)}
    return drawn


@pytest.fixture(scope="module")
def everything(nights: list[dict[str, tuple[TargetTask, ...]]]) -> list[TargetTask]:
    return [task for night in nights for tasks in night.values() for task in tasks]


def solved(policy: MessagePolicy, tasks: list[TargetTask]) -> list[bool]:
    played = play_all(Player(SHOP.environment, policy, None, Sampling()), [Episode(t.id, t) for t in tasks])
    return [bool(t.score and t.score.success) for t in played]


def test_the_shop_draws_and_a_finite_target_need_not() -> None:
    assert isinstance(SHOP, Drawable)
    assert not isinstance(SmallShop(), Drawable)


def test_no_content_is_met_twice_in_forty_nights(everything: list[TargetTask]) -> None:
    fixed = [task for split in SPLITS for task in SHOP.tasks(split)]
    evaluated = contents([*fixed, *everything])
    assert len(everything) == NIGHTS * 2 * 160
    assert len(set(evaluated)) == len(evaluated)
    ids = [task.id for task in [*fixed, *everything]]
    assert len(set(ids)) == len(ids)
    trained = contents(SHOP.generate(f, seed) for f in FAMILIES for seed in range(FRESH_PER_FAMILY))
    assert len(trained) >= 3000
    assert not set(trained) & set(evaluated)


def test_no_opening_of_the_test_split_occurs_elsewhere_nor_does_validation_open_like_diagnosis(
    nights: list[dict[str, tuple[TargetTask, ...]]],
) -> None:
    def openings(tasks: Iterable[TargetTask]) -> set[str]:
        return {str(task.payload["opening"]) for task in tasks}

    rounds = [{split: SHOP.tasks(split) for split in DRAWN}, *nights]
    sealed = openings(SHOP.tasks("test"))
    trained = openings(SHOP.generate(f, seed) for f in FAMILIES for seed in range(FRESH_PER_FAMILY))
    for drawn in rounds:
        diagnosis, validation = openings(drawn["diagnosis"]), openings(drawn["validation"])
        assert not diagnosis & validation
        assert not sealed & (diagnosis | validation)
        assert not trained & (diagnosis | validation | sealed)
    assert not trained & sealed
    asked = [m.content for m in SHOP.examples if m.role == "user"]
    assert len(asked) == 13
    assert not sealed & set(asked)


def test_the_shift_test_has_words_goods_and_pairs_of_wants_that_no_other_split_has() -> None:
    shift = load_target("shop:shift")
    tasks = shift.tasks("test")
    assert isinstance(SHOP, ShiftTested)
    assert list(SHOP.shift_test()) == list(tasks)
    assert not shift.tasks("diagnosis")
    assert {t.family for t in tasks} == {*FAMILIES, *COMPOSED}
    assert Counter(t.family for t in tasks) == dict.fromkeys([*FAMILIES, *COMPOSED], draws.PER_FAMILY)
    assert shift.data_hash != SHOP.data_hash
    assert all(solved(OraclePolicy(), list(tasks)))
    assert not any(solved(NoopPolicy(), list(tasks)))
    ours = {f.name: set(getattr(lines.ORDINARY, f.name)) for f in dataclasses.fields(lines.Lines)}
    theirs = {f.name: set(getattr(shifted.LINES, f.name)) for f in dataclasses.fields(lines.Lines)}
    assert {name: ours[name] & theirs[name] for name in ours if ours[name] & theirs[name]} == {"greetings": {""}}
    stock, other = world.ORDINARY, shifted.STOCK
    assert not set(stock.items) & set(other.items)
    assert not {o for i in stock.items.values() for o in i["options"]} & {
        o for i in other.items.values() for o in i["options"]
    }
    for kind in ("customers", "towns", "coupon_words"):
        assert not set(getattr(stock, kind)) & set(getattr(other, kind))


def test_composed_scenarios_have_contents_of_training_only() -> None:
    spec = CompositionSpec("shop", SHOP.data_hash, "look_up_item", ("item_price", "item_options"), ("wants_person",))
    source = ComposedEnvironment(SHOP, spec)
    made = [source.scenario(seed) for seed in range(300)] + [source.own_scenario(seed) for seed in range(300)]
    assert all(for_training(c) for c in contents(made))


def test_splits_of_a_draw_are_as_the_fixed_ones(nights: list[dict[str, tuple[TargetTask, ...]]]) -> None:
    for split in DRAWN:
        wanted = [(t.family, t.capabilities, t.split) for t in SHOP.tasks(split)]
        assert all([(t.family, t.capabilities, t.split) for t in night[split]] == wanted for night in nights)


def test_drawn_tasks_can_be_solved_and_none_by_doing_nothing(everything: list[TargetTask]) -> None:
    sample = everything[::5]  # every place of a split, in one night or another
    assert {t.family for t in sample} == set(FAMILIES)
    assert all(solved(OraclePolicy(), sample))
    assert not any(solved(NoopPolicy(), sample[::3]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_contents_for_training_and_for_evaluation(family: str) -> None:
    """At least 1,200 on each side among 6,000 seeds, and more than 60 nights and the fixed splits need."""
    found = {draws.content_of(s.opening, s.reference) for s in (draws.draw(family, seed) for seed in range(6000))}
    training = sum(map(for_training, found))
    evaluation = len(found) - training
    assert min(training, evaluation) >= 1200
    needed = (2 * NIGHTS_TO_LAST + len(SPLITS)) * draws.PER_FAMILY
    assert needed < evaluation


def test_a_content_is_the_opening_and_the_reference_whatever_the_seed() -> None:
    task = SHOP.tasks("test")[0]
    payload = {**task.payload, "database": {}, "replies": []}
    assert SHOP.content(TargetTask("x", "test", "x", 9, payload)) == SHOP.content(task)
    for field, other in (("opening", "Hello?"), ("reference", [])):
        assert SHOP.content(TargetTask("x", "test", "x", 9, {**payload, field: other})) != SHOP.content(task)


def test_a_draw_is_decided_by_its_seed_number_and_what_was_used() -> None:
    one = SHOP.drawn("validation", Draw(3, 2))
    assert one == ShopTarget().drawn("validation", Draw(3, 2))
    assert not {t.id for t in one} & {t.id for t in SHOP.drawn("validation", Draw(3, 3))}
    assert not {t.id for t in one} & {t.id for t in SHOP.drawn("validation", Draw(4, 2))}
    used = frozenset(contents(one[::2]))
    again = SHOP.drawn("validation", Draw(3, 2, used))
    assert not used & set(contents(again))
    # A seed always gives the same scenario: an id says the content, whatever was used.
    payloads = {t.id: t.payload for t in one}
    both = [t for t in again if t.id in payloads]
    assert len(both) >= len(one) / 2 - 1
    assert all(t.payload == payloads[t.id] for t in both)


def test_further_tasks_are_of_the_same_round_and_new() -> None:
    draw = Draw(3, 2, frozenset(contents(SHOP.drawn("validation", Draw(3, 1)))))
    more = SHOP.further(draw, "wants_person", 30)
    assert (len(more), {t.family for t in more}, {t.split for t in more}) == (30, {"wants_person"}, {"validation"})
    assert SHOP.further(draw, "wants_person", 7) == more[:7]
    assert not SHOP.further(draw, "wants_person", 0)
    others = [t for split in DRAWN for t in SHOP.drawn(split, draw)] + [t for s in SPLITS for t in SHOP.tasks(s)]
    found = contents(more)
    assert len(set(found)) == 30
    assert not set(found) & (set(contents(others)) | draw.used)
    assert not {t.id for t in more} & {t.id for t in others}
    with pytest.raises(TargetError, match="family 'nobody' does not exist"):
        SHOP.further(draw, "nobody", 1)


def test_another_process_draws_the_same() -> None:
    code = (
        "import json; from environments.contract import Draw; from environments.targets.shop.target import target as t;"
        "s = t(); d = Draw(5, 7, frozenset(['a', 'b']));"
        "print(json.dumps([s.data_hash, [x.id + s.content(x) for x in s.drawn('validation', d)],"
        " s.content(s.generate('item_price', 8))]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        for seed in ("1", "2")
    ]
    drawn = [t.id + SHOP.content(t) for t in SHOP.drawn("validation", Draw(5, 7, frozenset(["b", "a"])))]
    here = [SHOP.data_hash, drawn, SHOP.content(SHOP.generate("item_price", 8))]
    assert [json.loads(run.stdout) for run in runs] == [here, here]


def quickest(work: Callable[[], object]) -> float:
    """Least of three processor times, since the machine is shared and collecting a full test process takes seconds."""
    took = []
    for _ in range(3):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def test_a_draw_and_a_thousand_scenarios_are_quick(everything: list[TargetTask]) -> None:
    """Both splits with 10,000 used contents; scenarios for training."""
    used = frozenset(contents(everything)[:10_000])
    assert quickest(lambda: [SHOP.drawn(split, Draw(11, 40, used)) for split in DRAWN]) < 1.0
    assert quickest(lambda: [SHOP.generate("cancel_pending", seed) for seed in range(1000)]) < 2.0


def test_later_nights_are_drawn_as_the_first_ones(everything: list[TargetTask]) -> None:
    """Lines of few contents must not be used up early: their share in the last nights is as in the first."""
    prices = [t.payload["opening"] for t in everything if t.family == "item_price"]
    third = len(prices) // 3
    for start in ("Hello.", "Hi."):
        early, late = (sum(o.startswith(start) for o in part) / third for part in (prices[:third], prices[-third:]))
        assert abs(early - late) < 0.22  # three and a half standard errors of a difference of two shares of 106 tasks
        assert early > 0.2


def test_a_family_without_unused_contents_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "SEEDS_OF_A_ROUND", 120)
    shop = ShopTarget()  # one of its own: the shared one keeps its latest draw
    used: set[str] = set()
    said = ""
    while not said:
        draw = Draw(0, 1, frozenset(used))
        try:
            used |= {c for split in DRAWN for c in contents(shop.drawn(split, draw))}
        except TargetError as error:
            said = str(error)
    assert any(f"family '{family}' has" in said for family in FAMILIES)
    for words in ("contents left for the", "split, which needs", "found for evaluation", "Begin a new home"):
        assert words in said
    assert len(used) >= 160  # it went on until nothing was left


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(TargetError, match="'test' is not drawn"):
        SHOP.drawn("test", Draw(0, 1))
    with pytest.raises(TargetError, match="-1 is negative"):
        Draw(0, -1)
    with pytest.raises(TargetError, match="out of range"):
        SHOP.generate("item_price", draws.FRESH_SEEDS)


def test_a_draw_has_test_tasks_and_a_shift_test_of_its_own() -> None:
    """What methods are compared on shares no content and no opening with anything else of the seed, fixed or drawn."""
    draw = Draw(54, 1)
    test, again, other = SHOP.drawn_test(draw), ShopTarget().drawn_test(draw), SHOP.drawn_test(Draw(55, 1))
    assert [t.id for t in test] == [t.id for t in again]
    assert {t.split for t in test} == {"test"}
    assert Counter(t.family for t in test) == dict.fromkeys(FAMILIES, draws.PER_FAMILY)
    elsewhere = [t for split in SPLITS for t in SHOP.tasks(split)]
    elsewhere += [t for split in DRAWN for t in SHOP.drawn(split, draw)]
    for family in FAMILIES:
        more = SHOP.further(draw, family, draws.MOST_FURTHER + 120)
        assert SHOP.further(draw, family, draws.MOST_FURTHER) == more[: draws.MOST_FURTHER]
        elsewhere += more
    elsewhere += [SHOP.generate(family, seed) for family in FAMILIES for seed in range(50)]
    assert set(contents(test)).isdisjoint(contents(elsewhere))
    assert {c[:8] for c in contents(test)}.isdisjoint(c[:8] for c in contents(elsewhere))
    assert not {t.id for t in test} & {t.id for t in other}
    shift, fixed = SHOP.drawn_shift(draw), SHOP.shift_test()
    assert [t.family for t in shift] == [t.family for t in fixed]
    assert not {t.id for t in shift} & {t.id for t in (*fixed, *SHOP.drawn_shift(Draw(55, 1)))}
    assert {t.split for t in shift} == {"test"}


def test_no_two_tasks_of_a_draws_shift_test_have_one_content() -> None:
    """Of the second only: all others stay what figures are stored of."""
    fixed, drawn = SHOP.shift_test(), SHOP.drawn_shift(Draw(83, 1))
    plain = [draws.draw(t.family, t.seed, at=draws.SHIFTED) for t in drawn]
    changed = [t.id for t, before in zip(drawn, plain, strict=True) if t.payload != vars(before)]
    assert changed == ["shift-3149489580-item_price-7-1"]
    assert not [t.id for t in drawn if t.id.count("-") > 3 and t.id not in changed]
    for tasks in (fixed, drawn):
        assert len(set(contents(tasks))) == len(tasks) == 192
    assert all(t.id.count("-") == 2 for t in fixed)
