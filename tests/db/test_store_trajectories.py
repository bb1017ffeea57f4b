"""Trajectories with their steps, checks and arrays, on both databases."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from sqlalchemy import event, text
from store_examples import failure, trajectory

from db import CheckRow, Round, RouteRow, StepRow, Store, Written, queries, writes
from errors import StoreError


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def everything(store: Store) -> str:
    """All rows of the tables that trajectories are written to, as text."""
    return "".join(
        store.query(f"SELECT * FROM {table} ORDER BY 1, 2").to_csv() for table in ("trajectories", "steps", "checks")
    )


def test_a_trajectory_comes_back_as_it_was(store: Store, round_: Round) -> None:
    given = trajectory(round_.id)
    assert store.add_trajectories([given]) == Written(1, 0, 0)
    found = store.trajectory("t1")
    for field in dataclasses.fields(given):
        if field.name not in ("token_ids", "sampled_mask", "logprobs"):
            assert getattr(found, field.name) == getattr(given, field.name), field.name
    assert found.token_ids is not None
    assert found.logprobs is not None
    assert found.sampled_mask is not None
    assert np.asarray(found.token_ids).dtype == np.int32
    assert list(found.token_ids) == [0, 30000, 60000, 90000, 120000, 150000]
    assert list(found.logprobs) == given.logprobs
    assert list(found.sampled_mask) == given.sampled_mask


def test_columns_of_more_trajectories_than_one_statement_takes(store: Store, round_: Round) -> None:
    """They come in the order of the ids, whether these are wanted or not."""
    store.add_trajectories([trajectory(round_.id, f"t{i}", task_id=f"task-{i}") for i in (3, 1, 2)])
    many = [f"t{i}" for i in range(6_000)]
    for ids in (many[:4], many):
        frame = store.trajectory_frame(None, id=ids, columns=["task_id", "sampled_tokens"])
        assert list(frame.columns) == ["task_id", "sampled_tokens"]
        assert list(frame["task_id"]) == ["task-1", "task-2", "task-3"]


def test_replaying_a_batch_changes_nothing(store: Store, round_: Round) -> None:
    batch = [trajectory(round_.id, f"t{i}") for i in range(20)] + [failure(round_.id, "e1")]
    assert store.add_trajectories(batch) == Written(21, 0, 0)
    before = everything(store)
    later = [dataclasses.replace(row, reward=row.reward and 0.75, steps=row.steps * 2, checks=()) for row in batch]
    assert store.add_trajectories(batch) == Written(0, 0, 21)
    assert store.add_trajectories(later) == Written(0, 0, 21)
    assert everything(store) == before


def test_a_success_replaces_an_error_row_and_nothing_else_does(store: Store, round_: Round) -> None:
    store.add_trajectories([failure(round_.id)])
    assert store.stored_ids(["t1", "t2"]) == set()
    assert store.add_trajectories([failure(round_.id, error="again")]) == Written(0, 0, 1)
    assert store.trajectory("t1").error == "502 from the provider"
    assert store.add_trajectories([trajectory(round_.id)]) == Written(0, 1, 0)
    found = store.trajectory("t1")
    assert (found.error_boundary, found.error, found.reward, found.success) == (None, None, 0.25, False)
    # The three half steps of the failure are gone, not mixed with the two of the success.
    assert [step.sampled_tokens for step in found.steps] == [2, 2]
    assert len(found.checks) == 2
    assert store.stored_ids(["t1", "t2"]) == {"t1"}
    assert store.add_trajectories([failure(round_.id)]) == Written(0, 0, 1)
    assert store.trajectory("t1").reward == 0.25


def test_an_episode_that_a_later_round_loses_again_is_counted_there(store: Store, round_: Round) -> None:
    store.add_trajectories([failure(round_.id)])
    later = store.start_round("t", "h", 1, "laptop", {})
    assert store.add_trajectories([failure(later.id, error="again")]) == Written(0, 1, 0)
    found = store.trajectory("t1")
    assert (found.round_id, found.error, len(found.steps)) == (later.id, "again", 3)
    assert store.add_trajectories([failure(later.id, error="of a replay")]) == Written(0, 0, 1)
    assert store.trajectory("t1").error == "again"


def test_one_batch_may_hold_an_id_twice(store: Store, round_: Round) -> None:
    written = store.add_trajectories([failure(round_.id), trajectory(round_.id), failure(round_.id)])
    assert written == Written(1, 0, 2)
    assert store.trajectory("t1").success is False


def test_frames_leave_errors_out_of_every_denominator(store: Store, round_: Round) -> None:
    rows = [
        trajectory(round_.id, "t1", success=True, reward=1.0),
        trajectory(round_.id, "t2"),
        failure(round_.id, "t3"),
        trajectory(round_.id, "t4", purpose="evaluation", adapter_id="a1"),
        trajectory(None, "t5", purpose="traffic"),
    ]
    store.add_trajectories(rows)
    frame = store.trajectory_frame(round_.id, purpose="diagnosis")
    assert list(frame.id) == ["t1", "t2", "t3"]
    assert frame.success.mean() == 0.5
    assert frame.reward.mean() == 0.625
    assert list(store.trajectory_frame(round_.id, purpose="diagnosis", error_boundary=None).id) == ["t1", "t2"]
    assert list(store.trajectory_frame(round_.id, adapter_id="a1").id) == ["t4"]
    assert list(store.trajectory_frame(id=["t5", "t1"]).id) == ["t1", "t5"]
    assert "token_ids" in store.trajectory_frame(round_.id, with_blobs=True)
    assert "token_ids" not in frame
    assert len(store.trajectory_frame("unknown")) == 0
    checks = store.check_frame(round_.id, purpose="diagnosis")
    assert set(checks.trajectory_id) == {"t1", "t2"}
    assert checks.groupby("kind").passed.mean().to_dict() == {"cancel_order": 0.0, "look_up_first": 1.0}
    assert checks[checks.required].shape[0] == 4
    assert list(store.step_frame(round_.id, id="t2").milliseconds) == [11.0, 12.0]


def test_checks_may_be_read_in_parts(store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.queries._ROWS", 3)
    rows = [trajectory(round_.id, f"t{i}") for i in range(4)]
    store.add_trajectories([*rows, failure(round_.id, "t5"), trajectory(None, "t6", purpose="traffic")])
    whole = store.check_frame(round_.id)
    assert list(whole.trajectory_id) == ["t0", "t0", "t1", "t1", "t2", "t2", "t3", "t3"]
    parts = list(store.check_frames(round_.id))
    assert [len(part) for part in parts] == [3, 3, 2]
    names = ["trajectory_id", "idx", "name", "kind", "required", "passed", "detail"]
    key = names[:2]
    joined = pd.concat(parts).sort_values(key, ignore_index=True)
    pd.testing.assert_frame_equal(joined, whole[names])
    few = list(store.check_frames(round_.id, columns=("kind", "passed"), id="t2"))
    assert [list(part.columns) for part in few] == [["kind", "passed"]]
    assert sorted(few[0].kind) == ["cancel_order", "look_up_first"]
    assert [len(part) for part in store.check_frames("unknown")] == [0]


def test_frames_take_more_ids_than_a_statement(store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.writes.CHUNK", 4)
    monkeypatch.setattr("db.queries.CHUNK", 4)
    store.add_trajectories([trajectory(round_.id, f"t{i:02}") for i in range(10)])
    wanted = [f"t{i:02}" for i in (9, 0, 3, 5, 5, 1, 8, 2, 77)]
    frame = store.trajectory_frame(None, id=wanted, columns=("id", "success"))
    assert list(frame.columns) == ["id", "success"]
    assert list(frame.id) == ["t00", "t01", "t02", "t03", "t05", "t08", "t09"]
    assert frame.success.dtype == "boolean"
    checks = store.check_frame(None, id=wanted)
    assert list(checks.trajectory_id) == [name for name in frame.id for _ in range(2)]
    assert list(checks.idx) == [0, 1] * 7
    # So many that the others are left out while all are read.
    (all_at_once,) = store.check_frames(None, id=wanted)
    pd.testing.assert_frame_equal(
        all_at_once.sort_values(["trajectory_id", "idx"], ignore_index=True), checks[list(all_at_once)]
    )


def test_all_that_is_read_by_many_ids_is_found(store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a generalist's, which learns from whatever succeeded in a round on a cluster: PostgreSQL takes 65,535 values
    in a statement, SQLite 32,766 where it was not built for more."""
    assert writes.CHUNK < 30_000
    for module in (queries, writes):
        monkeypatch.setattr(module, "CHUNK", 2)
    store.add_trajectories([trajectory(round_.id, f"t{i}") for i in (3, 1, 6)])
    store.put([RouteRow(trajectory_id=f"t{i}", router_version="v", capability="") for i in (6, 3, 1)])
    many = [f"t{i}" for i in (5, 6, 0, 1, 2, 3, 4)]
    sent: list[int] = []
    event.listen(store._engines.read, "before_cursor_execute", lambda *given: sent.append(len(given[3])))
    assert [row.id for row in store.trajectories(None, id=many)] == ["t1", "t3", "t6"]
    assert [row.id for row in store.trajectories(None, id=many, trial=1)] == []
    assert list(store.step_frame(None, id=many).trajectory_id) == ["t1", "t1", "t3", "t3", "t6", "t6"]
    assert [row.trajectory_id for row in store.rows(RouteRow, trajectory_id=many)] == ["t1", "t3", "t6"]
    assert len(store.rows(RouteRow, trajectory_id=many, capability=["", *many])) == 3
    assert 0 < max(sent) < len(many)  # values of a statement


