"""Episodes of BFCL that are played in threads, as rounds and evaluations play them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import getcontext
from typing import Any

import pytest

from environments.targets.bfcl import services
from environments.targets.bfcl.services import Services
from environments.targets.bfcl.single import verdicts
from environments.targets.bfcl.single.items import load_items
from environments.targets.bfcl.single.target import describe

_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"bfcl-eval is absent: {_missing[:1]}")

# The first verdict of a process imports BFCL's checker. A finder that dawdles gives the others time to come between.
FIRST_VERDICTS = """
import json, sys, threading, time
from environments.targets.bfcl.single.target import SingleTarget

class Dawdling:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("bfcl_eval.eval_checker"):
            time.sleep(0.02)

sys.meta_path.insert(0, Dawdling())
target, said, together = SingleTarget(), [], threading.Barrier(8)
tasks = [task for task in target.tasks("diagnosis") if task.family != "irrelevance"][:8]

def play(task):
    environment = target.environment()
    environment.reset(task)
    environment.step(environment.oracle())
    together.wait()
    try:
        said.append("right" if environment.score().success else "wrong")
    except BaseException as error:
        said.append(repr(error))

threads = [threading.Thread(target=play, args=(task,)) for task in tasks]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(said))
"""


def test_the_first_verdicts_of_a_process_may_be_asked_for_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", FIRST_VERDICTS], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == ["right"] * 8


def test_a_checker_that_does_not_import_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise KeyError("bfcl_eval.constants.model_config")

    monkeypatch.setattr(verdicts, "_checker", damaged)
    with pytest.raises(KeyError, match="model_config"):
        verdicts.bfcl_verdict(load_items("simple_python")[0], [{"f": {}}])


def test_two_episodes_with_long_results_share_no_card_and_no_booking() -> None:
    """BFCL fills every account up with the same cards and bookings; a flight that is booked is paid from one."""
    one, two = (
        Services({"involved_classes": ["TravelAPI"], "initial_config": {}}, True).instances["TravelAPI"]
        for _ in range(2)
    )
    for held in ("credit_card_list", "booking_record"):
        mine, others = getattr(one, held), getattr(two, held)
        assert mine == others
        assert len(mine) > 1
        for name, record in mine.items():
            assert record is not others[name], f"{held}: {name}"
    card = next(iter(one.credit_card_list))
    one.credit_card_list[card]["balance"] = -1
    assert two.credit_card_list[card]["balance"] != -1


def test_two_episodes_with_long_results_read_their_own_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """BFCL writes each temperature into one record of its module."""

    def read(seed: int) -> str:
        start = {"VehicleControlAPI": {"random_seed": seed}}
        opened = Services({"involved_classes": ["VehicleControlAPI"], "initial_config": start}, True)
        return opened.call("get_outside_temperature_from_google", {})[0]

    alone = [read(1), read(2)]
    assert alone[0] != alone[1]
    write = services._written

    def slowly(value: Any) -> str:
        time.sleep(0.05)
        return write(value)

    monkeypatch.setattr(services, "_written", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, (1, 2))) == alone


def test_two_episodes_compute_with_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """BFCL sets mpmath's for the whole process, and Python's own for the thread."""

    def computed(precision: int) -> str:
        opened = Services({"involved_classes": ["MathAPI"], "initial_config": {}}, False)
        return opened.call("logarithm", {"value": 7, "base": 3, "precision": precision})[0]

    alone = [computed(5), computed(50)]
    assert len(alone[0]) < len(alone[1])
    write, both = services._written, threading.Barrier(2)

    def together(value: Any) -> str:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return write(value)

    monkeypatch.setattr(services, "_written", together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(computed, (5, 50))) == alone
    before = getcontext().prec
    Services({"involved_classes": ["MathAPI"], "initial_config": {}}, False).call(
        "square_root", {"number": 2, "precision": 3}
    )
    assert getcontext().prec == before
