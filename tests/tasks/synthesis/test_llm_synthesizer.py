"""What a user is shown of the environments that a model wrote, and the warning when nothing confined them."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tasks.reporting.analyst import analyst_warnings
from tasks.reporting.figures import CapabilityFigures, SynthesisVersion
from tasks.round.results import ContrastResult
from tasks.synthesis.author_request import Synthesis, Version
from tasks.synthesis.llm_synthesizer import UNCONFINED, show_versions


def versions(level: str) -> Synthesis:
    refused = Version(1, "import os", "a" * 64, False, ("static: import of os is forbidden",), {}, level, "r1")
    return Synthesis("copy_exact_address", "accepted", (refused, Version(2, "x", "b" * 64, True, (), {}, level, "r2")))


def artifacts(key: str) -> list[Any]:
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


@pytest.mark.usefixtures("prefect")
def test_every_version_and_a_missing_sandbox_are_shown() -> None:
    show_versions(versions("bubblewrap"), {"c" * 12: "static: too old"})
    (shown,) = artifacts("environment-copy-exact-address")
    assert "import of os is forbidden" in shown.data
    assert "version 2 `bbbbbbbbbbbb` (sandbox: bubblewrap): accepted" in shown.data
    assert "`cccccccccccc` of the bank was passed over: static: too old" in shown.data
    assert artifacts("sandbox-warning") == []
    show_versions(versions("process"), {})
    (warning,) = artifacts("sandbox-warning")
    assert warning.data == UNCONFINED
    assert "TRACE_SANDBOX=process" in warning.data


@pytest.mark.parametrize("level", ["process", "bubblewrap"])
def test_the_report_warns_of_a_missing_sandbox(level: str) -> None:
    version = SynthesisVersion(number=1, accepted=True, sandbox=level)
    row = CapabilityFigures(
        name="copy_exact_address", mean_cov=0.5, mean_delta=0.5, runs_passed=9, verdict="promoted", versions=[version]
    )
    assert (UNCONFINED in analyst_warnings([row], {})) is (level == "process")


def test_the_report_says_which_runs_and_trajectories_were_left_out() -> None:
    left = {"refused": {"3": "it refused"}, "too_long": ["a", "b"], "filtered": ["c"], "unread": ["d"]}
    contrast = ContrastResult(analyst="llm", candidates=[], labels=0, **left)
    warnings = analyst_warnings([], contrast)
    assert warnings[0] == "Labelling run 3 was refused: it refused"
    assert warnings[1].startswith("2 trajectories were too long")
    assert warnings[2].startswith("1 trajectories were refused by the model or its provider's filter, also alone")
    assert warnings[3].endswith("when candidates were looked for; these were named without them.")
