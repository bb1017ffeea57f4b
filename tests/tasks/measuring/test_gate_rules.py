"""The gate's two phases, with outcomes made so that the right verdict is known."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from tasks.measuring.decisions import GateVerdict
from tasks.measuring.falls import FallKind
from tasks.measuring.gate_plan import GateRules, Look, alpha_at
from tasks.measuring.gate_rules import judge_capabilities, judge_release, unclear_families

RULES, LOOK = GateRules(), Look(0.05)


def family(name: str, base: list[float], other: list[float], trials: int = 2) -> pd.DataFrame:
    """One row per trial; every trial of a task has the task's outcome."""
    tasks = np.repeat([f"{name}-{i}" for i in range(len(base))], trials)
    return pd.DataFrame(
        {"task": tasks, "family": name, "base": np.repeat(base, trials), "other": np.repeat(other, trials)}
    )


def fell(count: int, lost: int, name: str = "refund") -> pd.DataFrame:
    return family(name, [1.0] * count, [0.0] * lost + [1.0] * (count - lost))


GAIN = family("address", [0.0] * 20, [1.0] * 15 + [0.0] * 5)
OWN = {"set_address": ("address",)}


def alone(*frames: pd.DataFrame, look: Look = LOOK, rules: GateRules = RULES, **more):
    return judge_capabilities({"set_address": pd.concat(frames)}, OWN, rules, look, **more)["set_address"]


def release(*frames: pd.DataFrame, look: Look = LOOK, trials: int = 2, own=OWN):
    return judge_release(pd.concat(frames), RULES, look, trials, own)


# Phase A.


def test_a_gain_on_its_own_tasks_passes():
    verdict = alone(GAIN)
    assert verdict.verdict is GateVerdict.BETTER
    assert verdict.passed
    assert verdict.difference.points == pytest.approx(75.0)
    assert "+75.0 points over 20 tasks" in verdict.reasons[0]
    assert json.loads(json.dumps(verdict.as_json()))["verdict"] == "better"
    sure = family("address", [0.0] * 60, [1.0] * 60)
    assert ", p < 0.0001" in alone(sure).reasons[0]


def test_other_families_change_no_verdict_of_phase_a():
    weak = family("address", [0.0] * 20, [1.0] * 3 + [0.0] * 17)
    for own in (GAIN, weak):
        assert alone(own).verdict is alone(own, fell(30, 30)).verdict


def test_the_look_decides_the_level_and_the_sentence_says_so():
    gain = family("address", [0.0] * 30, [1.0] * 6 + [0.0] * 24)  # p = 2 / 2^6 = 0.031
    assert alone(gain).passed
    late = alone(gain, look=Look(0.0304, 1))
    assert late.verdict is GateVerdict.UNDERPOWERED
    assert (late.alpha, late.look) == (0.0304, 1)
    assert "not significant at 0.0304, what look 1 may spend" in late.reasons[0]


@pytest.mark.parametrize(("look", "capabilities"), [(25, 1), (13, 4), (60, 4)])
def test_a_clear_gain_passes_whatever_the_number_of_looks(look, capabilities):
    gain = family("address", [0.0] * 100, [1.0] * 100)
    late = Look(alpha_at(look, 0.05), look)
    tried = judge_capabilities({f"c{i}": gain for i in range(capabilities)}, {}, RULES, late)
    assert all(decision.passed for decision in tried.values())
    assert all("p < 0.0001, < 0.0001 after Holm over" in decision.reasons[0] for decision in tried.values())
    assert judge_release(gain, RULES, late, 1, {"c0": ()}).promoted


def test_holm_is_over_all_capabilities_tried():
    gain = family("address", [0.0] * 30, [1.0] * 6 + [0.0] * 24)
    noise = family("address", [1, 0] * 15, [0, 1] * 15)
    tried = judge_capabilities(
        {"set_address": gain, "other_one": noise}, OWN | {"other_one": ("address",)}, RULES, LOOK
    )
    assert tried["set_address"].adjusted_p == pytest.approx(4 / 2**6)
    assert not tried["set_address"].passed
    assert tried["set_address"].tried == 2
    assert judge_capabilities({}, {}, RULES, LOOK) == {}


