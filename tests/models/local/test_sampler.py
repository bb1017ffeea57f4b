"""The engine against transformers and PEFT: same tokens, same log-probabilities, whatever shares the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from environments.contract import Prompt
from errors import ContextOverflow, NotFinite, PolicyError
from models.adapters.deltas import Delta, lora_deltas
from models.local import kv_cache
from models.local.policy import PREFIXES_KEPT, LocalPolicy
from models.policy import Generation, Request, Sampling
from models.training.lora import lora_config
from models.training.records import TrainingSettings
from tests.tokenizers_trained import plain_twin, random_ids, tiny_policy

SHARED = random_ids(99, 17)


def prompts(count: int, shared: int = len(SHARED)) -> list[list[int]]:
    return [SHARED[:shared] + random_ids(seed, 3 + 5 * seed % 11) for seed in range(count)]


def requests(
    rows: list[list[int]], temperature: float = 0.0, tokens: int = 12, adapter: str | None = None
) -> list[Request]:
    return [
        Request(f"s{i}", row, Sampling(temperature, tokens, seed=i), adapter, len(SHARED)) for i, row in enumerate(rows)
    ]


@torch.no_grad()
def full_logprobs(model: Any, ids: list[int], generation: Generation, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the generated ids by one plain forward pass."""
    logits = model(torch.tensor([[*ids, *generation.ids]])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(ids) + k - 1, i]) for k, i in enumerate(generation.ids)]


@torch.no_grad()
def greedy(model: Any, ids: list[int], tokens: int, stop: frozenset[int]) -> list[int]:
    """transformers' own greedy generation."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=sorted(stop), pad_token_id=0
    )
    return [int(i) for i in out[0, len(ids) :]]


def given_adapter(policy: LocalPolicy, seed: int = 1) -> tuple[Any, dict[str, Delta]]:
    """A live PEFT model of the plain twin with random A and B, and its deltas."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    twin = plain_twin(policy)
    peft = get_peft_model(twin, lora_config(TrainingSettings(rank=4, alpha=8, upper_layers=2), twin))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return peft.eval(), lora_deltas(peft)


def test_greedy_equals_transformers(tiny_model: Any) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    rows = prompts(13)  # more than the 8 rows of the batch
    for row, generation in zip(rows, policy.generate(requests(rows)), strict=True):
        assert list(generation.ids) == greedy(plain, row, 12, policy.stop_ids)
        assert generation.logprobs == pytest.approx(full_logprobs(plain, row, generation), abs=1e-4)
        assert generation.finish_reason == ("stop" if generation.ids[-1] in policy.stop_ids else "length")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(tiny_model: Any, temperature: float) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    rows = prompts(6)
    for row, generation in zip(rows, policy.generate(requests(rows, temperature)), strict=True):
        assert generation.logprobs == pytest.approx(full_logprobs(plain, row, generation, temperature), abs=1e-4)


def test_draws_follow_the_distribution(tiny_model: Any) -> None:
    """Frequencies of the first token over 4,000 seeds against the softmax: within five standard errors."""
    policy, _ = tiny_model
    row = prompts(1)[0]
    expected = policy.next_logprobs(row, len(SHARED)).exp()
    draws = 4000
    asked = [Request(f"d{i}", row, Sampling(1.0, 1, seed=i), None, len(SHARED)) for i in range(draws)]
    counts = torch.zeros_like(expected)
    for generation in policy.generate(asked):
        counts[generation.ids[0]] += 1
    error = (expected * (1 - expected) / draws).sqrt() + 1e-3
    assert ((counts / draws - expected).abs() / error).max() < 5


def test_a_row_does_not_depend_on_its_batch(tiny_model: Any) -> None:
    policy, _ = tiny_model
    asked = requests(prompts(8), 1.0)
    together = policy.generate(asked)
    for request, expected in zip(asked, together, strict=True):
        (alone,) = policy.generate([request])
        assert alone.ids == expected.ids
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert [g.ids for g in policy.generate(asked[::-1])] == [g.ids for g in together[::-1]]


def test_turns_of_a_session_compute_only_what_is_new(tiny_model: Any) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    talks = prompts(12)  # more sessions than rows: some lose their slot between turns and are computed again
    for turn in range(3):
        for i, talk in enumerate(talks):
            policy.submit(Request(f"t{i}", talk, Sampling(0.0, 6), None, len(SHARED)))
        done: dict[str, Generation] = {}
        while len(done) < len(talks):
            done |= {g.session: g for g in policy.poll()}
        for i, talk in enumerate(talks):
            generation = done[f"t{i}"]
            assert list(generation.ids) == greedy(plain, talk, 6, policy.stop_ids), (turn, i)
            assert generation.logprobs == pytest.approx(full_logprobs(plain, talk, generation), abs=1e-4)
            talk += [*generation.ids, *random_ids(100 * turn + i, 4)]
    assert policy.poll() == []


