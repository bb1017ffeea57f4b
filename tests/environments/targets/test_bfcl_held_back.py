"""The tasks of BFCL on which methods are compared: none that was looked at while the profile was chosen."""

from __future__ import annotations

import json
from pathlib import Path

from environments.contract import HoldsBack
from environments.targets.bfcl.single.items import FAMILIES
from environments.targets.catalogue import load_target


def test_what_methods_are_compared_on_was_in_no_comparison_before() -> None:
    """Neither in a stored file of a seed, nor in one with the profile as it was; and it is in no other split."""
    target = load_target("bfcl:single")
    assert isinstance(target, HoldsBack)
    test, shift = target.held_back_test(), target.held_back_shift()
    assert (len(test), len(shift)) == (114, 2028)
    ids, beyond = {t.id for t in test}, {t.id for t in shift}
    for path in (Path(__file__).parents[3] / "benchmarks" / "results").glob("bfcl*/bfcl-single-seed-*.json"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if len(stored["families"]) in (200, 300):
            assert ids.isdisjoint(stored["families"])
            assert beyond.isdisjoint(stored["shift"])
    assert ids < {t.id for t in target.tasks("test")}
    assert {t.family for t in test} == {t.family for t in test[:40]} == set(FAMILIES)