def test_of_so_few_tasks_that_only_the_last_of_several_can_pass_it_is_not_said_that_none_could():
    def of_few(won: int):
        pairs = {"few": family("few", [0.0] * 7, [1.0] * won + [0.0] * (7 - won)),
                 "clear": family("clear", [0.0] * 12, [1.0] * 12)}  # fmt: skip
        return judge_capabilities(pairs, {name: (name,) for name in pairs}, RULES, Look(0.0304))["few"]

    assert of_few(7).passed
    assert of_few(6).reasons[-1] == (
        "7 tasks cannot give a p-value below 0.016, so no gain could have passed unless others had; "
        "evaluate on more tasks."
    )


def test_no_gain_is_not_better_and_a_gain_too_small_to_see_is_underpowered():
    assert alone(family("address", [1, 0] * 10, [0, 1] * 10)).verdict is GateVerdict.NOT_BETTER
    assert alone(family("address", [1.0] * 20, [0.0] * 20)).verdict is GateVerdict.NOT_BETTER
    small = family("address", [0.0] * 20, [1.0] * 3 + [0.0] * 17)
    assert alone(small).verdict is GateVerdict.UNDERPOWERED
    assert any("80 % power" in reason for reason in alone(small).reasons)
    # The tasks were drawn for a gain of 40 points, which they would have shown.
    assert alone(small, gains={"set_address": 40.0}).verdict is GateVerdict.NOT_BETTER
    few = alone(family("address", [0.0] * 4, [1.0] * 4))
    assert few.verdict is GateVerdict.UNDERPOWERED
    assert any("4 tasks cannot give" in reason for reason in few.reasons)


def test_unknown_own_families_mean_all_tasks():
    pair = pd.concat([GAIN, fell(10, 7)])
    verdict = judge_capabilities({"set_address": pair}, {}, RULES, LOOK)["set_address"]
    assert verdict.difference.tasks == 30


def test_what_no_task_is_about_is_underpowered_and_costs_the_others_nothing():
    gain = family("address", [0.0] * 30, [1.0] * 6 + [0.0] * 24)  # p = 2 / 2^6 = 0.031, which passes alone
    lost = fell(5, 0, "coupon").assign(other=np.nan)
    pairs = {"no_task": gain, "set_address": gain, "not_finished": lost, "no_episode": gain[:0]}
    own = OWN | {"no_task": ("refund",), "not_finished": ("coupon",)}
    tried = judge_capabilities(pairs, own, RULES, LOOK)
    assert list(tried) == list(pairs)
    assert tried["set_address"] == alone(gain)
    assert tried["set_address"].passed
    for name in ("no_task", "not_finished", "no_episode"):
        assert tried[name].verdict is GateVerdict.UNDERPOWERED
        assert (tried[name].difference, tried[name].adjusted_p, tried[name].mde) == (None, None, None)
    assert tried["no_task"].reasons == (
        "Validation has no task of its families (refund), so no gain could have been found.",
    )
    assert "Both sides finished no validation task of its families (coupon)" in tried["not_finished"].reasons[0]
    assert alone(fell(5, 0)).verdict is GateVerdict.UNDERPOWERED, "where nothing at all is judged"


def test_trials_that_the_adapter_alone_lost_are_no_gain():
    """With both at one of two trials, losing the failed ones of eight tasks would pass for a gain."""
    first, second = ([1.0] * 20, [1.0] * 20), ([0.0] * 20, [np.nan] * 8 + [0.0] * 12)
    address = pd.concat([family("address", *first, trials=1), family("address", *second, trials=1).assign(trial=1)])
    verdict = alone(address)
    assert (verdict.difference.points, verdict.adjusted_p) == (pytest.approx(20.0), 2**-7)
    assert verdict.verdict is GateVerdict.UNDERPOWERED
    assert "the adapter lost 4 of 20 tasks to errors, the live release 0" in verdict.reasons[-1]
    assert alone(family("address", [0.0] * 20, [1.0] * 19 + [np.nan])).passed, "one task is what it can resolve"
    down = GAIN.assign(base=np.where(np.arange(40) < 8, np.nan, GAIN["base"]))
    assert alone(down.assign(other=down["other"].where(down["base"].notna()))).passed, "a server was down for both"


def test_bad_pairs_are_refused_by_name():
    with pytest.raises(ValueError, match="set_address has no column other"):
        alone(GAIN.drop(columns="other"))
    with pytest.raises(ValueError, match="alpha is 0"):
        Look(0)


# Phase B.


