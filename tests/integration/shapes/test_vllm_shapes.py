"""Another architecture than the embedded model's on a real vLLM server (CPU build): Qwen3's attention, and experts that
no adapter reaches. `python -m benchmarks.shapes` does the same with five, one server each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from errors import AdapterError
from models.adapters.files import CONFIG, WEIGHTS, adapter_digest
from tests.integration.shapes.shapes_served import TOLERANCE, furthest, moved, served_shape, trained
from tests.integration.vllm_servers import MISSING, adapters_on, installed

pytestmark = [
    pytest.mark.integration,
    pytest.mark.model,
    pytest.mark.skipif(not installed(), reason=MISSING),
]


def on_experts(source: Path, folder: Path) -> Path:
    """An adapter on experts alone, made of another one's weights on queries."""
    folder.mkdir()
    weights = {k: w for k, w in load_file(source / WEIGHTS).items() if ".q_proj." in k}
    renamed = {k.replace("self_attn.q_proj", "mlp.experts.0.gate_proj"): w for k, w in weights.items()}
    save_file(renamed, folder / WEIGHTS)
    config = json.loads((source / CONFIG).read_text()) | {"target_modules": ["gate_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_a_server_with_experts_answers_as_the_trainer(settings_folder: Path, tiny_tokenizer: Any) -> None:
    """Trained with the server as the sampler, exported, loaded and live; what the server drops without a word is
    refused, and leaves nothing behind."""
    with served_shape("qwen3_moe", settings_folder, tiny_tokenizer) as shape:
        made = trained(shape)
        assert [step.step for step in made.steps] == [1, 2]
        assert all(step.metrics["grad_norm"] > 0 for step in made.steps)
        assert max(step.logprob_gap for step in made.steps) < TOLERANCE
        assert max(furthest(shape, made)) < TOLERANCE
        assert moved(shape, made) > 2 * TOLERANCE
        lost = on_experts(made.folder, settings_folder / "lost")
        with pytest.raises(AdapterError, match=r"dropped adapter 'lost@v1'.*moves.*by 0.0 nats"):
            shape.policy.load_adapter("lost@v1", adapter_digest(lost), lost)
        assert adapters_on(shape.policy.servers[0]) == {made.name}