def test_a_session_that_changed_its_past_is_computed_again(tiny_model: Any) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    first, other = prompts(2)
    for row in (first, other, first[:-1], first):
        policy.submit(Request("same", row, Sampling(0.0, 5), None, len(SHARED)))
        (generation,) = policy.poll() or policy.poll()
        assert list(generation.ids) == greedy(plain, row, 5, policy.stop_ids)


def test_cached_turns_cost_their_new_tokens(tiny_model: Any) -> None:
    policy, _ = tiny_model
    row = prompts(1)[0]
    policy.submit(Request("a", row, Sampling(0.0, 4), None, len(SHARED)))
    (generation,) = policy.poll()
    before = policy.work.decoded + policy.work.prefilled
    policy.submit(Request("a", [*row, *generation.ids, 9, 10], Sampling(0.0, 1), None, len(SHARED)))
    policy.poll()
    # The last sampled token has no keys and values yet: it is computed with the two that follow it.
    assert policy.work.decoded + policy.work.prefilled - before == 3


def test_what_rows_begin_alike_with_is_computed_once(tiny_model: Any) -> None:
    """A group of eleven for eight rows, one with another prompt, and one that goes on otherwise in the middle."""
    policy, _ = tiny_model
    plain = plain_twin(policy)
    group, other = SHARED + random_ids(5, 30), SHARED + random_ids(6, 9)
    talks = [*[list(group) for _ in range(11)], other, [*group[:40], *random_ids(7, 12)]]
    asked = [Request(f"g{i}", talk, Sampling(1.0, 6, seed=i), None, len(SHARED)) for i, talk in enumerate(talks)]
    before = policy.work.prefilled
    made = policy.generate(asked)
    # The prefix, the prompt, the other one, and what comes behind the 23 tokens that the last one shares.
    assert policy.work.prefilled - before == len(SHARED) + 30 + 9 + 12
    assert len({generation.ids for generation in made[:11]}) > 5, "each with draws of its own"
    for talk, generation in zip(talks, made, strict=True):
        assert generation.logprobs == pytest.approx(full_logprobs(plain, talk, generation), abs=1e-4)


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_later_turn_takes_over_what_another_session_has_said(tiny_model: Any, adapter: str | None) -> None:
    policy, _ = tiny_model
    policy.load_deltas("a", "d", given_adapter(policy)[1])
    long = prompts(1)[0] + random_ids(8, 20)
    cold = policy.generate([Request("cold", long, Sampling(0.0, 5), adapter, len(SHARED))])
    policy.submit(Request("first", long[:-3], Sampling(0.0, 5), "a", len(SHARED)))
    policy.poll()
    before = policy.work.prefilled + policy.work.decoded
    policy.submit(Request("second", long, Sampling(0.0, 5), adapter, len(SHARED)))
    (warm,) = policy.poll()
    fresh = policy.work.prefilled + policy.work.decoded - before
    assert (warm.ids, warm.logprobs) == (cold[0].ids, pytest.approx(cold[0].logprobs, abs=1e-4))
    # Of another adapter, or of the base, nothing is taken over.
    assert fresh == (3 if adapter else len(long) - len(SHARED)) + len(warm.ids) - 1


def test_adapters_equal_peft_and_leave_the_base_alone(tiny_model: Any) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    live = {name: given_adapter(policy, seed) for seed, name in enumerate(("one", "two"))}
    for name, (_, deltas) in live.items():
        policy.load_deltas(name, f"digest-{name}", deltas)
    rows = prompts(9)
    asked = [
        Request(f"s{i}", row, Sampling(0.0, 8), (None, "one", "two")[i % 3], len(SHARED)) for i, row in enumerate(rows)
    ]
    seen = set()
    for request, generation in zip(asked, policy.generate(asked), strict=True):
        model = live[request.adapter][0] if request.adapter else plain
        assert generation.logprobs == pytest.approx(full_logprobs(model, list(request.prompt), generation), abs=2e-4)
        seen.add((request.adapter, generation.ids))
    (again,) = policy.generate([Request("x", rows[0], Sampling(0.0, 8), "one", len(SHARED))])
    assert again.logprobs == pytest.approx(full_logprobs(live["one"][0], rows[0], again), abs=2e-4)
    assert policy.identity("one") != policy.identity() != policy.identity("two")
    assert policy.identity("one").adapter == "digest-one"


