"""The check of every target, on a target of one's own, which knows nothing of leaving out its last write."""

from __future__ import annotations

import pytest

from benchmarks.targets import table


def test_a_target_of_ones_own_is_checked_without_a_spoiled_reference(capsys: pytest.CaptureFixture[str]) -> None:
    table(["tests.tasks.counting_target:target"])
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:7] == ["tests.tasks.counting_target:target", "8", "8", "0", "of", "0", "0"]
