"""Loading without the garbage collector leaves it on afterwards."""

from __future__ import annotations

import subprocess
import sys

from tests.flows.test_light_start import ROOT

LOADED = """
import gc
from flows.cli.loading import loading
assert gc.isenabled() and not gc.get_freeze_count()
try:
    with loading():
        print("inside", gc.isenabled())
        held = [[] for _ in range(10_000)]
        raise KeyError
except KeyError:
    print("after", gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_the_collector_waits_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "inside False\nafter True True\n"
