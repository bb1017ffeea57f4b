"""Selection from published labelling runs: the figures by hand, and every way in which a run can be broken."""

import json

import pytest
from typer.testing import CliRunner

from errors import LabelError
from flows.cli.main import app
from tasks.mining.published import published_selection

FAILED, PASSED = [f"f{n}" for n in range(10)], [f"p{n}" for n in range(5)]
NAMES = ["check_before_cancel", "copy_exact_address"]


def cells(lacking_failed, lacking_passed, na=2):
    """`lacking_failed` of 10 failed and `lacking_passed` of 5 passed, `na` failed ones not required."""
    return {
        "lacking_failed": FAILED[:lacking_failed],
        "present_failed": FAILED[lacking_failed : 10 - na],
        "na_failed": FAILED[10 - na :],
        "lacking_passed": PASSED[:lacking_passed],
        "present_passed": PASSED[lacking_passed:],
        "na_passed": [],
    }


def run(attempt):
    labels = {NAMES[0]: cells(4 + attempt % 2, 0), NAMES[1]: cells(2, 1)}
    return {"attempt": attempt, "totals": {"total_failed": 10, "total_passed": 5}, "labels": labels}


@pytest.fixture
def files(tmp_path):
    """files(runs, candidates) -> (candidates file, folder)."""

    def write(runs=None, names=NAMES):
        folder = tmp_path / "runs"
        folder.mkdir()
        for i, value in enumerate(runs if runs is not None else [run(n) for n in range(1, 11)]):
            (folder / f"run_{i:02}.json").write_text(value if isinstance(value, str) else json.dumps(value))
        candidates = tmp_path / "candidates.json"
        rows = [{"name": n, "description": "x", "example_trajectories": ["f1"]} for n in names]
        candidates.write_text(json.dumps({"candidates": rows}))
        return candidates, folder

    return write


def test_the_figures_are_those_worked_out_by_hand(files):
    result = published_selection(*files())
    found = result.as_dict()
    (best,) = found["selected"]
    # Cov 0.5 and 0.4 by turns; ER- 5/8 and 4/8, ER+ 0.
    assert best["name"] == "check_before_cancel"
    assert best["mean_cov"] == pytest.approx(0.45)
    assert best["std_cov"] == pytest.approx(0.05)
    assert best["mean_delta"] == pytest.approx(0.5625)
    assert best["std_delta"] == pytest.approx(0.0625)
    assert (best["runs_passed"], best["runs"]) == (10, 10)
    assert best["evidence"][:2] == [{"id": "f0", "votes": 10}, {"id": "f1", "votes": 10}]
    assert best["evidence"][-1] == {"id": "f4", "votes": 5}
    (other,) = found["rejected"]
    assert other["mean_delta"] == pytest.approx(2 / 8 - 1 / 5)
    assert "0 of 10 runs" in other["reason"]
    assert other["kappa"] == 1.0
    assert 0.9 < found["kappa"] < 1.0
    json.dumps(found, allow_nan=False)
    table = "\n".join(result.table())
    assert "10/10" in table
    assert "f4 (5)" in table
    assert "1 selected of 2" in table


def test_a_run_that_lacks_a_capability_counts_as_not_passed(files):
    runs = [run(n) for n in range(1, 11)]
    for value in runs[:3]:
        del value["labels"][NAMES[0]]
    result = published_selection(*files(runs, [*NAMES, "never_labelled"]))
    assert result.selected == ()
    by_name = {row.name: row for row in result.rejected}
    assert by_name[NAMES[0]].runs_passed == 7
    assert by_name["never_labelled"].reason == "No run labels it."
    assert result.table()[-1].startswith(
        "0 selected of 3; Fleiss' kappa over the capabilities that every run labels (1 of 3) "
    )


def test_fewer_runs_than_have_to_agree_are_one_error_that_says_how_to_ask_for_fewer(files):
    given = files([run(n) for n in range(1, 6)])
    with pytest.raises(LabelError, match=r"holds 5 labelling runs, .* pass in 8: nothing .*\(--required 4\)"):
        published_selection(*given)
    (best,) = published_selection(*given, k=4).selected
    assert best.name == NAMES[0]
    words = ["select", "--candidates", str(given[0]), "--runs", str(given[1]), "--required", "4"]
    assert "1 selected of 2" in CliRunner().invoke(app, words).output