def test_an_assembled_release_that_gains_and_loses_nothing_is_promoted():
    verdict = release(GAIN, fell(40, 0))
    assert verdict.verdict is GateVerdict.PROMOTED
    assert verdict.promoted
    assert verdict.difference.points == pytest.approx(25.0)
    assert verdict.own.points == verdict.capabilities["set_address"].points == pytest.approx(75.0)
    assert verdict.elsewhere.points == 0.0
    assert verdict.pass_k == verdict.difference, "all trials of a task came to the same"
    assert verdict.families == {"address": verdict.capabilities["set_address"], "refund": verdict.elsewhere}
    assert set(verdict.falls) == {"address", "refund"}
    assert set(verdict.wholes) == {"overall", "all other families together", "pass^2"}
    assert {fall.kind for fall in (*verdict.falls.values(), *verdict.wholes.values())} == {FallKind.HELD}
    assert json.loads(json.dumps(verdict.as_json()))["falls"]["refund"]["kind"] == "held"


@pytest.mark.parametrize(
    ("count", "lost", "verdict"),
    [
        (10, 1, GateVerdict.PROMOTED),  # one task is what ten can resolve: passes, and is said
        (10, 2, GateVerdict.UNDERPOWERED),  # more than one task, not distinguishable: blocks all the same
        (10, 7, GateVerdict.REGRESSION),
        (100, 2, GateVerdict.PROMOTED),  # exactly the margin
        (100, 3, GateVerdict.UNDERPOWERED),
        (100, 12, GateVerdict.REGRESSION),
    ],
)
def test_a_fall_of_another_family_blocks_what_gained(count, lost, verdict):
    decision = release(GAIN, fell(count, lost))
    assert decision.verdict is verdict
    if lost / count > 0.02:
        assert any("refund: fell by" in reason for reason in decision.reasons)


def test_many_falls_of_one_task_are_caught_together():
    decision = release(GAIN, *[fell(10, 1, f"family_{i}") for i in range(8)])
    assert all(decision.falls[f"family_{i}"].kind is FallKind.WITHIN for i in range(8))
    assert decision.wholes["all other families together"].kind is FallKind.REGRESSION
    assert decision.verdict is GateVerdict.REGRESSION


def test_a_fall_inside_the_own_families_blocks_too():
    own = {"set_address": ("address", "refund")}
    assert release(GAIN, fell(10, 7), own=own).verdict is GateVerdict.REGRESSION


def test_a_gain_that_routing_loses_is_not_promoted():
    lost = family("address", [0.0] * 20, [1.0] * 2 + [0.0] * 18)
    decision = release(lost, fell(40, 0))
    assert decision.verdict is GateVerdict.UNDERPOWERED
    assert "not significant" in decision.reasons[0]
    same = release(family("address", [0.0] * 20, [0.0] * 20), fell(40, 0))
    assert same.verdict is GateVerdict.NOT_BETTER
    assert (same.difference.points, same.difference.p, same.difference.changed) == (0.0, 1.0, 0)


def test_a_gain_that_noise_elsewhere_hides_overall_still_counts_on_its_own_tasks():
    half = [1.0] * 7 + [0.0] * 33
    noise = family("refund", half, half[::-1])  # seven tasks up, seven down
    gain = family("address", [0.0] * 20, [1.0] * 7 + [0.0] * 13)
    decision = release(gain, noise)
    assert decision.difference.p > 0.05 >= decision.own.p
    assert decision.verdict is GateVerdict.PROMOTED
    assert any("still there after routing" in reason for reason in decision.reasons)
    assert release(gain, noise, own={}).verdict is GateVerdict.UNDERPOWERED


def test_steadiness_is_watched_by_pass_k():
    """Every task succeeds three times of four now and did so on three tasks of four before: the same success, but
    hardly a task on which four trials in a row succeed."""
    before = family("refund", [1.0] * 30 + [0.0] * 10, [0.0] * 40, trials=4)
    after = before.assign(other=np.tile([1.0, 1.0, 1.0, 0.0], 40))
    decision = release(family("address", [0.0] * 20, [1.0] * 20, trials=4), after, trials=4)
    assert decision.elsewhere.points == 0.0
    assert decision.pass_k.points == pytest.approx(100 * (20 - 30) / 60)
    assert decision.wholes["pass^4"].kind in (FallKind.REGRESSION, FallKind.UNCLEAR)
    assert not decision.promoted
    assert any("pass^4: fell by" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("count", "lost", "verdict", "kind"),
    [
        (20, 0, GateVerdict.PROMOTED, FallKind.HELD),
        (20, 1, GateVerdict.PROMOTED, FallKind.WITHIN),
        (20, 2, GateVerdict.UNDERPOWERED, FallKind.UNCLEAR),
        (20, 8, GateVerdict.REGRESSION, FallKind.REGRESSION),
    ],
)
def test_further_tasks_alone_settle_whether_a_family_fell(count, lost, verdict, kind):
    pair, since = pd.concat([GAIN, fell(10, 2)]), fell(count, lost).assign(task=lambda f: "more-" + f["task"])
    assert unclear_families(pair, RULES) == ["refund"]
    decision = judge_release(pair, RULES, LOOK, 2, OWN, settled=since)
    assert decision.verdict is verdict
    assert decision.falls["refund"].kind is kind
    told = "refund: -20.0 points over 10 tasks, which may be noise, so both sides played more: "
    assert any(r.startswith(f"{told}{-100 * lost / count:+.1f} over {count}.") for r in decision.reasons)
    assert decision.wholes["all other families together"].kind is kind, "which are this one family here"
    # They decide on falls and on nothing else.
    plain = release(GAIN, fell(10, 2))
    assert (decision.difference, decision.own, decision.families) == (plain.difference, plain.own, plain.families)


