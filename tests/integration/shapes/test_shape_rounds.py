"""A whole round on another architecture than the embedded model's, with the model's real chat template.
`python -m benchmarks.shape_rounds` plays five, on the local backend and on real vLLM servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.shapes.rounds_played import OWED, TEMPLATES, round_played
from tests.integration.shapes.shapes_served import TOLERANCE, saved_shape
from tests.tokenizers_trained import shipped_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.usefixtures("prefect")]


def test_a_round_on_gpt_oss_reaches_the_gate_with_a_live_adapter(settings_folder: Path) -> None:
    """Windows, sinks and experts, behind the template that departs most from ChatML."""
    model = saved_shape("gpt_oss", settings_folder / "base", shipped_tokenizer(TEMPLATES["gpt_oss"]))
    played = round_played(model, settings_folder / "home")
    assert played.short_of(TOLERANCE) == []
    assert played.stages == len(OWED)
    assert any(verdict.startswith("release: ") for verdict in played.verdicts)