def test_replacing_an_adapter_forgets_what_it_computed(tiny_model: Any) -> None:
    policy, _ = tiny_model
    row = prompts(1)[0]
    for seed in (1, 2):
        peft, deltas = given_adapter(policy, seed)
        policy.load_deltas("training", f"step-{seed}", deltas)
        (generation,) = policy.generate([Request("x", row, Sampling(0.0, 8), "training", len(SHARED))])
        assert generation.logprobs == pytest.approx(full_logprobs(peft, row, generation), abs=2e-4)
    policy.unload_adapter("training")
    assert policy.adapters == ()
    (generation,) = policy.generate([Request("x", row, Sampling(0.0, 8), None, len(SHARED))])
    assert generation.logprobs == pytest.approx(full_logprobs(plain_twin(policy), row, generation), abs=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_has_come_apart_is_refused_and_leaves_nothing_behind(tiny_model: Any, value: float) -> None:
    """Its rows have filled the slots; shorter and longer ones of the base follow, which share their passes, so that
    what a short one does not see is there. The values of one layer alone are no numbers."""
    policy, _ = tiny_model
    rows = [random_ids(seed, 20 + 4 * seed) for seed in range(8)]
    asked = [Request(f"b{i}", row[: 8 + 4 * i], Sampling(1.0, 6, seed=i)) for i, row in enumerate(rows)]
    expected = policy.generate(asked)
    policy.free_buffers()
    name = "model.layers.1.self_attn.v_proj"
    broken = torch.full_like(policy.decoder.layers[name].base, value)
    policy.load_deltas("bad", "d", {name: Delta.dense(broken)})
    for _ in range(2):
        with pytest.raises(NotFinite, match=r"adapter 'bad' gives log-probabilities that are not finite in float32"):
            policy.generate([Request(f"a{i}", row, Sampling(1.0, 20, seed=i), "bad") for i, row in enumerate(rows)])
        assert not policy.busy
    with pytest.raises(NotFinite, match="'bad'"):
        policy.next_logprobs(rows[0], adapter="bad")
    policy.unload_adapter("bad")
    assert policy.generate(asked) == expected


def test_a_batch_that_comes_apart_ends_what_is_in_it_and_no_more(tiny_model: Any) -> None:
    policy, _ = tiny_model
    name = "model.layers.1.self_attn.v_proj"
    broken = torch.full_like(policy.decoder.layers[name].base, float("nan"))
    policy.load_deltas("bad", "d", {name: Delta.dense(broken)})
    row = prompts(1)[0]
    policy.submit(Request("theirs", row, Sampling(0.0, 4), "bad", len(SHARED)))
    policy.submit(Request("ours", row, Sampling(0.0, 4), None, len(SHARED)))
    with pytest.raises(NotFinite):
        policy.poll()
    (answer,) = policy.poll()
    assert list(answer.ids) == greedy(plain_twin(policy), row, 4, policy.stop_ids)
    assert not policy.busy


def test_an_adapter_stays_until_its_turns_are_done(tiny_model: Any) -> None:
    policy, _ = tiny_model
    _, deltas = given_adapter(policy)
    policy.load_deltas("a", "d", deltas)
    policy.submit(Request("x", prompts(1)[0], Sampling(0.0, 3), "a", len(SHARED)))
    for computed in (False, True):  # queued, then in the batch
        if computed:
            assert policy.step() == []
        with pytest.raises(PolicyError, match="'a' is answering requests"):
            policy.unload_adapter("a")
        with pytest.raises(PolicyError, match="'a' is answering requests"):
            policy.load_deltas("a", "d", {})
    assert len(policy.poll()) == 1
    policy.unload_adapter("a")
    assert policy.generate(requests(prompts(1)))


def test_prefixes_are_evicted_and_computed_again(tiny_model: Any) -> None:
    policy, _ = tiny_model
    plain = plain_twin(policy)
    rows = [random_ids(seed, 20) for seed in range(PREFIXES_KEPT + 3)]
    for row in [*rows, *rows[:2]]:
        (generation,) = policy.generate([Request("p", row, Sampling(0.0, 4), None, 15)])
        assert list(generation.ids) == greedy(plain, row, 4, policy.stop_ids)


def test_the_whole_prompt_may_be_shared(tiny_model: Any) -> None:
    policy, _ = tiny_model
    (generation,) = policy.generate([Request("p", SHARED, Sampling(0.0, 4), None, len(SHARED))])
    assert list(generation.ids) == greedy(plain_twin(policy), SHARED, 4, policy.stop_ids)


def test_next_logprobs_and_freed_buffers(tiny_model: Any) -> None:
    policy, _ = tiny_model
    row = prompts(1)[0]
    with torch.no_grad():
        expected = torch.log_softmax(plain_twin(policy)(torch.tensor([row])).logits[0, -1].float(), -1)
    assert torch.allclose(policy.next_logprobs(row, len(SHARED)), expected, atol=1e-4)
    policy.free_buffers()
    assert torch.allclose(policy.next_logprobs(row, len(SHARED)), expected, atol=1e-4)


def test_what_is_refused(tiny_model: Any) -> None:
    policy, _ = tiny_model
    with pytest.raises(ContextOverflow, match="512"):
        policy.submit(Request("a", random_ids(1, 510), Sampling(0.0, 3)))
    with pytest.raises(PolicyError, match="'nobody' is not loaded"):
        policy.submit(Request("a", [5, 6], Sampling(), "nobody"))
    with pytest.raises(PolicyError, match="'nobody'"):
        policy.unload_adapter("nobody")
    with pytest.raises(PolicyError, match="empty"):
        policy.submit(Request("a", [], Sampling()))
    with pytest.raises(PolicyError, match="does not have"):
        policy.load_deltas("a", "d", {"model.layers.77.mlp.up_proj": Delta.dense(torch.zeros(1, 1))})
    policy.submit(Request("a", prompts(1)[0], Sampling(0.0, 2)))
    with pytest.raises(PolicyError, match="in flight"):
        policy.next_logprobs([5, 6])
    with pytest.raises(PolicyError, match="in flight"):
        policy.free_buffers()
    assert len(policy.poll()) == 1
    policy.release("a")
    policy.release("never seen")
    assert policy.poll() == []


def test_models_without_the_attention_interface_are_refused(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    with pytest.raises(PolicyError, match="eager"):
        LocalPolicy(plain_twin(policy), policy.identity(), renderer.stop_ids)


def test_one_row_serves_many(tiny_tokenizer: Any) -> None:
    policy, _ = tiny_policy(tiny_tokenizer, rows=1)
    plain = plain_twin(policy)
    rows = prompts(4)
    for row, generation in zip(rows, policy.generate(requests(rows)), strict=True):
        assert list(generation.ids) == greedy(plain, row, 12, policy.stop_ids)


@pytest.mark.model
def test_embedded_model_equals_plain_transformers(embedded_model: Any) -> None:
    from environments.targets.shop.target import target

    policy, renderer = embedded_model
    plain = plain_twin(policy)
    asked = []
    for i, task in enumerate(target().tasks("test")[:60:20]):
        environment = target().environment()
        first = environment.reset(task)
        talk = renderer.start(Prompt.of(environment), first.messages)
        asked.append(Request(f"e{i}", talk.ids, Sampling(0.0, 10), None, talk.shared))
    for request, generation in zip(asked, policy.generate(asked), strict=True):
        expected = full_logprobs(plain, list(request.prompt), generation)
        gap = [abs(a - b) for a, b in zip(expected, generation.logprobs, strict=True)]
        assert sum(gap) / len(gap) < (1e-3 if policy.identity().dtype == "float32" else 5e-2)
        if policy.identity().dtype == "float32":
            assert list(generation.ids) == greedy(plain, list(request.prompt), 10, policy.stop_ids)


def test_a_long_prefix_is_attended_to_in_blocks(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = tiny_model
    prompt = [5 + (7 * i) % 300 for i in range(41)]
    whole = policy.next_logprobs(prompt, 40)
    policy.free_buffers()
    monkeypatch.setattr("models.local.kv_cache.QUERIES_AT_ONCE", 16)
    assert torch.allclose(policy.next_logprobs(prompt, 40), whole, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_are_attended_to_together_may_be_few(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    policy, _ = tiny_model
    asked = [Request(f"r{i}", [3, 5, 8 + i, *range(20, 24 + i)], Sampling(0.7, 4, seed=i), None, 2) for i in range(7)]
    together = policy.generate(asked)
    whole, seen = kv_cache.attend_padded, list[int]()
    monkeypatch.setattr(kv_cache, "attend_padded", lambda q, *rest: seen.append(len(q)) or whole(q, *rest))
    width, held = 4 + 7, 4 + 7 + 2  # new tokens of the longest row, and what they see
    bytes_a_row = policy.model.config.num_attention_heads * width * held * policy.model.dtype.itemsize
    monkeypatch.setattr(kv_cache, "SCORES_AT_ONCE", rows * bytes_a_row)
    few = policy.generate(asked)
    assert max(seen) == rows
    assert [g.ids for g in few] == [g.ids for g in together]
    for one, other in zip(few, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