def test_many_trajectories_are_read_in_pages(store: Store, round_: Round) -> None:
    rows = [trajectory(round_.id, f"t{i:05}", steps=(StepRow({"i": i}, []),), checks=()) for i in range(1201)]
    store.add_trajectories(rows)
    found = list(store.trajectories(round_.id))
    assert [row.id for row in found] == [row.id for row in rows]
    assert all(row.steps[0].action["i"] == i and row.token_ids is None for i, row in enumerate(found))
    assert len(store.stored_ids(row.id for row in rows)) == 1201


def test_what_models_say_can_always_be_stored(store: Store, round_: Round) -> None:
    step = StepRow({"content": "\x00\udcff"}, [{"content": "tab\t\x01 end"}])
    check = CheckRow("n", "k\ud800", True, False, "said \x00")
    store.add_trajectories([trajectory(round_.id, steps=[step], checks=[check], messages=[{"content": "\udc80"}])])
    found = store.trajectory("t1")
    assert found.steps[0].action == {"content": "\ufffd\ufffd"}
    assert found.steps[0].observation == [{"content": "tab\t\x01 end"}]
    assert (found.checks[0].kind, found.checks[0].detail) == ("k\ufffd", "said \ufffd")
    assert found.messages == [{"content": "\ufffd"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": float("nan")}, "reward of trajectory t1 is nan"),
        ({"error_boundary": "sandbox"}, "failed at 'sandbox' and yet has reward"),
        ({"purpose": "fun"}, "purpose 'fun'; use one of diagnosis"),
        ({"logprobs": [0.0]}, "arrays of different lengths"),
        ({"token_ids": [2**31] * 6}, "int32"),
        ({"token_ids": [0.5] * 6}, "integers"),
        ({"metrics": {"x": object()}}, "not JSON"),
        ({"metrics": {"x": float("nan")}}, "finite values"),
        ({"checks": [CheckRow("n", "k", True, True, 5)]}, "name, kind and detail are texts"),  # type: ignore[arg-type]
        ({"metrics": {"x": nested(2000)}}, "not nested too deeply"),
        ({"steps": [StepRow({"a": nested(2000)}, [])]}, "not nested too deeply"),
        ({"round_id": "nowhere"}, "rule of the schema"),
    ],
)
def test_contradictions_are_refused_and_nothing_is_stored(
    store: Store, round_: Round, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(StoreError, match=said):
        store.add_trajectories([trajectory(round_.id, "t0"), trajectory(**({"round_id": round_.id} | changes))])
    assert len(store.trajectory_frame()) == 0


def test_the_database_itself_refuses_an_error_with_a_reward(store: Store, round_: Round) -> None:
    store.add_trajectories([failure(round_.id)])
    with pytest.raises(StoreError, match="error_has_no_reward"), store.transaction() as connection:
        connection.execute(text("UPDATE trajectories SET reward = 0.0"))


def test_unknown_trajectory(store: Store) -> None:
    with pytest.raises(StoreError, match="no trajectory 'x'"):
        store.trajectory("x")


def test_a_driver_error_among_the_steps_undoes_the_trajectory(store: Store, round_: Round) -> None:
    with pytest.raises(StoreError, match=r"database '(sqlite|postgresql)"):
        store.add_trajectories([trajectory(round_.id, steps=[StepRow({}, [], sampled_tokens=2**70)])])
    assert len(store.trajectory_frame()) == 0
