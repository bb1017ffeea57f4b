"""An adapter's folder becomes usable in one way: hash checked, under the policy's own name, seen to do something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from environments.contract import Message, Prompt
from errors import AdapterError, NotFinite
from models.adapters.files import WEIGHTS, adapter_digest
from models.adapters.fingerprint import LONGEST, prove
from models.adapters.loading import ANSWER_TOKENS, fingerprint_on, load_folder
from models.policy import Request, Sampling
from tests.adapters_made import make_adapter


def made(policy: Any, folder: Path, **how: Any) -> tuple[Path, str]:
    folder = make_adapter(policy.model, folder, layers=(1, 2), **how)
    return folder, adapter_digest(folder)


def test_a_folder_with_other_bytes_is_not_loaded(tiny_model: Any, tmp_path: Path) -> None:
    policy, _ = tiny_model
    (one, digest), (other, _) = made(policy, tmp_path / "one"), made(policy, tmp_path / "other", seed=1)
    with pytest.raises(AdapterError, match=rf"for 'pay' in .*other .* stored is {digest[:16]}"):
        load_folder(policy, other, "pay", "round1", digest)
    assert policy.adapters == ()
    name = load_folder(policy, one, "pay", "round1", digest)
    assert name == f"pay@{digest[:8]}"
    assert policy.identity(name).adapter == digest


def test_weights_that_are_not_finite_are_found_before_the_policy_sees_them(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = tiny_model
    folder, _ = made(policy, tmp_path / "one")
    weights = load_file(folder / WEIGHTS)
    last = sorted(weights)[-1]
    weights[last][-1, -1] = float("inf")
    save_file(weights, folder / WEIGHTS)
    monkeypatch.setattr(policy, "load_adapter", lambda *_: pytest.fail("a server would be blamed for it"))
    with pytest.raises(NotFinite, match=rf"for 'pay' in .*one has weights that are not finite \({last}\)"):
        load_folder(policy, folder, "pay", "round1", adapter_digest(folder))


def test_it_is_loaded_once_and_again_when_it_is_another(tiny_model: Any, tmp_path: Path) -> None:
    policy, _ = tiny_model
    loaded: list[str] = []
    load = policy.load_deltas
    policy.load_deltas = lambda name, digest, deltas: (loaded.append(digest), load(name, digest, deltas))
    (one, first), (other, second) = made(policy, tmp_path / "one"), made(policy, tmp_path / "other", seed=1)
    for folder, digest in ((one, first), (one, first), (other, second)):
        name = load_folder(policy, folder, "pay", "round1", digest)
    assert loaded == [first, second]
    assert policy.identity(name).adapter == second


def test_the_fingerprint_is_taken_on_the_end_of_the_probe_and_the_adapters_own_answer(
    tiny_model: Any, tmp_path: Path
) -> None:
    policy, renderer = tiny_model
    folder, digest = made(policy, tmp_path / "strong", size=2.0)
    name = load_folder(policy, folder, "pay", "round1", digest)
    for words, whole in (("order 314", True), ("order 314 " * 300, False)):
        probe = renderer.start(Prompt("Answer."), [Message("user", words)])
        assert (len(probe.ids) + ANSWER_TOKENS <= policy.context) == whole
        taken = fingerprint_on(policy, probe, name)
        kept = probe.ids[-(policy.context - ANSWER_TOKENS) :]
        (answer,) = policy.generate([Request("again", kept, Sampling(0.0, ANSWER_TOKENS), name)])
        assert taken.ids == (*kept, *answer.ids)[-LONGEST:]
        assert prove(policy, taken, name).apart < 1e-3
    still, digest = made(policy, tmp_path / "zero", size=0.0)
    with pytest.raises(AdapterError, match="not live"):
        fingerprint_on(policy, probe, load_folder(policy, still, "ask", "round1", digest))


def test_a_closed_policy_has_nothing_in_flight_and_can_be_used_again(tiny_model: Any, tmp_path: Path) -> None:
    policy, _ = tiny_model
    folder, digest = made(policy, tmp_path / "one")
    load_folder(policy, folder, "pay", "round1", digest)
    turns = [Request(f"s{i}", [5, 6, 7 + i], Sampling(0.0, 4)) for i in range(policy.rows + 2)]
    wanted = policy.generate(turns)
    for turn in turns:
        policy.submit(turn)
    policy.step()
    policy.close()
    assert (policy.busy, policy.poll(), policy.adapters) == (False, [], (f"pay@{digest[:8]}",))
    assert policy.generate(turns) == wanted
