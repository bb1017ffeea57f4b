"""The time that a module and its checks may take: of the processor, by which they are judged, and on the clock."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from environments.sandbox import allowance
from environments.sandbox.allowance import TimeLimit
from environments.sandbox.workers import SandboxLimits
from environments.synthesized import module_files
from environments.synthesized.module_files import validate_module
from environments.synthesized.modules import SandboxedModule
from environments.validation.checks import Limits
from environments.validation.need import NeedLimits

EXAMPLE = Path(__file__).parents[3] / "environments" / "synthesized" / "worked_examples" / "check_before_cancel.py"
QUICK = SandboxLimits(call_seconds=0.1)
FEW = Limits(distinct=12, searched=24, episodes=12, attack_seeds=1, replayed=6)


def test_a_module_that_hangs_is_given_up_on_after_a_few_calls(monkeypatch):
    """However often each is killed after another time, it is no module that differs from play to play."""
    monkeypatch.setattr(module_files, "SandboxedModule", partial(SandboxedModule, limits=QUICK))
    source = EXAMPLE.read_text().replace('    arguments = call["arguments"]\n', "    while True:\n        pass\n", 1)
    verdict = validate_module(source)
    (reason,) = verdict.reasons
    assert reason.startswith("level 0: oracle: 3 episodes ended in a fault of the environment: CallKilled: the call")
    assert "deadline of 0.1 s of processor time (used: 0.1" in reason
    assert verdict.figures["sandbox"]["restarts"] <= 3


def test_an_oracle_that_hangs_now_and_then_is_a_fault_and_no_want_of_determinism(monkeypatch):
    monkeypatch.setattr(module_files, "SandboxedModule", partial(SandboxedModule, limits=QUICK))
    hang = "def oracle(scenario, state, log):\n    while scenario['state'] == SEED_1:\n        pass\n"
    module = SandboxedModule(EXAMPLE.read_text())
    state = module.scenario(1).payload["scenario"]["state"]
    module.close()
    source = EXAMPLE.read_text().replace("def oracle(scenario, state, log):\n", hang.replace("SEED_1", repr(state)), 1)
    reasons = validate_module(source, FEW).reasons
    assert "episodes ended in a fault of the environment: CallKilled" in reasons[0]
    assert "determinism" not in "".join(reasons)


@pytest.mark.parametrize("kind", ["processor time", "on the clock"])
@pytest.mark.parametrize(("seconds", "checks"), [(70, []), (400, ["scenarios", "determinism"]), (9_999_999, None)])
def test_all_checks_of_a_module_have_one_limit_of_time(monkeypatch, seconds, checks, kind):
    """Every look at the clock is a second here, of the one kind or of the other: in the levels, in the policies, and
    with enough of them accepted. A machine that is busy elsewhere lets seconds pass on the clock alone."""
    now = [0.0]
    monkeypatch.setattr(module_files, "NeedLimits", partial(NeedLimits, time_limit=TimeLimit(9_999_999, 9_999_999)))
    if kind == "processor time":
        monkeypatch.setattr(module_files, "time", SimpleNamespace(thread_time=lambda: now[0]))
        limit = TimeLimit(seconds, 3600)
    else:
        began = time.monotonic()
        passed = SimpleNamespace(monotonic=lambda: began + now[0], clock_gettime=time.clock_gettime)
        monkeypatch.setattr(allowance, "time", passed)
        limit = TimeLimit(600, seconds)

    def moved():
        now[0] += 1

    verdict = validate_module(EXAMPLE.read_text(), FEW, time_limit=limit, moved=moved)
    assert verdict.accepted == (checks is None)
    if checks is None:
        assert now[0] > 1000, "more seconds than all checks may take of the processor"
        return
    (reason,) = verdict.reasons
    what = f"{seconds} s of processor time" if kind == "processor time" else f"{seconds} s on the clock"
    assert f"time: the module is too slow: its checks were not done after {what} (used: " in reason
    assert now[0] == seconds
    assert [name for name in ("scenarios", "determinism", "policies") if name in verdict.figures] == checks
