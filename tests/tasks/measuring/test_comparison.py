"""`trace-agent compare`: figures by hand, everything that is refused, and what the store holds of each kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from db import AdapterRow, AdapterState, GatePlanRow, ReleaseRow, ReleaseState, Round, RouteRow, Store, open_store
from errors import ConfigurationError, StoreError
from flows.cli.main import app, main
from tasks.measuring.comparison import compare_named
from tasks.measuring.outcomes import outcomes_of, played_releases, read_outcomes, release_episodes, release_marker
from tests.db.store_examples import failure, trajectory

HEADER = "task,family,trial,success\n"


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def csv_of(folder: Path, name: str, outcomes: dict[str, str], family: str = "refund") -> str:
    """One line per task and trial: {"t1": "110"} is task t1 with two successes and a failure."""
    lines = [f"{task},{family},{k},{s}\n" for task, trials in outcomes.items() for k, s in enumerate(trials)]
    return written(folder, name, HEADER + "".join(lines))


# Files.


def test_two_files_by_hand(tmp_path: Path) -> None:
    a = csv_of(tmp_path, "a.csv", {f"t{i}": "00" for i in range(6)} | {"only_a": "11"})
    b = csv_of(tmp_path, "b.csv", {f"t{i}": "11" for i in range(5)} | {"t5": "10"})
    result = compare_named(a, b)
    assert result.difference.points == pytest.approx(100 * 5.5 / 6)
    assert result.difference.p == pytest.approx(2 / 2**6)
    assert (result.difference.tasks, result.a.left_out, result.b.left_out) == (6, 1, 0)
    assert (result.a.success.rate, result.b.success.rate) == (0.0, pytest.approx(5.5 / 6))
    assert (result.k, result.pass_k.points) == (2, pytest.approx(100 * 5 / 6))
    text = "\n".join(result.lines())
    assert "+91.7" in text
    assert "1 tasks that the other lacks" in text
    assert "pass^2" in text


def test_no_p_value_is_shown_as_0_and_nothing_as_found_where_no_p_value_could_be_small_enough(tmp_path: Path) -> None:
    for tasks, p, power in ((20, "< 0.0001", "A true difference of "), (4, "0.1250", "No true difference, however")):
        a, b = (csv_of(tmp_path, f"{s}.csv", {f"t{i}": s for i in range(tasks)}) for s in "01")
        lines = compare_named(a, b).lines()
        assert next(line for line in lines if line.startswith("all tasks")).endswith(f"{tasks:>6} {p:>9}")
        assert [line.startswith(power) for line in lines if "80 % power" in line] == [True]


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    a = written(tmp_path, "a.csv", "task,trial,success,extra\nt1,0,True,x\nt1,1,,x\nt2,0,0,x\n")
    b = written(
        tmp_path,
        "b.jsonl",
        '{"task": "t1", "trial": 0, "success": true}\n\n{"task": "t1", "trial": 1, "success": null}\n'
        '{"task": "t2", "trial": 0, "success": 0, "family": ""}\n',
    )
    first, second = read_outcomes(Path(a)), read_outcomes(Path(b))
    assert first.frame.equals(second.frame)
    result = compare_named(a, b)
    assert (result.difference.points, result.difference.changed, result.a.lost) == (0.0, 0, 1)
    assert result.families == {}


def test_a_line_ends_where_json_lines_end_and_a_task_is_called_as_the_store_keeps_it(tmp_path: Path) -> None:
    """Line separators of Unicode may stand in a text; what is no text cannot be printed."""
    text = '{"task": "a\u2028b\x85", "trial": 0, "success": 1}\n{"task": "t\\ud800\\u0000", "trial": 0, "success": 1}\n'
    found = read_outcomes(Path(written(tmp_path, "a.jsonl", text)))
    assert found.frame["task"].tolist() == ["a\u2028b", "t\ufffd\ufffd"]


def test_families_are_taken_from_the_side_that_has_them(tmp_path: Path) -> None:
    a = written(tmp_path, "a.csv", HEADER + "t1,refund,0,0\nt2,cancel,0,1\n")
    b = written(tmp_path, "b.csv", "task,trial,success\nt1,0,1\nt2,0,1\n")
    assert {f: d.points for f, d in compare_named(a, b).families.items()} == {"cancel": 0.0, "refund": 100.0}
    other = written(tmp_path, "c.csv", HEADER + "t1,cancel,0,0\n")
    with pytest.raises(ConfigurationError, match=r"'t1' is of family 'refund'.*'cancel'"):
        compare_named(a, other)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "task,success\nt,1\n", r"line 2: no column trial \(there are: task, success\)"),
        ("a.csv", "task,trial,success\nt,0,maybe\n", "line 2: success is 'maybe'; write true or false"),
        ("a.csv", "task,trial,success\nt,0,0.5\n", "success is '0.5'"),
        ("a.csv", "task,trial,success\nt,0,1\nt,0,0\n", "line 3: task 't' trial '0' stands in line 2 already"),
        ("a.csv", "task,trial,success\nt,0\n", "line 2: not the 3 fields of the header"),
        ("a.csv", "task,trial,success\nt,0,1,1\n", "line 2: not the 3 fields of the header"),
        ("a.csv", "task,trial,success,success\nt,0,1,1\n", "line 1: a column twice"),
        ("a.csv", "task,trial,success\n,0,1\n", "line 2: task is empty"),
        ("a.csv", HEADER + "t,a,0,1\nt,b,1,1\n", "line 3: task 't' is of family 'b' here and of 'a' above"),
        ("a.csv", "task,trial,success\n", "holds no outcome"),
        ("a.csv", 'task,trial,success\n"t,0,1\n', "unexpected end of data; write it as plain CSV"),
        ("a.jsonl", '{"task": "t", "trial": 0}\n', "line 1: no column success"),
        ("a.jsonl", '{"task": "t", "trial": 0, "success": 0.3}\n', "success is 0.3"),
        ("a.jsonl", '{"task": ["t"], "trial": 0, "success": 1}\n', r"task is \['t'\]"),
        ("a.jsonl", "[1]\n", "is not a JSON object"),
        ("a.jsonl", "{\n", "line 1: no JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: no JSON"),
    ],
)
def test_files_that_cannot_be_read_without_guessing_are_refused(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    good = csv_of(tmp_path, "good.csv", {"t": "1"})
    with pytest.raises(ConfigurationError, match=says):
        compare_named(written(tmp_path, name, text), good)


def test_files_that_share_nothing_are_refused(tmp_path: Path) -> None:
    a, b = csv_of(tmp_path, "a.csv", {"t1": "1"}), csv_of(tmp_path, "b.csv", {"t2": "1"})
    with pytest.raises(ConfigurationError, match=r"no task in common \(they have 't1' and 't2'"):
        compare_named(a, b)
    lost = written(tmp_path, "lost.csv", HEADER + "t1,refund,0,\n")
    with pytest.raises(ConfigurationError, match="finished none of their 1 common tasks both"):
        compare_named(a, lost)
    with pytest.raises(ConfigurationError, match=r"missing.csv cannot be read"):
        compare_named(a, str(tmp_path / "missing.csv"))
    (tmp_path / "latin.csv").write_bytes("task,trial,success\nü,0,1\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="give a UTF-8 file"):
        compare_named(a, str(tmp_path / "latin.csv"))
    with pytest.raises(ConfigurationError, match=r"neither \.csv nor \.jsonl"):
        compare_named(a, written(tmp_path, "a.parquet", "x"))


def test_the_command_prints_text_json_and_one_line_for_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = csv_of(tmp_path, "a.csv", {"t1": "0", "t2": "1"}), csv_of(tmp_path, "b.csv", {"t1": "1", "t2": "1"})
    printed = CliRunner().invoke(app, ["compare", a, b, "--json"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout)["difference"]["points"] == 50.0
    assert "+50.0" in CliRunner().invoke(app, ["compare", a, b]).stdout
    monkeypatch.setattr(sys, "argv", ["trace-agent", "compare", a, str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error (configuration): ")


# The store.


@pytest.fixture
def home(settings_folder: Path) -> Path:
    """A home with evaluations `aaaa...` and `bbbb...`, two versions of an adapter, and releases 1 and 2, of which 2
    was promoted in the second round and is the only one that succeeds on `task-1`."""
    folder = settings_folder
    with open_store(f"sqlite:///{folder / 'trace.db'}") as store:
        first = store.start_round("shop", "data1", 1, "laptop", {})
        store.put([_adapter(first.id, "one", "1"), _adapter(first.id, "two", "2")])
        played = []
        for side, success in (("a", False), ("b", True)):
            played += [
                trajectory(None, f"{side}{task}", purpose="evaluation", split="validation", group_id=16 * side,
                           task_id=f"task-{task}", success=success)
                for task in range(6)
            ]  # fmt: skip
        played += [failure(None, "b-lost", purpose="evaluation", split="validation", group_id=16 * "b", trial=1)]
        for side, success in (("one", False), ("two", True)):
            played += [
                trajectory(first.id, f"{side}{i}", purpose="evaluation", split=split, adapter_id=side,
                           task_id=f"task-{i}", success=success)
                for i, split in enumerate(["validation", "test", "generated"])
            ]  # fmt: skip
        release = ReleaseRow(id="r1", target="shop", number=1, base="small", data_hash="data1",
                             state=ReleaseState.RETIRED, round_id=first.id)  # fmt: skip
        store.put([release])
        second = store.start_round("shop", "data1", 2, "laptop", {}, parent_id="r1")
        store.put([ReleaseRow(id="r2", target="shop", number=2, base="small", data_hash="data1", parent_id="r1",
                              state=ReleaseState.LIVE, round_id=second.id)])  # fmt: skip
        played += [
            trajectory(second.id, name, purpose="evaluation", split="validation", success=success)
            for name, success in (("base", False), ("live", False), ("candidate", True))
        ]
        store.add_trajectories(played)
        evaluated = {"base_ids": ["base"], "live_ids": ["live"], "routed_ids": ["candidate"]}
        evaluate = store.stage(second.id, "evaluate")
        assert evaluate.claim()
        evaluate.finish(evaluated)
    return folder


def _adapter(round_id: str, name: str, version: str) -> AdapterRow:
    return AdapterRow(
        id=name, round_id=round_id, base="small", state=AdapterState.REGISTERED,
        registered_model="trace-shop-refund", registered_version=version,
    )  # fmt: skip


def stored(home: Path) -> Store:
    return open_store(f"sqlite:///{home / 'trace.db'}")


def test_evaluations_by_the_beginning_of_their_ids(home: Path) -> None:
    result = compare_named("aaaaaa", 16 * "b", home=home)
    assert (result.difference.points, result.difference.tasks) == (100.0, 6)
    assert (result.target, result.data_hash, result.b.lost) == ("shop", "data1", 1)
    with pytest.raises(StoreError, match="0 stored evaluations begin with 'cccccc'"):
        compare_named("cccccc", "aaaaaa", home=home)


def test_versions_of_an_adapter_on_the_targets_own_tasks(home: Path) -> None:
    result = compare_named("refund@v1", "refund@v2-0123abcd", home=home)
    assert (result.difference.points, result.difference.tasks, result.set_aside) == (100.0, 1, 1)
    with pytest.raises(StoreError, match=r"no refund@v3; stored versions of 'refund': v1, v2"):
        compare_named("refund@v1", "refund@v3", home=home)


def test_what_an_adapter_played_because_a_router_chose_it_is_counted(home: Path) -> None:
    """Both were sent the test task; version 2 has played it alone, too, as the same episode."""
    assert not any("router" in line for line in compare_named("refund@v1", "refund@v2", home=home).lines())
    with stored(home) as store:
        store.put(
            [
                RouteRow(trajectory_id=f"{side}1", router_version="r", capability="refund", adapter_id=side)
                for side in ("one", "two")
            ]
        )
        stage = store.stage(store.rows(Round, number=1)[0].id, "challenge")
        assert stage.claim()
        stage.finish({"alone_ids": {"refund": ["two1"]}})
    found = compare_named("refund@v1", "refund@v2", home=home)
    assert (found.a.routed, found.b.routed) == (1, 0)
    (told,) = (line for line in found.lines() if "router" in line)
    assert told.startswith("refund@v1: 1 of its 1 tasks were played because a router chose it for them")


def test_a_release_that_no_round_played_may_be_in_an_evaluation_which_is_named(home: Path) -> None:
    with stored(home) as store:
        made: dict[str, Any] = {"target": "shop", "base": "small", "data_hash": "data1"}
        store.put([ReleaseRow(id="r3", number=3, state=ReleaseState.CANDIDATE, **made)])
    known = f"the newest stored evaluations are {16 * 'b'}, {16 * 'a'}"
    with pytest.raises(StoreError, match=rf"no round has played release@3 on tasks of shop.*give the id.*{known}"):
        compare_named("release@1", "release@3", home=home)


def test_an_evaluation_says_which_release_it_played(home: Path) -> None:
    with stored(home) as store:
        made: dict[str, Any] = {"target": "shop", "base": "small", "data_hash": "data1"}
        store.put([ReleaseRow(id="r3", number=3, state=ReleaseState.CANDIDATE, **made)])
        store.put([release_marker(16 * "a", 3), release_marker(16 * "b", 0)])
        assert played_releases(store, [16 * "a", 16 * "b", 16 * "c"]) == {16 * "a": 3, 16 * "b": 0}
    with pytest.raises(StoreError, match=rf"no round has played release@3 .*has: give the id .* \({16 * 'a'}\)"):
        compare_named("release@1", "release@3", home=home)
    found = compare_named(6 * "a", 6 * "b", home=home)
    assert (found.a.name, found.b.name) == ("aaaaaa (release@3)", "bbbbbb (release@0)")


def test_releases_from_the_rounds_that_played_them(home: Path) -> None:
    result = compare_named("release@1", "2", home=home)
    assert (result.difference.points, result.difference.tasks) == (100.0, 1)
    assert compare_named("release@0", "release@1", home=home).difference.points == 0.0
    with pytest.raises(StoreError, match="no release 3; it has 1, 2"):
        compare_named("release@1", "3", home=home)


def test_without_a_target_it_is_that_of_the_newest_round_whatever_the_settings_default_to(
    settings_folder: Path,
) -> None:
    with open_store(f"sqlite:///{settings_folder / 'trace.db'}") as store:
        store.start_round("desk", "data1", 1, "laptop", {})
        made: dict[str, Any] = {"target": "desk", "base": "small", "data_hash": "data1"}
        store.put([ReleaseRow(id="d1", number=1, state=ReleaseState.LIVE, **made)])
    with pytest.raises(StoreError, match="target 'desk' has no release 7; it has 1"):
        compare_named("release@1", "release@7", home=settings_folder)
    with pytest.raises(ConfigurationError, match="has no round of 'shop', but of desk"):
        compare_named("release@1", "release@7", target="shop", home=settings_folder)
    with pytest.raises(StoreError, match="0 stored evaluations begin with"):
        compare_named("cccccc", "aaaaaa", target="shop", home=settings_folder)


def test_a_release_has_what_the_challenge_played_it_and_no_episode_of_another_candidate(home: Path) -> None:
    """The router of release 2, a round's first candidate, was fitted again: the gate judged release 3. The round began
    a new lineage: its parent is the bare base, and release 1 was live all the same."""
    with stored(home) as store:
        row = store.start_round("shop", "data1", 3, "laptop", {})
        made = {"target": "shop", "base": "small", "data_hash": "data1", "round_id": row.id, "parent_id": None}
        store.put([ReleaseRow(id=f"n{n}", number=n, state=ReleaseState.CANDIDATE, **made) for n in (3, 4)])
        store.put([GatePlanRow(round_id=row.id, sha256="s", rules={"against": 1})])
        results = {
            "challenge": {"live_ids": ["challenged"]},
            "evaluate": {"base_ids": ["b"], "live_ids": ["l"], "routed_ids": ["second"], "candidate": "n4"},
        }
        for name, result in results.items():
            stage = store.stage(row.id, name)
            assert stage.claim()
            stage.finish(result)
        assert release_episodes(store, "shop", 3) == []
        assert release_episodes(store, "shop", 4) == ["second"]
        assert release_episodes(store, "shop", 1) == ["live", "challenged", "l"]
        assert release_episodes(store, "shop", 0) == ["base", "b"]


def test_releases_are_compared_where_the_gate_did_not_choose(home: Path) -> None:
    first = compare_named("release@1", "release@2", home=home)
    assert (first.validation_only, first.set_aside) == (True, 0)
    assert "The two share no test task." in first.lines()[-1]
    with stored(home) as store:
        (second,) = store.rows(Round, number=2)
        store.add_trajectories(
            [
                trajectory(second.id, f"test-{side}{i}", purpose="evaluation", split="test", task_id=f"test-{i}",
                           success=side == "live")
                for side in ("live", "routed") for i in range(3)
            ]
        )  # fmt: skip
        stage = store.stage(second.id, "test")
        assert stage.claim()
        ids = {f"{side}_ids": [f"test-{side}{i}" for i in range(3)] for side in ("live", "routed")}
        stage.finish({**ids, "release": 2})
    then = compare_named("release@1", "release@2", home=home)
    assert (then.validation_only, then.set_aside) == (False, 1)
    assert (then.difference.points, then.difference.tasks) == (-100.0, 3), "validation said +100"
    assert (then.a.left_out, then.b.left_out, then.a.success.tasks) == (0, 0, 3)
    assert then.lines()[-1].startswith("1 validation tasks are left out")


def test_a_file_compares_with_what_is_stored(home: Path, tmp_path: Path) -> None:
    mine = csv_of(tmp_path, "mine.csv", {"task-1": "1"}, family="")
    assert compare_named("release@1", mine, home=home).difference.points == 100.0


def test_releases_are_compared_on_the_newest_data_that_both_were_played_on(home: Path) -> None:
    """Rounds before and after a change of the target's data played the bare base; the release, only those after it."""
    with stored(home) as store:
        for state, success in (("data2", True), ("data3", False)):
            row = store.start_round("shop", state, 3, "laptop", {})
            ids = {f"{side}_ids": [f"{side}-{state}"] for side in ("base", "live")}
            store.add_trajectories(
                [
                    trajectory(row.id, i, purpose="evaluation", split="test", task_id="new", data_hash=state,
                               success=success if i.startswith("base") else not success)
                    for (i,) in ids.values()
                ]
            )  # fmt: skip
            store.put([GatePlanRow(round_id=row.id, sha256="s", rules={"against": 2})])
            stage = store.stage(row.id, "test")
            assert stage.claim()
            stage.finish(ids)
    found = compare_named("0", "2", home=home)
    assert (found.data_hash, found.difference.points, found.older) == ("data3", 100.0, ("data1", "data2"))
    assert "Data data3 are the newest that both were played on; what was played on data1, data2 is left out." in (
        found.lines()
    )
    assert (compare_named("1", "0", home=home).data_hash, compare_named("1", "0", home=home).older) == (
        "data1",
        ("data2", "data3"),
    )
    with stored(home) as store, pytest.raises(StoreError, match="play both sides on one"):
        outcomes_of(store, "0", "shop")


def test_other_data_are_refused_with_the_reason(home: Path) -> None:
    with stored(home) as store:
        store.add_trajectories(
            [trajectory(None, "c1", purpose="evaluation", split="validation", group_id=16 * "c", data_hash="data2")]
        )
    with pytest.raises(ConfigurationError, match="data hash of the first is data1, of the second data2"):
        compare_named("aaaaaa", "cccccc", home=home)
    with stored(home) as store:
        store.add_trajectories(
            [trajectory(None, "one-later", purpose="evaluation", split="test", adapter_id="one", data_hash="data2")]
        )
        with pytest.raises(StoreError, match=r"2 states of the target's data \(data1, data2\)"):
            outcomes_of(store, "refund@v1", "shop")
        with pytest.raises(ConfigurationError, match="'nothing' cannot be compared"):
            outcomes_of(store, "nothing", "shop")
        store.put([ReleaseRow(id="o", target="other", number=1, base="small", data_hash="d",
                              state=ReleaseState.LIVE)])  # fmt: skip
        with pytest.raises(StoreError, match="nothing is stored of release@1 on tasks of other"):
            outcomes_of(store, "release@1", "other")
