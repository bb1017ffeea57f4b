"""Rounds, small tables and states, on both databases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from db import AdapterState, Round, RoundState, Store, open_store, row_id
from environments.contract import content_hash
from errors import StoreError, TransitionError


def add_capability(store: Store, round_: Round, name: str = "cancel_order") -> str:
    key = row_id(round_.id, name)
    store.put("capabilities", [{"id": key, "round_id": round_.id, "name": name, "analyst": "checks"}])
    return key


def add_adapter(store: Store, round_: Round, **values: object) -> None:
    store.put("adapters", [{"id": "a1", "round_id": round_.id, "base": "small", "state": "training"} | values])


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


def test_a_final_round_stays_as_it_is(store: Store, round_: Round) -> None:
    store.finish_round(round_.id, RoundState.FAILED, "no disk")
    with pytest.raises(TransitionError, match=r"failed.*done.*final"):
        store.finish_round(round_.id, RoundState.DONE)
    assert store.round(round_.id).reason == "no disk"


def test_put_twice_changes_nothing_and_replace_changes_what_is_given(store: Store, round_: Round) -> None:
    add_adapter(store, round_, path="first", config={"r": 16})
    before = store.row("adapters", id="a1")
    add_adapter(store, round_, path="second")
    assert store.row("adapters", id="a1") == before
    store.put("adapters", [{"id": "a1", "round_id": round_.id, "base": "small", "state": "trained"}], replace=True)
    after = store.row("adapters", id="a1")
    assert before is not None
    assert after == before | {"state": "trained"}
    assert after["created_at"].utcoffset() is not None


def test_states_move_along_the_table_only(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    for state in ("trained", "registered", "champion", "retired", "champion"):
        store.set_state("adapters", "a1", state, path=state)
    store.set_state("adapters", "a1", AdapterState.CHAMPION)
    with pytest.raises(TransitionError, match=r"champion.*training.*retired"):
        store.set_state("adapters", "a1", "training")
    with pytest.raises(TransitionError, match=r"champion.*rejected"):
        store.put("adapters", [{"id": "a1", "round_id": round_.id, "base": "small", "state": "rejected"}], replace=True)
    with pytest.raises(StoreError, match=r"'winner'.*champion"):
        store.set_state("adapters", "a1", "winner")
    with pytest.raises(StoreError, match="no row 'a2'"):
        store.set_state("adapters", "a2", "trained")
    assert store.rows("adapters", state="champion", path="champion")[0]["id"] == "a1"


def test_rows_filter_by_null_list_and_value(store: Store, round_: Round) -> None:
    rows = [
        {"id": str(i), "round_id": round_.id if i else None, "stage": f"s{i}", "model": "m", "calls": i, "dollars": 0.5}
        for i in range(4)
    ]
    store.put("spend", rows)
    assert [r["id"] for r in store.rows("spend", stage=["s1", "s3"])] == ["1", "3"]
    assert [r["id"] for r in store.rows("spend", round_id=None)] == ["0"]
    assert store.rows("spend", stage=[]) == []
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
    store.put(
        "training_steps", [{"adapter_id": "a1", "step": 0, "loss": 1.0}, {"adapter_id": "a1", "step": 1, "kl": 0.5}]
    )
    assert [(r["loss"], r["kl"], r["metrics"]) for r in store.rows("training_steps")] == [
        (1.0, None, {}),
        (None, 0.5, {}),
    ]


def test_numpy_values_are_stored_as_numbers(store: Store, round_: Round) -> None:
    add_adapter(store, round_)
    step = {"adapter_id": "a1", "step": np.int64(3), "reward": np.float32(0.5), "metrics": {"n": np.int64(2)}}
    store.put("training_steps", [step])
    found = store.rows("training_steps", step=3)[0]
    assert (found["reward"], found["metrics"]) == (0.5, {"n": 2})


def test_what_a_database_would_garble_is_cleaned_or_refused(store: Store, round_: Round) -> None:
    capability = add_capability(store, round_)
    note = {"id": capability, "round_id": round_.id, "name": "cancel_order", "analyst": "llm"}
    odd = {"note": "nul \x00 half \ud83d", "examples": [{"k\x00": "\x00", "path": "C:\\u0000", "smile": "🙂"}]}
    store.put("capabilities", [note | odd], replace=True)
    found = store.row("capabilities", id=capability)
    assert found is not None
    assert found["note"] == "nul \ufffd half \ufffd"
    assert found["examples"] == [{"k\ufffd": "\ufffd", "path": "C:\\u0000", "smile": "🙂"}]
    add_adapter(store, round_)
    with pytest.raises(StoreError, match=r"column loss of training_steps is nan"):
        store.put("training_steps", [{"adapter_id": "a1", "step": 0, "loss": math.nan}])
    with pytest.raises(StoreError, match="finite"):
        store.put("training_steps", [{"adapter_id": "a1", "step": 0, "metrics": {"loss": math.nan}}])
    assert store.rows("training_steps") == []


def test_wrong_rows_are_refused_whole(store: Store, round_: Round) -> None:
    with pytest.raises(StoreError, match=r"no table 'adaptors'.*adapters"):
        store.put("adaptors", [])
    with pytest.raises(StoreError, match=r"no column \['colour'\]"):
        store.put("spend", [{"id": "1", "colour": 1}])
    with pytest.raises(StoreError, match=r"no column \['colour'\]"):
        store.rows("spend", colour=1)
    with pytest.raises(StoreError, match=r"lacks \['id'\]"):
        store.put("spend", [{"stage": "x", "model": "m"}])
    with pytest.raises(StoreError, match="add_trajectories"):
        store.put("steps", [])
    with pytest.raises(StoreError, match=r"stage\(\)"):
        store.put("stages", [])
    good = {"id": "1", "round_id": round_.id, "stage": "x", "model": "m"}
    with pytest.raises(StoreError, match="rule of the schema"):
        store.put("spend", [good, good | {"id": "2", "round_id": "nowhere"}])
    assert store.rows("spend") == []
    capability = add_capability(store, round_)
    label = {"round_id": round_.id, "run": 0, "trajectory_id": "none", "capability_id": capability, "label": "NA"}
    with pytest.raises(StoreError, match="rule of the schema"):
        store.put("labels", [label])


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
