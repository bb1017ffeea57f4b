"""Parts side by side: the same figures, under the caller's modes, and torch's threads are left as they were."""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch

from models.adapters.deltas import Delta
from models.local import policy as local_policy
from models.local.policy import LocalPolicy
from models.local.threads import SWITCH_SECONDS, cut, most_parts, side_by_side
from models.policy import PolicyIdentity, Request, Sampling


@pytest.mark.parametrize(
    ("costs", "parts", "sizes"),
    [
        ([1] * 8, 2, [4, 4]),
        ([1] * 7, 3, [2, 3, 2]),
        ([30, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 30], 2, [3, 1]),
        ([1, 1], 4, [1, 1]),
        ([5], 2, [1]),
    ],
)
def test_what_is_cut_is_whole_and_no_part_is_empty(costs: list[float], parts: int, sizes: list[int]) -> None:
    found = cut(costs, parts)
    assert [len(costs[part]) for part in found] == sizes
    assert [cost for part in found for cost in costs[part]] == costs


def test_parts_meet_and_come_back_in_order() -> None:
    both = threading.Barrier(2, timeout=60)

    def meet(name: str) -> str:
        both.wait()  # passes only while the other part is under way
        return name

    assert side_by_side([partial(meet, "a"), partial(meet, "b")]) == ["a", "b"]
    assert side_by_side([lambda: threading.current_thread()]) == [threading.current_thread()]


def test_parts_have_the_callers_modes_and_no_parts_of_their_own() -> None:
    def modes() -> tuple[bool, bool, bool, int]:
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            most_parts(),
        )

    assert side_by_side([modes, modes]) == [(False, True, False, 1)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert side_by_side([modes, modes]) == [(False, False, True, 1)] * 2
    with torch.inference_mode():
        assert side_by_side([modes, modes]) == [(True, False, False, 1)] * 2
    assert most_parts() == torch.get_num_threads()


def test_torch_has_its_threads_afterwards_also_in_threads_to_come() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(4)
    try:
        assert side_by_side([torch.get_num_threads] * 2) == [2, 2]
        assert side_by_side([torch.get_num_threads] * 4) == [1] * 4
        another = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        another.start()
        another.join()
        assert (torch.get_num_threads(), seen) == (4, [4])
    finally:
        torch.set_num_threads(before)


def test_a_part_that_fails_ends_no_other() -> None:
    failed, done = threading.Event(), []

    def fails() -> None:
        failed.set()
        raise ValueError("the first part")

    def lasts() -> None:
        assert failed.wait(60)
        done.append(True)

    with pytest.raises(ValueError, match="the first part"):
        side_by_side([fails, lasts])
    assert done == [True]


def test_threads_take_turns_faster_only_while_parts_are_computed() -> None:
    def fails() -> float:
        raise ValueError(f"asked after {sys.getswitchinterval():.4f} s")

    before = sys.getswitchinterval()
    assert before > 2 * SWITCH_SECONDS
    assert (
        side_by_side([sys.getswitchinterval, lambda: side_by_side([sys.getswitchinterval])[0]])
        == [pytest.approx(SWITCH_SECONDS)] * 2
    )
    assert sys.getswitchinterval() == before
    with pytest.raises(ValueError, match=f"asked after {SWITCH_SECONDS:.4f} s"):
        side_by_side([fails, fails])
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("adapted", [False, True])
def test_a_batch_in_parts_is_sampled_as_one(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    """Rows of several lengths, more than there are places for, in two turns each."""
    made = []
    for parts in (1, 3):
        monkeypatch.setattr(local_policy, "most_parts", lambda parts=parts: parts)
        monkeypatch.setattr(local_policy, "LEAST_ROWS", 2)
        policy, told = LocalPolicy(tiny_model[0].model, PolicyIdentity("tiny", "0"), frozenset({7}), rows=8), []
        if adapted:
            torch.manual_seed(0)
            name = "model.layers.1.mlp.down_proj"
            change = 0.1 * torch.randn_like(policy.decoder.layers[name].base)
            policy.load_deltas("a", "0", {name: Delta.dense(change)})
        prompts = {f"r{i}": [3, 5, 8, 13, *range(20, 21 + 3 * i)] for i in range(11)}
        for turn in range(2):
            asked = [
                Request(name, ids, Sampling(0.7, 6, seed=100 * turn + i), "a" if adapted else None, 4)
                for i, (name, ids) in enumerate(prompts.items())
            ]
            answers = policy.generate(asked)
            prompts = {a.session: [*prompts[a.session], *a.ids, 9, 10] for a in answers}
            told += answers
        made.append((told, asdict(policy.work), policy.sampled_tokens))
    (whole, work, sampled), (parted, again, tokens) = made
    assert [replace(a, logprobs=()) for a in whole] == [replace(a, logprobs=()) for a in parted]
    assert (work, sampled) == (again, tokens)
    for one, other in zip(whole, parted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
