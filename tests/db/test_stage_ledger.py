"""The stage ledger, on both databases."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from db import Round, StageRow, StageState, Store, ledger, row_id
from db.rows import PROCESS
from errors import StoreError, TransitionError


def expire(store: Store) -> None:
    """Let all leases run out, as if an hour had passed."""
    with store.transaction() as connection:
        moment = "'2020-01-01 00:00:00.000000'" + ("" if store.url.startswith("sqlite") else "::timestamptz")
        connection.execute(text(f"UPDATE stages SET lease_until = {moment}"))


def test_the_usual_course(store: Store, round_: Round) -> None:
    stage = store.stage(round_.id, "rollout")
    assert (stage.row().state, stage.row().attempt, stage.id) == ("pending", 0, row_id(round_.id, "rollout"))
    assert stage.claim("me", lease_seconds=30)
    running = stage.row()
    assert (running.state, running.owner, running.attempt) == ("running", "me", 1)
    assert running.lease_until is not None
    assert running.heartbeat_at is not None
    assert (running.lease_until - running.heartbeat_at).total_seconds() == 30
    stage.finish({"trajectories": 12})
    done = store.stage(round_.id, "rollout")
    assert done.finished
    assert (done.row().state, done.row().result, done.row().lease_until) == ("done", {"trajectories": 12}, None)
    assert done.row().seconds is not None
    assert not done.claim("another")
    with pytest.raises(TransitionError, match="'done'"):
        stage.finish({"trajectories": 13})
    with pytest.raises(TransitionError, match="'done'"):
        done.skip("no")
    assert done.row().result == {"trajectories": 12}


def test_a_claimed_stage_belongs_to_one(store: Store, round_: Round) -> None:
    mine, other = store.stage(round_.id, "train"), store.stage(round_.id, "train")
    assert mine.claim()
    assert not other.claim()
    assert not other.heartbeat()
    for move in (lambda: other.finish(), lambda: other.fail("x"), lambda: other.skip("x"), lambda: other.working()):
        with pytest.raises(TransitionError, match="claim"):
            move()
    assert mine.heartbeat()
    assert mine.row().attempt == 1


def test_a_failed_stage_is_tried_again(store: Store, round_: Round) -> None:
    stage = store.stage(round_.id, "train")
    assert stage.claim()
    stage.fail("loss is NaN")
    assert (stage.row().state, stage.row().error) == ("failed", "loss is NaN")
    assert not stage.finished
    assert stage.claim()
    assert (stage.row().attempt, stage.row().error, stage.row().finished_at) == (2, None, None)


def test_an_expired_lease_is_taken_over_and_the_loser_cannot_finish(store: Store, round_: Round) -> None:
    slow, quick = store.stage(round_.id, "train"), store.stage(round_.id, "train")
    assert slow.claim("slow")
    assert not quick.claim("quick")
    expire(store)
    assert quick.claim("quick")
    assert quick.row().attempt == 2
    assert not slow.heartbeat()
    assert slow.lost.is_set()
    with pytest.raises(TransitionError, match=r"owner 'quick', attempt 2"):
        slow.finish({"by": "slow"})
    with pytest.raises(TransitionError):
        slow.fail("late")
    quick.finish({"by": "quick"})
    assert quick.row().result == {"by": "quick"}


def test_heartbeats_hold_the_lease_while_work_goes_on(store: Store, round_: Round) -> None:
    mine, other = store.stage(round_.id, "train"), store.stage(round_.id, "train")
    assert mine.claim(lease_seconds=3.0)
    with mine.working() as work:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            assert not other.claim()
            time.sleep(0.1)
    assert work.failure is None
    mine.finish()
    assert mine.row().attempt == 1


def test_seconds_are_those_of_all_attempts(store: Store, round_: Round) -> None:
    first, second = store.stage(round_.id, "train"), store.stage(round_.id, "train")
    assert first.claim(lease_seconds=3.0)
    time.sleep(0.3)
    first.fail("no")
    failed = first.row().seconds
    assert failed is not None
    assert failed >= 0.3
    assert first.claim(lease_seconds=1.0)
    assert first.row().seconds == failed
    time.sleep(0.2)
    assert first.heartbeat()  # the last sign of a process that dies
    expire(store)
    assert second.claim()
    spent = second.row().seconds
    assert spent is not None
    assert failed + 0.2 <= spent < failed + 5
    second.finish()
    assert (second.row().seconds or 0) >= spent


@pytest.mark.parametrize("dies", [False, True])
def test_a_clock_that_is_set_back_takes_no_seconds_away(
    store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """As when a machine hears what time it is after it has begun to work: an hour less than none would be told."""
    now = [datetime(2026, 10, 25, 2, 50, tzinfo=UTC)]
    monkeypatch.setattr(ledger, "database_time", lambda connection: now[0])
    stage = store.stage(round_.id, "train")

    def attempt(*minutes: int) -> float | None:
        assert stage.claim(f"me, {now[0]}", lease_seconds=1)
        for later in minutes:
            now[0] += timedelta(minutes=later)
            stage.heartbeat()
        stage.fail("no") if not dies else now.append(now.pop() + timedelta(hours=2))
        return ledger.seconds_spent(stage.row())

    assert attempt(10) == 600
    assert attempt(10, -60) == 600
    assert attempt(5) == 900


def test_work_that_raises_fails_the_stage(store: Store, round_: Round) -> None:
    stage = store.stage(round_.id, "train")
    assert stage.claim()
    with pytest.raises(ZeroDivisionError), stage.working():
        1 / 0  # noqa: B018
    assert (stage.row().state, stage.row().error) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("ended", [KeyboardInterrupt, ZeroDivisionError])
def test_a_database_that_is_away_does_not_hide_what_ended_the_work(
    store: Store, round_: Round, monkeypatch: pytest.MonkeyPatch, ended: type[BaseException]
) -> None:
    stage = store.stage(round_.id, "train")
    assert stage.claim()

    def away(connection: object) -> None:
        raise StoreError("the database is away")

    working = stage.working()

    def work() -> None:
        with working:
            monkeypatch.setattr(ledger, "database_time", away)
            raise ended

    with pytest.raises(ended):
        work()
    assert "away" in str(working.failure)
    assert stage.row().state == "running", "the lease runs out instead"


def test_work_that_lost_its_stage_says_so_and_leaves_it_alone(store: Store, round_: Round) -> None:
    slow, quick = store.stage(round_.id, "train"), store.stage(round_.id, "train")
    assert slow.claim("slow", lease_seconds=1.0)

    def work() -> None:
        with slow.working():
            expire(store)
            assert quick.claim("quick")
            assert slow.lost.wait(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert (quick.row().state, quick.row().owner) == ("running", "quick")


def test_skipping_needs_no_claim(store: Store, round_: Round) -> None:
    stage = store.stage(round_.id, "train:nothing")
    stage.skip("no capability was selected")
    assert stage.finished
    assert stage.row().result == {"reason": "no capability was selected"}
    assert not stage.claim()


def test_wrong_stages_are_refused(store: Store, round_: Round) -> None:
    with pytest.raises(StoreError, match="rule of the schema"):
        store.stage("nowhere", "train")
    with pytest.raises(StoreError, match="lease of 0"):
        store.stage(round_.id, "train").claim(lease_seconds=0)
    with pytest.raises(StoreError, match="ledger"):
        store.set_state(StageRow, row_id(round_.id, "train"), StageState.DONE)


def test_a_process_that_has_a_round_open_says_so_until_it_leaves_or_dies(store: Store, round_: Round) -> None:
    def present() -> dict[str, StageRow]:
        return {row.name.removeprefix(PROCESS): row for row in store.presences(round_id=round_.id)}

    waits, dies = store.presence(round_.id, 0.6), store.presence(round_.id, 3600.0)
    assert waits.owner != dies.owner
    waits.begin()
    dies.beat()  # and no other follows
    assert present().keys() == {waits.owner, dies.owner}
    began = present()[waits.owner].heartbeat_at
    assert began is not None
    until = time.monotonic() + 10
    while present()[waits.owner].heartbeat_at == began:  # it is prolonged in the background
        assert time.monotonic() < until
        time.sleep(0.05)
    expire(store)
    while dies.owner in present():  # who lives says so again, and takes the dead one's word away
        assert time.monotonic() < until
        time.sleep(0.05)
    (row,) = present().values()
    assert (row.state, row.owner, row.started_at, row.seconds) == ("running", waits.owner, None, None)
    waits.close()
    assert present() == {}
    store.presence(round_.id, 1.0).close()  # one that never began


def test_the_word_of_who_died_stays_until_it_is_told_where_else_that_was_seen(store: Store, round_: Round) -> None:
    def present() -> set[str | None]:
        return {row.owner for row in store.presences()}

    dead, lives = store.presence(round_.id, 1e-6, {"flow_run": "a"}), store.presence(round_.id, 3600.0)
    dead.beat()
    (left,) = store.presences()
    assert left.result == {"flow_run": "a"}
    lives.beat()
    assert present() == {dead.owner, lives.owner}
    store.presence_told(left.id)
    lives.beat()
    assert present() == {lives.owner}
    dead.beat()
    expire(store)
    lives.beat()
    assert present() == {lives.owner}, "nobody came to tell of it for a week"


def test_a_stage_is_claimed_beside_those_that_have_the_round_open(store: Store, round_: Round) -> None:
    presence = store.presence(round_.id, 3600.0)
    presence.beat()
    assert store.stage(round_.id, "gate").claim("another")
    presence.beat()
    assert store.stage(round_.id, "gate").row().owner == "another"


def test_a_process_that_has_a_round_open_is_no_stage_to_who_reads_stages(store: Store, round_: Round) -> None:
    presence, gate = store.presence(round_.id, 3600.0), store.stage(round_.id, "gate")
    presence.beat()
    assert gate.claim("another")
    of_round = {"round_id": round_.id}
    for equals in ({}, of_round, {"state": StageState.RUNNING}, {"round_id": [round_.id]}):
        assert [row.name for row in store.rows(StageRow, **equals)] == ["gate"]
    assert [row.owner for row in store.presences(**of_round)] == [presence.owner]
    assert {row.owner for row in store.held(**of_round)} == {"another", presence.owner}
    gate.finish()
    assert store.worked() == {round_.id: gate.row().seconds}
    expire(store)
    assert store.held() == []
    assert [row.owner for row in store.presences()] == [presence.owner], "who died is known by it"
