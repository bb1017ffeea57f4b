"""A training of several processes comes to what one comes to; micro-batches by tokens to what those by rows do."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from errors import TrainingError
from flows.train_apart import command_of
from models.adapters.deltas import folder_deltas
from models.adapters.files import WEIGHTS
from models.local import attention
from models.local.base import load_base
from models.training import forward, trl_trainer
from models.training.actors import LocalActor
from models.training.forward import StepPrefix, by_rows, by_tokens, token_logprobs
from models.training.grpo import StepsOwed, _config, train_adapter
from models.training.learner import PlainLearner, make_learner
from models.training.ranks import dealt_rows
from models.training.records import StepRecord
from tests.models.training import toy_job
from tests.models.training.test_grpo import SMALL, Half, Source, lora
from tests.tokenizers_trained import random_ids

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
WIDE = {"groups": 4, "collections": 1, "micro_batch": 4}


@pytest.fixture
def tiny_folder(tiny_model: Any, tmp_path: Path) -> Path:
    """The tiny model and its tokenizer as files."""
    policy, renderer = tiny_model
    policy.model.save_pretrained(tmp_path / "base")
    renderer.tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# The base whole in both processes; in parts, with layers computed again and such micro-batches that each process has a
# pass, one of them the first of a step, for which it has no row with an advantage.
TOGETHER = [
    pytest.param({}, False, id="whole"),
    pytest.param({"micro_batch": 2, "group_size": 6, "recompute": True}, True, id="parted"),
]


@pytest.mark.parametrize(("change", "parted"), TOGETHER)
def test_two_processes_train_to_the_adapter_of_one(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Any], parted: bool
) -> None:
    """`accelerate launch` with two processes over gloo, paused after a step and gone on with, against this process."""
    base = {"name": str(tiny_folder), "dtype": "float32", "host": parted}
    orders = {n: {"base": base, "output": str(tmp_path / n), "settings": WIDE | change} for n in ("one", "two")}
    orders["two"]["parted"] = parted
    for name in orders:
        (tmp_path / name).mkdir()
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"lead": "tests.models.training.toy_job:lead", "order": orders["two"], "base": base}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command_of(2), str(spec)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=environment,
            cwd=ROOT,
        ) as job,
    ):  # its standard input stays open: the processes end with who ordered them
        assert toy_job.lead(orders["one"]) == 0
        assert job.wait(600) == 0, log.read_text()[:6000]
    one, two = (json.loads((tmp_path / n / "said.json").read_text()) for n in ("one", "two"))
    assert one[:2] == two[:2] == ["paused", "steps"]
    assert [r[:2] for r in two[2]] == [pytest.approx(r[:2], rel=1e-3, abs=1e-6) for r in one[2]]
    # Means over micro-batches, which have other rows.
    assert [r[2] for r in two[2]] == [pytest.approx(r[2], rel=0.02) for r in one[2]]
    assert all(abs(r[4]) < 1e-3 for r in two[2])
    expected, found = ({n: d.whole() for n, d in folder_deltas(Path(run[3]))[1].items()} for run in (one, two))
    assert expected.keys() == found.keys()
    assert max(float(d.abs().max()) for d in expected.values()) > 1e-3
    for name, delta in found.items():
        assert torch.allclose(delta, expected[name], atol=1e-4), name
    assert sorted(p.name for p in (tmp_path / "two").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    if parted:
        whole = sum(4 * p.numel() for p in load_base(**base).policy.model.parameters())
        assert sum(two[4]) == pytest.approx(whole, rel=0.01), "what one does not hold the other does"
        assert max(two[4]) < 0.51 * whole
        saved = {n: {t.shape for t in load_file(tmp_path / n / "checkpoint-2" / WEIGHTS).values()} for n in orders}
        assert saved["one"] == saved["two"], "the adapter is whole in a checkpoint"


def test_rows_are_dealt_in_equal_numbers_and_about_equal_work() -> None:
    hands = dealt_rows([9, 1, 0, 8, 2, 0], 2)
    assert sorted(row for hand in hands for row in hand) == [0, 1, 2, 3, 4, 5]
    assert [len(hand) for hand in hands] == [3, 3]
    assert [sum([9, 1, 0, 8, 2, 0][row] for row in hand) for hand in hands] == [10, 10]


def test_tokens_bound_a_micro_batch_and_a_longer_row_has_its_own() -> None:
    counts = [200, 30_000, 150, 900, 100, 1]
    batches = by_tokens(counts, 1000)
    assert sorted(row for batch in batches for row in batch) == list(range(6))
    assert [1] in batches
    assert all(sum(counts[row] for row in batch) <= 1000 for batch in batches if batch != [1])
    assert len(batches) == 3, "no more than are needed"
    assert by_tokens([5, 5], 10) == [[0, 1]]


def test_rows_fill_a_micro_batch_up_to_what_the_longest_would_take() -> None:
    """What rows begin with in common takes no room of its own, where the learner passes it through once."""
    begun, size = list(range(100)), 40
    rows = [[*begun, *range(1000 * row, 1000 * row + size)] for row in range(1, 9)]
    fused, alone = (cast(Any, SimpleNamespace(branches=branches, device=CPU)) for branches in (True, False))
    # Two of them have 280 tokens without sharing; sharing, the first has 140 and each that follows 40.
    assert by_rows(fused, rows, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_rows(alone, rows, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    short = [[1] * 10, [2] * 10, [3] * 30]
    assert by_rows(fused, short, 2) == [[0, 1, 2]], "short rows leave room for more than two"
    assert by_rows(fused, short, 1) == [[0, 1], [2]]


def test_rows_come_by_number_where_each_has_a_price_of_its_own() -> None:
    """Padding up to the longest, or on a GPU a prefix held once for every row."""
    gpu: Any = SimpleNamespace(branches=True, device=torch.device("cuda"))
    for learner in (gpu, PlainLearner.__new__(PlainLearner)):
        assert by_rows(learner, [[1], [1, 2], [3]], 2) == [[0, 1], [2]]


def test_micro_batches_by_tokens_have_the_gradient_of_those_by_rows(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    found = []
    changes: list[dict[str, Any]] = [{}, {"micro_batch_tokens": 60, "recompute": True}]
    for number, change in enumerate(changes):
        records: list[StepRecord] = []
        settings = replace(SMALL, steps=1, **WIDE, **change)
        made = train_adapter(
            Source(Half), LocalActor(policy), renderer, settings, tmp_path / str(number), records.append
        )
        found.append((records[0], {n: d.whole() for n, d in folder_deltas(made.folder)[1].items()}))
    (by_rows, expected), (tokens, deltas) = found
    assert tokens.metrics["grad_norm"] == pytest.approx(by_rows.metrics["grad_norm"], rel=1e-4) != 0
    assert tokens.loss == pytest.approx(by_rows.loss, rel=1e-4, abs=1e-7)
    for name, delta in deltas.items():
        assert torch.allclose(delta, expected[name], atol=1e-2 * float(expected[name].abs().max())), name


def test_the_bases_prefix_is_passed_through_once_a_training(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the distance to the base is what it is with a new pass in every step."""
    policy, renderer = tiny_model
    passes, found = [], []
    made = trl_trainer.Prefix
    monkeypatch.setattr(trl_trainer, "Prefix", lambda *given: passes.append(given) or made(*given))
    for left in (trl_trainer.LEFT_OVER, -1):
        monkeypatch.setattr(trl_trainer, "LEFT_OVER", left)
        records: list[StepRecord] = []
        settings = replace(SMALL, steps=3, **WIDE)
        train_adapter(Source(Half), LocalActor(policy), renderer, settings, tmp_path / str(left), records.append)
        found.append(([record.kl for record in records], len(passes)))
    (kept, once), (anew, all_passes) = found
    assert (once, all_passes - once) == (1, 3)
    assert kept == pytest.approx(anew, rel=1e-3)
    assert min(kept[1:]) > 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kernels", "recompute"), [(True, False), (False, True), (True, True)])
