"""What a gate fixes beforehand: the level a look may spend, and the digest of rules and plan."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from tasks.measuring.gate_plan import (
    NOOP_TASKS,
    GatePlan,
    GateRules,
    Look,
    alpha_at,
    noop_tasks,
    p_phrase,
    rules_sha256,
    settling_episodes,
)

PLAN = GatePlan(GateRules(), {"b": ("y", "x"), "a": ()}, ("t2", "t1"), trials=8, look=2)


def test_the_looks_at_one_split_spend_alpha_between_them():
    assert alpha_at(1, 0.05) == pytest.approx(0.05 * 6 / math.pi**2)
    assert alpha_at(2, 0.05) == pytest.approx(alpha_at(1, 0.05) / 4)
    spent = sum(alpha_at(n, 0.05) for n in range(1, 20_001))
    assert 0.9999 * 0.05 < spent < 0.05


def test_a_drawn_split_has_the_whole_level_once():
    assert alpha_at(1, 0.05, drawn=True) == 0.05
    with pytest.raises(ValueError, match="look 2 at a drawn split"):
        alpha_at(2, 0.05, drawn=True)
    with pytest.raises(ValueError, match="look 0"):
        alpha_at(0, 0.05)


def test_equal_plans_have_one_digest_and_every_part_decides_it():
    same = GatePlan(GateRules(), {"a": (), "b": ("x", "y")}, ("t1", "t2"), trials=8, look=2)
    assert PLAN.sha256 == same.sha256
    assert json.loads(json.dumps(PLAN.as_json()))["alpha"] == pytest.approx(alpha_at(2, 0.05))
    others = [
        GatePlan(GateRules(margin=3.0), same.own, same.tasks, 8, 2),
        GatePlan(GateRules(), {"a": (), "b": ("x",)}, same.tasks, 8, 2),
        GatePlan(GateRules(), same.own, ("t1",), 8, 2),
        GatePlan(GateRules(), same.own, same.tasks, 4, 2),
        GatePlan(GateRules(), same.own, same.tasks, 8, 3),
        GatePlan(GateRules(), same.own, same.tasks, 8, 1, drawn=True),
        GatePlan(GateRules(), same.own, same.tasks, 8, 2, gains={"a": 14.0}),
        GatePlan(GateRules(), same.own, same.tasks, 8, 2, further=("t2",)),
    ]
    assert len({PLAN.sha256, *(o.sha256 for o in others)}) == 1 + len(others)
    assert rules_sha256(GateRules()) == rules_sha256(PLAN.as_json()["rules"]) != rules_sha256(GateRules(alpha=0.1))


def test_a_plan_has_the_digest_that_an_earlier_version_stored():
    """A round that goes on with another one is refused: canonical JSON, and nothing of further tasks without any."""
    assert "further" not in PLAN.as_json()
    assert GatePlan(GateRules(), {}, ("t1",), 8, further=("t3", "t2")).as_json()["further"] == ["t2", "t3"]
    assert rules_sha256({"b": 1, "a": "\u00fc"}) == hashlib.sha256(b'{"a":"\\u00fc","b":1}').hexdigest()
    with pytest.raises(ValueError, match="JSON"):
        rules_sha256({"margin": math.nan})


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.0}, {"alpha": 1.0}, {"fall_confidence": 90.0}, {"margin": -1.0}, {"margin": 100.5},
     {"worthwhile": -0.5}, {"worthwhile": 101.0}],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GateRules(**wrong)


def test_rules_and_looks_at_the_edges_of_what_can_be():
    assert GateRules(margin=0.0, worthwhile=100.0) != GateRules(margin=100.0, worthwhile=0.0)
    assert Look(0.999).number == 1
    for alpha in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"alpha is {alpha}"):
            Look(alpha)
    assert (noop_tasks(NOOP_TASKS - 1), noop_tasks(NOOP_TASKS + 1)) == (NOOP_TASKS - 1, NOOP_TASKS)


@pytest.mark.parametrize(
    ("p", "digits", "said"),
    [
        (0.00002, 4, "p < 0.0001"),
        (0.0001, 4, "p = 0.0001"),
        (0.0303, 4, "p = 0.0303"),
        (0.0303, 3, "p = 0.030"),
        (0.00994, 3, "p = 0.0099"),
        (0.01, 3, "p = 0.010"),
        (0.0, 3, "p < 0.0001"),
    ],
)
def test_no_p_value_is_told_as_nought(p, digits, said):
    assert p_phrase(p, digits) == said


def test_what_settles_falls_is_at_most_the_largest_families_once_more():
    assert settling_episodes(0, 3, families=[100]) == 0
    assert settling_episodes(20, 3) == 2 * 3 * (3 * 2 * 20)
    assert settling_episodes(20, 3, families=[8, 100, 50, 60, 70]) == 2 * 3 * (100 + 70 + 60)
    assert settling_episodes(20, 3, families=[8, 100]) == 2 * 3 * (100 + 40 + 40)