def test_settling_one_family_excuses_no_other_fall():
    since = fell(20, 0).assign(task=lambda f: "more-" + f["task"])

    def settled(*more: pd.DataFrame) -> GateVerdict:
        return judge_release(pd.concat([GAIN, fell(10, 2), *more]), RULES, LOOK, 2, OWN, settled=since).verdict

    steady = fell(200, 0, "price")
    assert settled(steady) is GateVerdict.PROMOTED
    assert settled(steady, fell(10, 2, "coupon")) is GateVerdict.UNDERPOWERED
    assert settled(steady, fell(10, 9, "coupon")) is GateVerdict.REGRESSION
    # What is lost for certain in all other families together is not settled by one of them.
    assert settled(*[fell(10, 1, f"family_{i}") for i in range(8)]) is GateVerdict.REGRESSION


def test_pass_k_stays_unclear_where_what_settles_a_family_cannot_tell_it():
    """Success of the own and of another family, and of one that trades what it never solved for being less steady."""
    rates = {"steady": (0.98, 0.90), "own": (0.4, 0.6), "other": (0.9, 0.9)}
    tasks = [("steady", i) for i in range(50)] + [("own", i) for i in range(15)] + [("other", i) for i in range(35)]
    first, later = np.random.default_rng(80), np.random.default_rng(10_080)

    def played(draws: np.random.Generator, names: set[str], trials: int) -> pd.DataFrame:
        rows = []
        for name, i in [task for task in tasks if task[0] in names]:
            base, other = rates[name]
            base = 0.0 if name == "steady" and i < 4 else base
            rows += [(f"{name}-{i}", name, *(float(draws.random() < p) for p in (base, other))) for _ in range(trials)]
        pair = pd.DataFrame(rows, columns=["task", "family", "base", "other"])
        return pair.assign(other=pair["other"].where(pair["family"] != "other", pair["base"]))

    rules = GateRules(settling=10)
    pair, once = played(first, set(rates), 3), played(later, {"steady"}, 1)
    own = {"learnt": ("own",)}
    unsettled = judge_release(pair, rules, Look(0.03), 3, own)
    assert unsettled.falls["steady"].kind is unsettled.wholes["pass^3"].kind is FallKind.UNCLEAR
    settled = judge_release(pair, rules, Look(0.03), 3, own, settled=once)
    assert settled.falls["steady"].kind is not FallKind.UNCLEAR
    assert settled.wholes["pass^3"].kind is FallKind.UNCLEAR
    assert settled.verdict is GateVerdict.UNDERPOWERED


def test_only_what_is_unclear_can_be_settled_the_largest_fall_first():
    pair = pd.concat([GAIN, fell(10, 2), fell(10, 7, "lost"), fell(10, 1, "held"), fell(12, 3, "coupon")])
    assert unclear_families(pair, RULES) == ["coupon", "refund"]
    assert unclear_families(GAIN, RULES) == []


def test_further_tasks_of_own_families_do_not_make_the_whole_better():
    """Two of eight own tasks gained and six of twelve further ones; three other families lost a task each."""
    own = family("address", [0.0] * 8, [1.0] * 2 + [0.0] * 6)
    split = pd.concat([own, *[fell(8, int(i < 3), f"family_{i}") for i in range(19)]])
    more = family("address", [0.0] * 12, [1.0] * 6 + [0.0] * 6).assign(task=lambda f: "more-" + f["task"])
    decision = judge_release(split, RULES, LOOK, 2, OWN, further=more)
    assert (decision.difference.points, decision.difference.tasks) == (pytest.approx(-0.625), 160)
    assert decision.pass_k.tasks == 160
    assert (decision.own.points, decision.own.tasks) == (pytest.approx(40.0), 20)
    assert decision.own == decision.capabilities["set_address"]
    assert decision.families["address"].tasks == 20
    assert decision.kept
    assert decision.verdict is GateVerdict.NOT_BETTER
    everything = {"generalist": split["family"].unique()}
    assert judge_release(split, RULES, LOOK, 2, everything, further=more).own.tasks == 160, "the whole once more"