def test_kernels_and_recomputing_change_no_gradient(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, fused: bool, kernels: bool, recompute: bool
) -> None:
    """Attention by torch's kernels, as a GPU has them, in several blocks of queries, behind a shared prefix."""
    policy, _ = tiny_model
    peft = lora(policy)
    peft.train()
    causal = peft.get_base_model()
    rows = [random_ids(50, 9) + random_ids(seed, 8 + 3 * seed) for seed in range(3)]
    wanted = [[p for p in range(11, len(row)) if p % 2] for row in rows]

    def gradients(again: bool) -> dict[str, torch.Tensor]:
        causal.gradient_checkpointing_disable()
        learner = make_learner(causal, policy.decoder, again) if fused else PlainLearner(causal, again)
        peft.zero_grad()
        prefix = StepPrefix(learner, rows[0][:9])
        scored = token_logprobs(learner, rows, 9, wanted, 0.7, prefix)
        sum((chosen * torch.arange(1, len(chosen) + 1)).sum() for chosen, _ in scored).backward()
        prefix.backward()
        return {n: p.grad.clone() for n, p in peft.named_parameters() if p.grad is not None}

    expected = gradients(False)
    if kernels:
        monkeypatch.setattr(forward, "attend_plain", forward.attend_by_kernels)
        monkeypatch.setattr(attention, "QUERIES", 4)
    found = gradients(recompute)
    assert found.keys() == expected.keys()
    assert sum(float(g.abs().max()) > 1e-2 for g in found.values()) > 10
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], atol=1e-3, rtol=1e-3), name


def test_recomputing_keeps_less_for_the_backward_pass(tiny_model: Any) -> None:
    policy, _ = tiny_model
    causal = lora(policy).get_base_model()
    kept = {}
    for recompute in (False, True):
        seen: dict[int, int] = {}
        learner = make_learner(causal, policy.decoder, recompute)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: seen.update({t.data_ptr(): t.numel()}) or t, lambda t: t
        ):
            token_logprobs(learner, [random_ids(1, 200)], 0, [range(1, 200)], 1.0)
        kept[recompute] = sum(seen.values())
    assert kept[True] < 0.5 * kept[False]


def test_several_gpus_of_one_process_do_not_multiply_the_batch(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did: TRL's batch was that of a device times their number, and the step failed."""
    policy, _ = tiny_model
    monkeypatch.setattr("transformers.training_args.TrainingArguments.n_gpu", property(lambda self: self._n_gpu))
    monkeypatch.setattr("models.training.grpo.GRPOConfig._n_gpu", 4, raising=False)
    owed = StepsOwed(replace(SMALL, micro_batch_tokens=100), tmp_path, None)
    assert _config(owed, policy.model, 1).train_batch_size == 8
    with pytest.raises(TrainingError, match="2 x 4 rows are no multiple of the 3 processes"):
        _config(owed, policy.model, 3)