def broken(change):
    value = run(3)
    text = change(value)
    return text if isinstance(text, str) else value


def duplicate(value):
    value["labels"][NAMES[0]]["present_failed"].append("f0")


def dropped(value):
    value["labels"][NAMES[0]]["na_failed"].pop()


def swapped(value):
    value["labels"][NAMES[0]]["na_failed"][-1] = "g9"


def other_round(value):
    for row in value["labels"].values():
        for ids in row.values():
            ids[:] = [f"other-{i}" for i in ids]


def flipped(value):
    for row in value["labels"].values():
        row["present_passed"].remove("p4")
        row["present_failed"].remove("f6")
        row["present_passed"].append("f6")
        row["present_failed"].append("p4")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (duplicate, "'f0' stands in present_failed and in lacking_failed"),
        (dropped, "hold 9 trajectories, and total_failed is 10"),
        (swapped, "does not partition the same trajectories"),
        (other_round, "are they of one round"),
        (flipped, "disagree about an outcome"),
        (lambda v: v["labels"].update(flying_about=cells(1, 1)), "'flying_about' is not a candidate"),
        (lambda v: v["labels"][NAMES[0]].update(maybe=[]), "unknown list 'maybe'"),
        (lambda v: v["labels"][NAMES[0]].pop("na_passed"), "na_passed must be a list"),
        (lambda v: v["labels"][NAMES[0]].update(na_passed=3), "na_passed must be a list"),
        (lambda v: v.update(attempt=1), "both are attempt 1"),
        (lambda v: v.update(attempt="x"), "not a number"),
        (lambda v: v.pop("totals"), "total_failed is None"),
        (lambda v: v["totals"].update(total_passed=4), "total_passed is 4"),
        (lambda v: v.update(labels={}), "with labels"),
        (lambda v: v.update(labels=[1]), "with labels"),
        (lambda v: "{", "not usable JSON"),
        (lambda v: "[" * 100_000, "not usable JSON"),
        (lambda v: "[]", "it must be"),
        (lambda v: json.dumps(v).replace('"totals"', '"attempt"'), "'attempt' stands twice"),
    ],
)
def test_broken_runs_are_refused_with_what_is_wrong(files, change, said):
    runs = [run(n) for n in range(1, 11)]
    runs[2] = broken(change)
    with pytest.raises(LabelError, match=said):
        published_selection(*files(runs))


def test_broken_candidates_and_empty_folders_are_refused(files, tmp_path):
    candidates, folder = files([])
    with pytest.raises(LabelError, match="no labelling run"):
        published_selection(candidates, folder)
    candidates.write_text(json.dumps({"candidates": [{"name": "a_b"}, {"name": "a_b"}]}))
    with pytest.raises(LabelError, match="stands twice"):
        published_selection(candidates, folder)
    candidates.write_text(json.dumps({"candidates": []}))
    with pytest.raises(LabelError, match="at least one"):
        published_selection(candidates, folder)
    with pytest.raises(LabelError, match="cannot be read"):
        published_selection(tmp_path / "missing.json", folder)


def test_the_command_prints_a_table_or_json_and_names_what_is_wrong(files):
    candidates, folder = files()
    given = ["select", "--candidates", str(candidates), "--runs", str(folder)]
    printed = CliRunner().invoke(app, [*given, "--json"])
    assert printed.exit_code == 0
    found = json.loads(printed.output)
    assert set(found) == {"selected", "rejected", "kappa"}
    wanted = ["name", "mean_cov", "std_cov", "mean_delta", "std_delta", "runs_passed", "runs", "kappa", "evidence"]
    assert set(wanted) <= set(found["selected"][0])
    assert found["rejected"][0]["reason"]
    table = CliRunner().invoke(app, given)
    assert "check_before_cancel" in table.output
    (folder / "run_02.json").write_text(json.dumps(broken(other_round)))
    refused = CliRunner().invoke(app, given)
    assert isinstance(refused.exception, LabelError)
    assert "run_02" in str(refused.exception)
