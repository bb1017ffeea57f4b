"""Rounds, small tables and states, on both databases."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from store_examples import trajectory

from db import (
    AdapterRow,
    AdapterState,
    CapabilityRow,
    EnvironmentState,
    LabelRow,
    ReplyRow,
    Round,
    RoundState,
    SpendRow,
    StageRow,
    StepRow,
    Store,
    TrainingStepRow,
    TrajectoryRow,
    open_store,
    row_id,
)
from db.values.types import utc_now
from environments.contract import content_hash
from errors import StoreError, TransitionError


def add_capability(store: Store, round_: Round, name: str = "cancel_order") -> str:
    key = row_id(round_.id, name)
    store.put([CapabilityRow(id=key, round_id=round_.id, name=name, analyst="checks")])
    return key


def add_adapter(store: Store, round_: Round, **values: Any) -> AdapterRow:
    row = AdapterRow(id="a1", round_id=round_.id, base="small", state=AdapterState.TRAINING, **values)
    store.put([row])
    return row


def test_rounds_are_numbered_and_found(store: Store, round_: Round) -> None:
    second = store.start_round("tau2", "data2", 1, "gpu", {})
    assert (round_.number, second.number) == (1, 2)
    assert store.latest_round() == second
    assert store.latest_round("shop") == round_ == store.round(round_.id)
    assert store.latest_round("unknown") is None
    assert round_.config == {"budget": 100, "nested": {"b": 1, "a": [1, 2]}}
    assert round_.started_at.utcoffset() is not None


def test_a_round_is_resumed_only_with_its_own_settings(store: Store, round_: Round) -> None:
    same = {"nested": {"a": (1, 2), "b": 1}, "budget": 100}
    assert store.open_round("shop", 7, "laptop", same) == round_
    assert store.open_round("shop", 8, "laptop", same) is None
    assert store.open_round("shop", 7, "laptop", same | {"budget": 101}) is None
    interrupted = store.finish_round(round_.id, RoundState.INTERRUPTED, "signal 15", peak_gib=1.5)
    assert interrupted.finished_at is None
    resumed = store.open_round("shop", 7, "laptop", same)
    assert resumed is not None
    assert resumed.state == "running"
    done = store.finish_round(round_.id, RoundState.DONE, "promoted 1", peak_gib=1.0)
    assert (done.state, done.reason, done.peak_gib) == ("done", "promoted 1", 1.5)
    assert done.finished_at is not None
    assert done.seconds is not None
    assert 0 <= done.seconds < 60
    assert store.open_round("shop", 7, "laptop", same) is None


def test_a_round_whose_clock_was_set_back_has_taken_no_time(
    store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.store.database_time", lambda _: round_.started_at - timedelta(hours=1))
    assert store.finish_round(round_.id, RoundState.DONE).seconds == 0.0


def test_of_two_processes_that_begin_at_once_one_joins_the_other(store: Store, round_: Round) -> None:
    """Both have looked for a round to go on with, and found none."""
    given = ("shop", "d", 5, "laptop", {"budget": 3, "sizes": (1, 2)})
    first = store.start_round(*given, join=True)
    assert store.start_round(*given, join=True) == first
    for other in (("desk", *given[1:]), ("shop", "new data", *given[2:]), (*given[:4], {"budget": 4})):
        assert store.start_round(*other, join=True).number > first.number
    assert store.start_round(*given).number > first.number, "a fresh one"
    ended = store.start_round(*given, join=True)
    for row in (first, ended):
        store.finish_round(row.id, RoundState.DONE)
    assert store.start_round(*given, join=True).number > ended.number


def test_a_round_that_ends_while_it_is_looked_for_is_not_made_to_run_again(store: Store, round_: Round) -> None:
    looked = list[Round | None]()
    finder = threading.Thread(
        target=lambda: looked.append(store.open_round("shop", 7, "laptop", round_.config)), daemon=True
    )
    with store.transaction() as writes:
        writes.execute(text("UPDATE rounds SET state = 'done'"))
        finder.start()
        time.sleep(0.3)
    finder.join(20)
    assert (looked, store.round(round_.id).state) == ([None], RoundState.DONE)


def test_a_final_round_stays_as_it_is(store: Store, round_: Round) -> None:
    store.finish_round(round_.id, RoundState.FAILED, "no disk")
    with pytest.raises(TransitionError, match=r"failed.*done.*final"):
        store.finish_round(round_.id, RoundState.DONE)
    assert store.round(round_.id).reason == "no disk"


def test_put_twice_changes_nothing_and_replace_changes_what_is_given(store: Store, round_: Round) -> None:
    add_adapter(store, round_, path="first", config={"r": 16})
    before = store.row(AdapterRow, id="a1")
    assert before is not None
    add_adapter(store, round_, path="second")
    assert store.row(AdapterRow, id="a1") == before
    store.put([replace(before, state=AdapterState.TRAINED)], replace=True)
    after = store.row(AdapterRow, id="a1")
    assert after == replace(before, state=AdapterState.TRAINED)
    assert after.created_at.utcoffset() is not None


def test_a_row_comes_back_as_it_was_put(store: Store, round_: Round) -> None:
    put = add_adapter(store, round_, path="first", config={"r": 16}, base_success=0.25)
    found = store.row(AdapterRow, id="a1")
    assert found == put
    assert isinstance(found.state, AdapterState)
    assert isinstance(store.round(round_.id).state, RoundState)
    assert store.row(AdapterRow, id="a2") is None
    assert store.row(Round, id=round_.id) == round_ == store.rows(Round)[0]


def test_replacing_takes_over_every_column_but_the_moment_of_writing(store: Store) -> None:
    first = ReplyRow(request_hash="h", model="m", reply={"content": "1"}, dollars=0.5, created_at=utc_now())
    later = first.created_at + timedelta(hours=1)
    store.put([first])
    store.put([ReplyRow(request_hash="h", model="m2", reply={"content": "2"}, created_at=later)], replace=True)
    assert store.rows(ReplyRow) == [replace(first, model="m2", reply={"content": "2"}, dollars=0.0)]


def test_rows_of_several_tables_in_one_put_are_stored_together(store: Store, round_: Round) -> None:
    capability = CapabilityRow(id="c1", round_id=round_.id, name="cancel_order", analyst="checks")
    adapter = AdapterRow(
        id="a1", round_id=round_.id, capability_id="c1", base="small", state=AdapterState.TRAINING, config={"r": 8}
    )
    lost = LabelRow(round_id=round_.id, run=0, trajectory_id="nowhere", capability_id="c1", label="NA")
    with pytest.raises(StoreError, match="rule of the schema"):
        store.put([capability, adapter, lost])
    assert store.rows(CapabilityRow) == store.rows(AdapterRow) == []
    store.put([capability, adapter])
    assert (store.rows(CapabilityRow), store.rows(AdapterRow)) == ([capability], [adapter])


def test_states_move_along_the_table_only(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    for name in ("trained", "registered", "champion", "retired", "champion"):
        store.set_state(AdapterRow, "a1", AdapterState(name), path=name)
    store.set_state(AdapterRow, "a1", AdapterState.CHAMPION)
    with pytest.raises(TransitionError, match=r"champion.*training.*retired"):
        store.set_state(AdapterRow, "a1", AdapterState.TRAINING)
    with pytest.raises(TransitionError, match=r"champion.*rejected"):
        store.put([AdapterRow(id="a1", round_id=round_.id, base="small", state=AdapterState.REJECTED)], replace=True)
    with pytest.raises(StoreError, match=r"'winner'.*champion"):
        store.set_state(AdapterRow, "a1", "winner")
    with pytest.raises(StoreError, match=r"draft.*champion"):
        store.set_state(AdapterRow, "a1", EnvironmentState.DRAFT)
    with pytest.raises(StoreError, match="no row 'a2'"):
        store.set_state(AdapterRow, "a2", AdapterState.TRAINED)
    assert store.rows(AdapterRow, state=AdapterState.CHAMPION, path="champion")[0].id == "a1"


def test_rows_filter_by_null_list_and_value(store: Store, round_: Round) -> None:
    rows = [
        SpendRow(id=str(i), round_id=round_.id if i else None, stage=f"s{i}", model="m", calls=i, dollars=0.5)
        for i in range(4)
    ]
    store.put(rows)
    assert [r.id for r in store.rows(SpendRow, stage=["s1", "s3"])] == ["1", "3"]
    assert [r.id for r in store.rows(SpendRow, round_id=None)] == ["0"]
    assert store.rows(SpendRow, stage=[]) == []
    assert store.spent(round_.id) == {
        "calls": 6.0,
        "prompt_tokens": 0.0,
        "sampled_tokens": 0.0,
        "dollars": 1.5,
        "seconds": 0.0,
    }
    assert store.spent("nothing")["dollars"] == 0.0


def test_rows_with_different_columns_in_one_put(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    store.put([TrainingStepRow(adapter_id="a1", step=0, loss=1.0), TrainingStepRow(adapter_id="a1", step=1, kl=0.5)])
    assert [(r.loss, r.kl, r.metrics) for r in store.rows(TrainingStepRow)] == [
        (1.0, None, {}),
        (None, 0.5, {}),
    ]


def test_numpy_values_are_stored_as_numbers(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    step = TrainingStepRow(adapter_id="a1", step=np.int64(3), reward=np.float32(0.5), metrics={"n": np.int64(2)})
    store.put([step])
    found = store.rows(TrainingStepRow, step=3)[0]
    assert (found.reward, found.metrics) == (0.5, {"n": 2})


def test_what_a_database_would_garble_is_cleaned_or_refused(store: Store, round_: Round) -> None:
    capability = add_capability(store, round_)
    note = CapabilityRow(id=capability, round_id=round_.id, name="cancel_order", analyst="llm")
    odd = {"note": "nul \x00 half \ud83d", "examples": [{"k\x00": "\x00", "path": "C:\\u0000", "smile": "🙂"}]}
    store.put([replace(note, **odd)], replace=True)
    found = store.row(CapabilityRow, id=capability)
    assert found is not None
    assert found.note == "nul \ufffd half \ufffd"
    assert found.examples == [{"k\ufffd": "\ufffd", "path": "C:\\u0000", "smile": "🙂"}]
    add_adapter(store, round_)
    with pytest.raises(StoreError, match=r"column loss of training_steps is nan"):
        store.put([TrainingStepRow(adapter_id="a1", step=0, loss=math.nan)])
    with pytest.raises(StoreError, match="finite"):
        store.put([TrainingStepRow(adapter_id="a1", step=0, metrics={"loss": math.nan})])
    assert store.rows(TrainingStepRow) == []


def test_how_a_round_ended_is_stored_whatever_was_said(store: Store, round_: Round) -> None:
    interrupted = store.finish_round(round_.id, RoundState.INTERRUPTED, "half \ud800 of it")
    assert interrupted.reason == "half \ufffd of it"
    assert store.finish_round(round_.id, RoundState.FAILED, "nul \x00").reason == "nul \ufffd"
    add_adapter(store, round_)
    store.set_state(AdapterRow, "a1", AdapterState.TRAINED, path="\udcff", config={"said": "\x00"})
    found = store.row(AdapterRow, id="a1")
    assert found is not None
    assert (found.path, found.config) == ("\ufffd", {"said": "\ufffd"})
    with pytest.raises(StoreError, match="column base_success of adapters is nan"):
        store.set_state(AdapterRow, "a1", AdapterState.TRAINED, base_success=math.nan)


def test_asking_for_what_cannot_be_a_text_is_a_store_error(store: Store) -> None:
    with pytest.raises(StoreError, match="lone surrogates"):
        store.rows(AdapterRow, id="a\ud800")
    with pytest.raises(StoreError, match="lone surrogates"):
        store.set_state(AdapterRow, "a\ud800", AdapterState.TRAINED)


def test_wrong_rows_are_refused_whole(store: Store, round_: Round) -> None:
    with pytest.raises(TypeError, match="colour"):
        SpendRow(id="1", stage="x", model="m", colour=1)
    with pytest.raises(StoreError, match=r"no column \['colour'\]"):
        store.rows(SpendRow, colour=1)
    with pytest.raises(StoreError, match=r"lacks \['id'\]"):
        store.put([SpendRow(id=None, stage="x", model="m")])
    with pytest.raises(StoreError, match=r"StepRow is no row of a small table; there are Round.*add_trajectories"):
        store.put([StepRow({}, [])])
    with pytest.raises(StoreError, match=r"TrajectoryRow is no row.*trajectories\(\)"):
        store.rows(TrajectoryRow)
    with pytest.raises(StoreError, match=r"stage\(\)"):
        store.put([StageRow(id="s1", round_id=round_.id, name="train")])
    good = SpendRow(id="1", round_id=round_.id, stage="x", model="m")
    with pytest.raises(StoreError, match="rule of the schema"):
        store.put([good, replace(good, id="2", round_id="nowhere")])
    assert store.rows(SpendRow) == []
    capability = add_capability(store, round_)
    label = LabelRow(round_id=round_.id, run=0, trajectory_id="none", capability_id=capability, label="NA")
    with pytest.raises(StoreError, match="rule of the schema"):
        store.put([label])


def test_a_row_is_looked_up_by_the_beginning_of_its_id(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    store.put([CapabilityRow(id=f"c{i}", round_id=round_.id, name=f"n{i}", analyst="checks") for i in range(2)])
    store.add_trajectories([trajectory(round_.id, "t1")])
    table, found = store.row_beginning("t") or ("", {})
    assert (table, found["id"], found["n_steps"], found["success"]) == ("trajectories", "t1", 2, False)
    assert not {"token_ids", "logprobs"} & set(found), "blobs are left out"
    table, found = store.row_beginning(round_.id[:8]) or ("", {})
    assert (table, found["id"], found["state"]) == ("rounds", round_.id, "running")
    assert (store.row_beginning("a1") or ("", {}))[0] == "adapters"
    assert (store.row_beginning("c1") or ("", {}))[0] == "capabilities"
    assert store.row_beginning("c") is None, "two begin so"
    stage = store.stage(round_.id, "train:refund")
    assert stage.claim()
    (kept,) = store.rows(StageRow, round_id=round_.id)
    table, found = store.row_beginning(kept.id[:8]) or ("", {})
    assert (table, found["name"], found["state"]) == ("stages", "train:refund", "running")
    assert store.row_beginning("nothing") is None
    assert store.row_beginning("_1") is None, "no pattern"


def test_a_number_is_first_of_all_that_of_a_round(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    store.put([CapabilityRow(id=key, round_id=round_.id, name=key, analyst="checks") for key in ("1ab", "2ab")])
    second = store.start_round("shop", "data2", 1, "gpu", {})
    found = [(table, row["id"]) for key in ("1", "2") for table, row in [store.row_beginning(key) or ("", {})]]
    assert found == [("rounds", round_.id), ("rounds", second.id)]
    store.put([CapabilityRow(id="30", round_id=round_.id, name="three", analyst="checks")])
    assert (store.row_beginning("3") or ("", {}))[0] == "capabilities", "there is no round 3"
    assert store.row_beginning("9" * 30) is None
    assert store.row_beginning("²") is None


def test_queries_of_the_user_cannot_write(store: Store, round_: Round) -> None:
    assert store.query("SELECT number FROM rounds WHERE target = :target", target="shop")["number"].tolist() == [1]
    for statement in ("DELETE FROM rounds", "DELETE FROM rounds RETURNING id", "SELEC 1"):
        with pytest.raises(StoreError):
            store.query(statement)
    assert store.latest_round() is not None


def test_all_or_nothing(store: Store, round_: Round, database_url: str) -> None:
    class Stop(Exception):
        pass

    def half() -> None:
        with store.transaction() as connection:
            connection.exec_driver_sql("UPDATE rounds SET reason = 'half'")
            raise Stop

    with pytest.raises(Stop):
        half()
    with open_store(database_url) as other:
        assert other.round(round_.id).reason == ""


def test_ids_are_the_contracts_hashes() -> None:
    assert row_id("shop", {"b": 1, "a": "ü"}, 3) == content_hash(["shop", {"a": "ü", "b": 1}, 3])
    assert row_id("ab", "c") != row_id("a", "bc")
