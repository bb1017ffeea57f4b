"""Other architectures through the whole of a step: rollouts, GRPO, export, and the proof that the files are live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from environments.contract import Message, Prompt
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.fingerprint import prove
from models.adapters.limits import ServerLimits, check_limits, linear_modules
from models.adapters.loading import fingerprint_on, load_folder
from models.local.base import load_base
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from models.training.records import StepRecord
from tests.models.training.test_grpo import SMALL, Source
from tests.shapes_made import tiny_model


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss"]
)
def test_a_step_is_sampled_trained_exported_and_live(kind: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    where = tmp_path / "base"
    tiny_model(kind, vocabulary=len(tiny_tokenizer)).save_pretrained(where)
    tiny_tokenizer.save_pretrained(where)
    base, steps = load_base(str(where), "float32", rows=8), list[StepRecord]()
    settings = replace(SMALL, steps=1, learning_rate=1e-2, upper_layers=None)
    actor = LocalActor(base.policy)
    result = train_adapter(Source(), actor, base.renderer, settings, tmp_path / "out", steps.append)
    (step,) = steps
    assert step.logprob_gap < 1e-4
    assert step.metrics["sampler_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert step.metrics["grad_norm"] > 0
    made = export_adapter(result.folder, tmp_path / "made")
    limits = ServerLimits("base", "1", settings.rank, linear_modules(base.policy.model))
    assert check_limits(made, limits, {}) == adapter_digest(made)
    name = load_folder(base.policy, made, "toy", "round", adapter_digest(made))
    probe = base.renderer.start(Prompt("Answer."), [Message("user", "Please cancel order 512.")])
    taken = fingerprint_on(base.policy, probe, name)
    assert taken.largest_move > 0.01
    assert prove(base.policy, taken, name).apart == 0
    # PEFT's own pass over transformers' own attention answers as the sampler does with the exported files.
    plain = PeftModel.from_pretrained(tiny_model(kind, "eager", vocabulary=len(tiny_tokenizer)), made)
    with torch.no_grad():
        logits = plain(torch.tensor([taken.ids])).logits[0, :-1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(taken.ids[1:])[:, None])[:, 0]
    assert taken.adapted == pytest.approx(expected[-len(taken.adapted) :].tolist(), abs=1e-3)
