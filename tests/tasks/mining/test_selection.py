"""Selection by coverage and contrast, and the analyst that reads checks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import tasks.contrast as contrast_file
from errors import LabelError
from tasks.mining.checks_analyst import bootstrap_labels, discover_candidates, label_matrix
from tasks.mining.selection import select
from tasks.reporting.analyst import analyst_warnings
from tasks.round.results import ContrastResult


def run_of(
    run: int, marks: dict[str, str], outcome: dict[str, bool], capability: str = "look_up_first"
) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"run": run, "trajectory_id": t, "capability": capability, "label": mark, "weight": 1, "passed": outcome[t]}
            for t, mark in marks.items()
        ]
    )


def cohort(lacking_failed: int, present_failed: int, lacking_passed: int, present_passed: int, na: int = 0):
    """Marks and outcomes; `na` failed trajectories do not need the capability."""
    groups = [("LACKING", False, lacking_failed), ("PRESENT", False, present_failed), ("LACKING", True, lacking_passed)]
    groups += [("PRESENT", True, present_passed), ("NA", False, na)]
    marks, outcome = {}, {}
    for label, passed, count in groups:
        for _ in range(count):
            name = f"t{len(marks):03d}"
            marks[name], outcome[name] = label, passed
    return marks, outcome


def repeated(marks, outcome, runs: int = 10, capability: str = "look_up_first") -> pd.DataFrame:
    return pd.concat([run_of(r, marks, outcome, capability) for r in range(runs)], ignore_index=True)


def test_na_counts_in_coverage_and_not_in_the_contrast():
    row = select(repeated(*cohort(3, 1, 1, 4, na=6)))[0]
    assert row.mean_cov == pytest.approx(3 / 10)
    assert row.mean_er_failed == pytest.approx(3 / 4)
    assert row.mean_er_passed == pytest.approx(1 / 5)
    assert row.mean_delta == pytest.approx(0.55)
    assert (row.selected, row.runs_passed, row.std_delta) == (True, 10, 0.0)


def test_thresholds_are_inclusive_despite_floats():
    # ER- 7/10, ER+ 5/10: 0.7 - 0.5 is below 0.2 in floats. Coverage 1/10 exactly.
    assert select(repeated(*cohort(7, 3, 5, 5)))[0].selected
    assert select(repeated(*cohort(1, 0, 0, 1, na=9)))[0].selected
    assert not select(repeated(*cohort(1, 0, 0, 1, na=10)))[0].selected
    assert not select(repeated(*cohort(69, 31, 50, 50)))[0].selected


def test_empty_denominators_are_zero():
    row = select(repeated(*cohort(0, 0, 0, 0, na=4)))[0]
    assert (row.mean_cov, row.mean_delta, row.selected) == (0.0, 0.0, False)


def test_runs_that_lack_the_capability_do_not_pass_and_do_not_enter_the_means():
    marks, outcome = cohort(4, 0, 0, 4)
    other = repeated(marks, outcome, 10, "verify_identity")
    seven = select(pd.concat([other, repeated(marks, outcome, 7)]))
    by_name = {row.name: row for row in seven}
    assert (by_name["look_up_first"].runs_seen, by_name["look_up_first"].selected) == (7, False)
    assert by_name["look_up_first"].mean_delta == 1.0
    assert [row.name for row in seven] == ["look_up_first", "verify_identity"]  # equal Delta and coverage: by name
    eight = {row.name: row for row in select(pd.concat([other, repeated(marks, outcome, 8)]))}
    assert eight["look_up_first"].selected


def test_standard_deviation_is_of_the_population():
    marks, outcome = cohort(4, 0, 0, 4)
    half = dict(marks) | {"t000": "PRESENT", "t001": "PRESENT"}
    row = select(pd.concat([run_of(0, marks, outcome), run_of(1, half, outcome)]), k=2, n=2)[0]
    assert row.mean_delta == pytest.approx(0.75)
    assert row.std_delta == pytest.approx(0.25)


def test_order_weights_and_votes():
    marks, outcome = cohort(4, 0, 0, 4)
    weaker, _ = cohort(4, 0, 0, 4)
    weaker = dict(weaker) | {"t004": "LACKING"}
    labels = pd.concat([repeated(marks, outcome, 3), repeated(weaker, outcome, 3, "a_weaker_one")], ignore_index=True)
    labels.loc[(labels.run == 0) & (labels.trajectory_id == "t003"), "label"] = "NA"
    rows = select(labels, k=2, n=3)
    assert [row.name for row in rows] == ["look_up_first", "a_weaker_one"]
    assert rows[0].evidence == (("t000", 3), ("t001", 3), ("t002", 3), ("t003", 2))
    heavy = labels.copy()
    heavy.loc[heavy.trajectory_id == "t004", "weight"] = 6  # 6 of 9 passed lack it now
    assert {r.name: r for r in select(heavy, k=2, n=3)}["a_weaker_one"].mean_er_passed == pytest.approx(6 / 9)


def test_of_equal_contrast_what_is_lacking_more_often_comes_first():
    marks, outcome = cohort(4, 0, 0, 4)
    common = marks | {"t003": "NA"}
    rare = marks | {"t001": "NA", "t002": "NA", "t003": "NA"}
    rows = select(pd.concat([repeated(rare, outcome, 10, "a_rare_one"), repeated(common, outcome, 10, "b_common_one")]))
    assert [(row.name, row.mean_delta, row.mean_cov) for row in rows] == [
        ("b_common_one", 1.0, pytest.approx(3 / 4)),
        ("a_rare_one", 1.0, pytest.approx(1 / 4)),
    ]


def test_categorical_and_plain_columns_agree():
    labels = repeated(*cohort(3, 1, 1, 4, na=2))
    fewer = labels.assign(
        trajectory_id=pd.Categorical(labels["trajectory_id"], categories=["unused", *labels["trajectory_id"].unique()]),
        capability=labels["capability"].astype("category"),
        label=pd.Categorical(labels["label"], categories=["PRESENT", "x", "LACKING", "NA"]),
    )
    assert select(fewer) == select(labels)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.iloc[:-1], "no label for 1 trajectories"),
        (lambda f: pd.concat([f, f.iloc[[3]]]), "twice"),
        (lambda f: f.assign(label=f["label"].replace("NA", "MAYBE")), "unknown label 'MAYBE'"),
        (lambda f: f.assign(label=f["label"].where(f["label"] != "NA", None)), "missing values"),
        (lambda f: f.assign(weight=-1), "weights"),
        (lambda f: f.assign(passed=f["run"] % 2 == 0), "both passed and failed"),
        (lambda f: f.iloc[:0], "no labels"),
    ],
)
def test_runs_that_do_not_partition_are_refused(damage, message):
    labels = repeated(*cohort(2, 1, 1, 2, na=1)).sort_values(["run", "trajectory_id"], ignore_index=True)
    with pytest.raises(LabelError, match=message):
        select(damage(labels))


def test_more_runs_than_n_are_refused():
    with pytest.raises(LabelError, match="but N is 10"):
        select(repeated(*cohort(2, 1, 1, 2), runs=11))


def round_of(tasks: int = 30, trials: int = 4):
    """Odd tasks need a look-up, which fails in most failed trajectories; a formatting check fails at random."""
    rng = np.random.default_rng(0)
    checks, outcomes = [], []
    for task in range(tasks):
        for trial in range(trials):
            name, needs = f"t{task:02d}-{trial}", task % 2 == 1
            looked = rng.random() < 0.4
            passed = bool(looked) if needs else rng.random() < 0.5
            outcomes.append({"trajectory_id": name, "task_id": f"task{task}", "passed": passed})
            checks += [
                {"trajectory_id": name, "name": "looked_up", "kind": "look_up_first", "required": needs,
                 "passed": looked,
                 "detail": "" if looked else "cancelled an order without reading it"},
                {"trajectory_id": name, "name": "order_id", "kind": "look_up_first", "required": needs, "passed": True,
                 "detail": ""},
                {"trajectory_id": name, "name": "polite", "kind": "polite_tone_use", "required": True,
                 "passed": rng.random() < 0.7, "detail": ""},
            ]  # fmt: skip
    return pd.DataFrame(checks), pd.DataFrame(outcomes)


def test_bootstrap_labels_follow_the_checks_and_select_the_cause():
    checks, outcomes = round_of()
    labels = bootstrap_labels(checks, outcomes, runs=10, seed=7)
    assert len(labels) == 10 * 2 * 120
    first = labels[(labels.run == 0) & (labels.capability == "look_up_first")].set_index("trajectory_id")
    own = checks[checks.name == "looked_up"].set_index("trajectory_id")
    expected = np.where(~own.required, "NA", np.where(own.passed, "PRESENT", "LACKING"))
    assert (first.loc[own.index, "label"].astype(str) == expected).all()
    # Whole tasks are drawn: the trials of a task share one weight, and a run draws as many tasks as there are.
    by_task = labels.assign(task=labels.trajectory_id.astype(str).str[:3]).groupby(["run", "task"])["weight"]
    assert (by_task.nunique() == 1).all()
    assert labels[labels.capability == "look_up_first"].groupby("run")["weight"].sum().eq(120).all()
    rows = {row.name: row for row in select(labels)}
    assert rows["look_up_first"].selected
    assert rows["look_up_first"].std_delta >= 0
    assert not rows["polite_tone_use"].selected
    pd.testing.assert_frame_equal(labels, bootstrap_labels(checks, outcomes, runs=10, seed=7))
    assert not labels["weight"].equals(bootstrap_labels(checks, outcomes, runs=10, seed=8)["weight"])


def test_candidates_come_from_failed_coverage_with_words_from_the_checks():
    checks, outcomes = round_of()
    found = discover_candidates(checks, outcomes)
    assert found[0].name == "look_up_first"
    assert "cancelled an order without reading it" in found[0].definition
    assert "needed in 60 of 120 trajectories" in found[0].definition
    failed = set(outcomes.loc[~outcomes.passed, "trajectory_id"])
    assert set(found[0].failed_examples) <= failed
    assert len(discover_candidates(checks, outcomes, limit=1)) == 1
    never = checks.assign(passed=True)
    assert discover_candidates(never, outcomes) == ()


@pytest.mark.parametrize("kind", ["Polite tone", "generalist", "release"])
def test_a_kind_that_cannot_name_a_capability_is_left_out_and_nothing_that_was_played_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    checks, outcomes = round_of(tasks=4)
    monkeypatch.setattr(contrast_file, "store_candidates", lambda store, *given: None)
    monkeypatch.setattr(contrast_file, "store_labels", lambda store, *given: None)

    def contrasted(target: str, kind: str) -> ContrastResult:
        named = checks.assign(kind=checks["kind"].replace("polite_tone_use", kind))
        context = SimpleNamespace(
            store=SimpleNamespace(check_frame=lambda *_, **__: named),
            round=SimpleNamespace(id="r", target=target),
            settings=SimpleNamespace(selection=SimpleNamespace(runs=2)),
            seed=0,
        )
        return contrast_file._contrast_by_checks(context, outcomes)

    whole = contrasted("mine", "polite_tone_2")
    assert (len(whole.candidates), whole.left_out) == (2, {})
    found = contrasted("mine", kind)
    assert found.candidates == [name for name in whole.candidates if name != "polite_tone_2"]
    assert list(found.left_out) == [kind]
    assert f"checks of the kind {kind!r} are left out: it " in caplog.text
    (told,) = analyst_warnings([], found)
    assert "give Check.kind " in told
    assert "change data_hash" in told
    assert kind in contrasted("traffic", kind).candidates


def test_a_matrix_selects_as_its_rows_do():
    checks, outcomes = round_of()
    matrix = label_matrix(checks, outcomes, runs=10, seed=7)
    assert (matrix.runs, matrix.pairs) == (10, 2 * 120)
    assert select(matrix) == select(matrix.frame())
    assert select(matrix) == select(matrix.frame().astype({"trajectory_id": str, "capability": str, "label": str}))
    with pytest.raises(LabelError, match="10 labelling runs were given but N is 9"):
        select(matrix, n=9)
    with pytest.raises(LabelError, match="nothing to select from"):
        select(label_matrix(checks.iloc[:0], outcomes))


def test_checks_in_parts_say_what_they_say_together():
    checks, outcomes = round_of()
    # In any order, so that a trajectory's checks of one kind are in different parts.
    mixed = checks.sample(frac=1, random_state=3)
    parts = [mixed.iloc[at : at + 7] for at in range(0, len(mixed), 7)]
    pd.testing.assert_frame_equal(bootstrap_labels(iter(parts), outcomes), bootstrap_labels(checks, outcomes))
    assert discover_candidates(iter(parts), outcomes) == discover_candidates(checks, outcomes)


def test_checks_without_an_outcome_are_refused():
    checks, outcomes = round_of(tasks=2)
    for call in (bootstrap_labels, discover_candidates):
        with pytest.raises(LabelError, match="no outcome"):
            call(checks, outcomes.iloc[1:])