def test_what_nobody_finished_blocks():
    lost = fell(5, 0, "coupon").assign(other=np.nan)
    decision = release(GAIN, fell(40, 0), lost)
    assert decision.verdict is GateVerdict.UNDERPOWERED
    assert decision.falls["coupon"].kind is FallKind.UNSEEN
    assert "coupon" not in decision.families
    assert any("coupon: no task was finished by both sides" in reason for reason in decision.reasons)


def test_sides_that_finished_no_task_in_common_have_a_verdict():
    halves = family("refund", [np.nan] * 5 + [1.0] * 5, [1.0] * 5 + [np.nan] * 5)
    further = family("address", [0.0] * 12, [1.0] * 12)
    for more in (None, further):
        decision = judge_release(halves, RULES, LOOK, 2, OWN, further=more)
        assert decision.verdict is GateVerdict.UNDERPOWERED
        assert (decision.difference, decision.mde, decision.own is None) == (None, None, more is None)
        assert decision.reasons[0] == "As a whole: nothing was compared."
        assert "errors took the other episodes. Mend what they were lost to" in decision.reasons[-1]


@pytest.mark.parametrize(
    ("count", "base", "other", "kind"),
    [
        (50, 0, 45, FallKind.LOST),  # all that it would have failed
        (50, 0, 2, FallKind.LOST),
        (50, 0, 1, FallKind.HELD),  # one task is what a family can resolve
        (50, 20, 21, FallKind.HELD),  # a server was down for both
        (200, 0, 4, FallKind.HELD),  # exactly the margin
        (50, 50, 50, FallKind.UNSEEN),
    ],
)
def test_what_the_candidate_alone_lost_to_errors_blocks(count, base, other, kind):
    outcomes = [[np.nan] * lost + [1.0] * (count - lost) for lost in (base, other)]
    decision = release(GAIN, family("refund", *outcomes))
    assert decision.falls["refund"].kind is kind
    assert decision.verdict is (GateVerdict.PROMOTED if kind is FallKind.HELD else GateVerdict.UNDERPOWERED)
    gone = max(base, other)
    assert decision.difference.left_out == gone
    assert f", {gone} more left out because a side lost them to errors" in decision.reasons[0]
    said = f"refund: the candidate lost {other} of {count} tasks to errors, the live release {base}"
    assert any(reason.startswith(said) for reason in decision.reasons) is (kind is FallKind.LOST)


def test_trials_that_the_candidate_alone_lost_block_too():
    """With both sides at one of two trials, losing the failed ones of eight tasks would pass for a gain."""
    first, second = ([1.0] * 20, [1.0] * 20), ([0.0] * 20, [np.nan] * 8 + [0.0] * 12)
    address = pd.concat([family("address", *first, trials=1), family("address", *second, trials=1).assign(trial=1)])
    decision = release(address)
    assert (decision.difference.points, decision.difference.p) == (pytest.approx(20.0), 2**-7)
    assert decision.falls["address"].kind is FallKind.LOST
    assert "address: the candidate lost 4 of 20 tasks to errors, the live release 0" in decision.falls["address"].reason
    assert decision.verdict is GateVerdict.UNDERPOWERED
    both = release(address.assign(base=address["base"].where(address["other"].notna())))
    assert both.falls["address"].kind is FallKind.HELD


def test_a_task_lost_in_each_of_many_families_blocks_overall():
    few = [family(f"family_{i}", [1.0] * 10, [np.nan] + [1.0] * 9) for i in range(8)]
    decision = release(GAIN, *few)
    assert decision.falls["family_0"].kind is FallKind.HELD
    assert decision.wholes["overall"].kind is FallKind.LOST
    assert decision.verdict is GateVerdict.UNDERPOWERED
    fallen = release(GAIN, family("refund", [1.0] * 20, [np.nan] * 5 + [0.0] * 15))
    assert fallen.verdict is GateVerdict.REGRESSION, "what is known to fall is said as that"
    assert "left out" not in release(GAIN).reasons[0]
