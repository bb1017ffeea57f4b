"""What a user is shown of the environments that a model wrote, and the warning when nothing confined them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.schemas.actions import ArtifactCreate

from db import SpendRow, open_store
from settings import load_settings
from tasks.reporting.analyst import analyst_warnings, unpriced
from tasks.reporting.figures import CapabilityFigures, SynthesisVersion
from tasks.round.results import ContrastResult
from tasks.synthesis.author_request import Synthesis, Version
from tasks.synthesis.llm_synthesizer import UNCONFINED, show_versions


def versions(level: str) -> Synthesis:
    refused = Version(1, "import os", "a" * 64, False, ("static: import of os is forbidden",), {}, level, "r1")
    return Synthesis("copy_exact_address", "accepted", (refused, Version(2, "x", "b" * 64, True, (), {}, level, "r2")))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, object]:
    """The artifacts, as Prefect checks and sends them; the server that keeps them has tests of its own."""
    made: dict[str | None, object] = {}

    def create(key: str, markdown: str) -> None:
        artifact = ArtifactCreate(key=key, type="markdown", data=markdown)
        made[artifact.key] = artifact.data

    monkeypatch.setattr("tasks.synthesis.llm_synthesizer.create_markdown_artifact", create)
    return made


def test_every_version_and_a_missing_sandbox_are_shown(shown: dict[str | None, object]) -> None:
    show_versions(versions("bubblewrap"), {"c" * 12: "static: too old"})
    assert list(shown) == ["environment-copy-exact-address"]
    text = str(shown["environment-copy-exact-address"])
    assert "import of os is forbidden" in text
    assert "version 2 `bbbbbbbbbbbb` (sandbox: bubblewrap): accepted" in text
    assert "`cccccccccccc` of the bank was passed over: static: too old" in text
    show_versions(versions("process"), {})
    assert shown["sandbox-warning"] == UNCONFINED
    assert "TRACE_SANDBOX=process" in UNCONFINED


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
    assert warnings[2].startswith("1 trajectories were refused by the model or its provider's filter, or got no")
    assert warnings[3].endswith("when candidates were looked for; these were named without them.")


def test_the_report_says_whose_tokens_are_counted_as_no_dollars(tmp_path: Path) -> None:
    asked = {"kind": "llm", "model": "hosted_vllm/nobody-knows-it"}
    with open_store(f"sqlite:///{tmp_path / 'trace.db'}") as store:
        at = store.start_round("shop", "hash", 0, "test", {})
        spent = [("hosted_vllm/nobody-knows-it", 0.0), ("openai/gpt-4.1-mini", 0.0), ("hosted_vllm/another", 0.1)]
        rows = [
            SpendRow(
                id=str(i),
                round_id=at.id,
                stage="contrast",
                model=model,
                prompt_tokens=1200,
                sampled_tokens=34,
                dollars=d,
            )
            for i, (model, d) in enumerate(spent)
        ]
        store.put(rows)
        found = unpriced(load_settings(analyst=asked), store, at.id)
        free = load_settings(analyst=asked | {"prompt_price": 0, "sampled_price": 0})
        assert unpriced(free, store, at.id) == {}
    (told,) = analyst_warnings([], None, found)
    assert told.startswith("Nobody gave a price for hosted_vllm/nobody-knows-it")
    assert "its 1,234 tokens are counted as 0 dollars" in told
