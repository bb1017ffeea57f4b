"""What is to break a month does: a fault that came too late is put off, one that never came is said. And a small disk
is all that the doctor may find at its end."""

from __future__ import annotations

import json
from collections import Counter

from benchmarks.month import FULL, KILL, POSTGRES, PREFECT, plan, put_off
from benchmarks.month_promises import Night, doctor_promise, struck_promise


def test_a_month_of_twenty_rounds_has_all_faults_and_two_quiet_nights_first() -> None:
    planned = plan(20, 10, 0)
    assert Counter(fault for fault, _ in planned.values()) == {KILL: 10, PREFECT: 2, POSTGRES: 1, FULL: 1}
    assert min(planned) > 2


def test_what_came_too_late_comes_earlier_in_the_next_free_night() -> None:
    faults = {3: (KILL, 0.8), 4: (PREFECT, 0.5), 6: (FULL, 0.7)}
    put_off(faults, 3)
    assert faults == {4: (PREFECT, 0.5), 5: (KILL, 0.4), 6: (FULL, 0.7)}
    put_off(faults, 5)
    assert faults[7] == (KILL, 0.2)


def test_a_fault_that_never_came_breaks_the_promise() -> None:
    nights = [Night(1), Night(2, KILL, struck=True), Night(3, KILL), Night(4, FULL, struck=True)]
    missed = struck_promise(nights, {KILL: 2, FULL: 1})
    assert (missed.kept, missed.figure) == (False, f"1 of 1 x {FULL}, 1 of 2 x {KILL}")
    assert struck_promise(nights, {KILL: 1, FULL: 1}).kept


def test_the_doctor_may_find_a_small_disk_and_nothing_else() -> None:
    small = {"check": "disk", "level": "fault", "said": "0.3 GB free", "do": "free space"}
    well = {"check": "mlflow", "level": "ok", "said": "answers", "do": ""}
    assert doctor_promise(json.dumps([well, small])).kept
    left = doctor_promise(json.dumps([well, small, well | {"level": "warning", "check": "leases", "said": "left"}]))
    assert (left.kept, left.figure) == (False, "warning leases: left")
    assert not doctor_promise("error (store): it is down").kept
