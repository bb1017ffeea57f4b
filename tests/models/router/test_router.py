"""The router's decisions, on vectors made for the purpose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from errors import ConfigurationError, StoreError
from models.router.first_observation import LAYERS, layer_range
from models.router.label_prompt import Candidate, label_prompt
from models.router.router import SURER, RouteDecision, Router
from models.router.validation import accuracy, confusion


def clusters(per_class: int, seed: int, noise: float = 0.3) -> tuple[np.ndarray, list[str]]:
    """Vectors (3 * per_class, 16) around three directions, far from the origin, and their classes."""
    rng = np.random.default_rng(seed)
    labels = [name for name in ("refund", "move", "") for _ in range(per_class)]
    directions = {"refund": np.eye(16)[0], "move": np.eye(16)[1], "": np.eye(16)[2]}
    rows = np.stack([20 + directions[label] * 2 + noise * rng.normal(size=16) for label in labels])
    return rows.astype(np.float32), labels


def fitted(per_class: int = 20, noise: float = 0.3) -> Router:
    rows, labels = clusters(per_class, 0, noise)
    return Router.fit(rows, labels, [f"t{i}" for i in range(len(labels))])


def test_unseen_vectors_get_their_class_and_neighbours_of_it() -> None:
    router = fitted()
    rows, truth = clusters(30, 1)
    decisions = router.decide(rows)
    assert accuracy(decisions, truth) > 0.95
    assert router.classes == ("move", "refund", "")
    for decision in decisions:
        assert sum(decision.probabilities.values()) == pytest.approx(1)
        assert set(decision.probabilities) == {"move", "refund", ""}
        assert min(decision.probabilities.values()) > 0
        assert len(decision.neighbours) == 5
        assert decision.mode == "retrieval"
    label_of = dict(zip(router.ids, router.labels, strict=True))
    sure = next(d for d in decisions if max(d.probabilities.values()) > 0.99)
    assert {label_of[i] for i in sure.neighbours} == {sure.capability}


def test_centring_is_what_separates_vectors_far_from_the_origin() -> None:
    """Without it all cosines are nearly 1; with it a constant added to all rows changes nothing."""
    rows, labels = clusters(20, 0)
    fresh, _ = clusters(10, 1)
    near = Router.fit(rows - 20, labels, labels).decide(fresh - 20)
    far = Router.fit(rows + 100, labels, labels).decide(fresh + 100)
    assert [d.capability for d in near] == [d.capability for d in far]


def test_a_family_that_always_opens_alike_is_not_taken_for_unknown() -> None:
    """Its rows are one vector, which another batch computes a little otherwise."""
    one, other = np.eye(2, 8, dtype=np.float32) + 3
    router = Router.fit(np.stack([one] * 6 + [other] * 6), ["a"] * 6 + ["b"] * 6, [str(i) for i in range(12)])
    noise = np.random.default_rng(0).normal(0, 0.02, (50, 8)).astype(np.float32)
    assert {d.capability for d in router.decide(one + noise)} == {"a"}
    assert {d.capability for d in router.decide(other + noise)} == {"b"}
    across = np.eye(8, dtype=np.float32)[5:6] * 4 + 3  # a direction that neither has
    assert {d.capability for d in router.decide(across)} == {""}


def test_what_is_unlike_all_has_its_own_answer(tmp_path: Path) -> None:
    """It is no neighbour's, whatever the votes say, and no blend of theirs; all else is decided as before."""
    plain = fitted()
    router = replace(plain, unlike="move")
    rows, _ = clusters(10, 1, noise=0.1)
    strange = 20 - 9 * np.eye(16, dtype=np.float32)[[0, 7]]
    assert plain.novel(strange).all()
    assert not plain.novel(rows).any()
    assert [d.capability for d in plain.decide(strange)] == ["", ""]
    decided = router.decide(strange)
    assert [d.capability for d in decided] == ["move", "move"]
    for name in ("refund", "move", ""):
        assert [d.mixture(0.9) for d in replace(plain, unlike=name).decide(strange)] == [{name: 1.0}] * 2
    assert [d.capability for d in router.decide(rows)] == [d.capability for d in plain.decide(rows)]
    router.save(tmp_path)
    assert Router.load(tmp_path).unlike == "move"
    assert router.version != plain.version


def test_a_regression_decides_on_what_is_unlike_all_where_an_adapter_is_proven_there() -> None:
    """The base has it where none is; and it is said to be unlike, and blended with nothing, either way."""
    rows, labels = clusters(20, 0, 0.3)
    plain = fitted()
    successes = np.array([[float(label == name) for name in plain.classes] for label in labels])
    linear, _ = plain.expecting(rows, successes)
    moves = rows[[label == "move" for label in labels]].mean(axis=0)
    strange = moves + 9 * np.eye(16, dtype=np.float32)[[3, 6]]
    decided = replace(linear, unlike="refund").decide(strange)
    assert [(d.capability, d.unlike, d.mixture(0.9)) for d in decided] == [("move", True, {"move": 1.0})] * 2
    assert [d.capability for d in linear.decide(strange)] == ["", ""]
    assert [d.capability for d in replace(plain, unlike="refund").decide(strange)] == ["refund", "refund"]
    # Who is hardly more probable than the one that is proven there does not take its place, but for what is not unlike.
    flat = replace(linear, unlike="refund", sharpness=0.01)
    assert max(d.probabilities["move"] / d.probabilities["refund"] for d in flat.decide(strange)) < SURER
    assert [(d.capability, d.unlike) for d in flat.decide(strange)] == [("refund", True)] * 2
    known = rows[~linear.novel(rows)]
    assert {d.capability for d in flat.decide(known)} == {"", "move", "refund"}
    assert [d.capability for d in flat.decide(known)] == [d.capability for d in linear.decide(known)]


def test_rows_that_are_insisted_on_outvote_what_lies_around_them(tmp_path: Path) -> None:
    """Four rows of the base amid twenty of an adapter: their like are the base's, and what lies elsewhere stays."""
    rng = np.random.default_rng(0)
    near = np.eye(16)[0] * 2 + 0.3 * rng.normal(size=(32, 16))
    mine = near[:8] + 0.15 * np.eye(16)[5]
    rows, labels = clusters(20, 1)
    labels = [*("" if i < 4 else "refund" for i in range(24)), *labels]
    vectors = np.concatenate([mine[:4] + 20, near[12:] + 20, rows])
    ids = [f"t{i}" for i in range(len(labels))]
    plain = Router.fit(vectors, labels, ids, 15)
    fresh, elsewhere = mine[4:] + 20, clusters(10, 2)[0][10:]
    assert "refund" in {d.capability for d in plain.decide(fresh)}
    firm = plain.insisting(ids[:4])
    assert {d.capability for d in firm.decide(fresh)} == {""}
    assert [d.capability for d in firm.decide(elsewhere)] == [d.capability for d in plain.decide(elsewhere)]
    assert set(firm.weights[4:]) == {1.0}
    assert firm.version != plain.version == plain.insisting(["unknown"]).version
    firm.save(tmp_path)
    loaded = Router.load(tmp_path)
    assert loaded.weights == firm.weights
    assert {d.capability for d in loaded.decide(fresh)} == {""}


def test_the_nearest_of_a_mixed_neighbourhood_weighs_most() -> None:
    rows = np.array([[1, 0], [0.9, 0.1], [0, 1], [-1, 0], [-0.9, -0.1], [0, -1]], dtype=np.float32)
    router = Router.fit(rows, ["a", "a", "b", "", "", "b"], list("uvwxyz"), neighbours=3)
    decision = router.decide(np.array([[2.0, 0.1]]))[0]
    assert decision.capability == "a"
    assert set(decision.neighbours) == {"u", "v", "w"}
    assert decision.probabilities["a"] > decision.probabilities["b"] > decision.probabilities[""]


def test_a_noisy_bank_gets_less_sure_votes() -> None:
    clear, noisy = fitted(noise=0.1), fitted(noise=2.5)
    assert clear.temperature <= noisy.temperature
    rows, _ = clusters(20, 3, noise=2.5)
    assert np.mean([max(d.probabilities.values()) for d in noisy.decide(rows)]) < 0.95


def test_both_multiplies_and_label_alone_ignores_the_vectors() -> None:
    router = fitted()
    rows, _ = clusters(1, 1)
    label = np.array([[0.98, 0.01, 0.01]] * 3)
    voted = router.decide(rows)
    for before, both in zip(voted, router.with_mode("both").decide(rows, label), strict=True):
        product = np.array([before.probabilities[c] for c in router.classes]) * label[0]
        assert [both.probabilities[c] for c in router.classes] == pytest.approx(list(product / product.sum()))
    alone = router.with_mode("label").decide(None, label)
    assert {d.capability for d in alone} == {"move"}
    assert alone[0].neighbours == ()


def test_fixed_and_off_need_no_vectors() -> None:
    assert [d.capability for d in Router.always("refund").decide(count=2)] == ["refund", "refund"]
    off = Router.always().decide(count=1)[0]
    assert (off.capability, off.mode, off.probabilities) == ("", "off", {"": 1.0})


def test_mixture_is_the_smallest_set_above_p() -> None:
    decision = RouteDecision("a", {"a": 0.5, "b": 0.3, "": 0.2}, (), 0.0, "retrieval")
    assert decision.mixture(0.0) == {"a": 1.0}
    assert decision.mixture(0.5) == pytest.approx({"a": 0.625, "b": 0.375})
    assert decision.mixture(0.9) == pytest.approx({"a": 0.5, "b": 0.3, "": 0.2})
    assert RouteDecision("", {"a": 0.4, "": 0.6}, (), 0.0, "retrieval").mixture(0.9) == {"": 1.0}
    with pytest.raises(ConfigurationError, match=r"p is 1\.0"):
        decision.mixture(1.0)


def test_saved_router_comes_back_the_same(tmp_path: Path) -> None:
    router = fitted().described([Candidate("move", "send elsewhere", "Move order 1.")])
    version = router.save(tmp_path)
    loaded = Router.load(tmp_path)
    assert loaded.version == version == router.version
    rows, _ = clusters(5, 2)
    assert [d.probabilities for d in loaded.decide(rows)] == [d.probabilities for d in router.decide(rows)]
    assert loaded.candidates == router.candidates
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert router.with_mode("both").version != version
    assert Router.fit(router.vectors, router.labels, router.ids).version != version


def test_changed_or_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        Router.load(tmp_path)
    fitted().save(tmp_path)
    fields = json.loads((tmp_path / "router.json").read_text())
    (tmp_path / "router.json").write_text(json.dumps(fields | {"neighbours": 1}))
    with pytest.raises(StoreError, match="was saved"):
        Router.load(tmp_path)
    (tmp_path / "router.safetensors").write_bytes(b"cut off")
    with pytest.raises(StoreError, match="cannot be read"):
        Router.load(tmp_path)


@pytest.mark.parametrize(
    ("rows", "labels", "match"),
    [
        (np.zeros((2, 3)), ["a"], "one of each"),
        (np.zeros((1, 3)), ["a"], "at least 2 rows"),
        (np.array([[1.0, np.nan], [0.0, 1.0]]), ["a", "b"], "not finite"),
    ],
)
def test_bad_training_rows_are_refused(rows: np.ndarray, labels: list[str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Router.fit(rows, labels, [str(i) for i in range(len(rows))])


def test_wrong_use_is_refused() -> None:
    router = fitted()
    with pytest.raises(ConfigurationError, match="same base model"):
        router.decide(np.zeros((1, 4)))
    with pytest.raises(ConfigurationError, match="does not exist"):
        router.with_mode("nearest")
    with pytest.raises(ConfigurationError, match="needs label probabilities"):
        router.with_mode("both").decide(np.zeros((1, 16)))
    with pytest.raises(ConfigurationError, match="has no training row"):
        router.described([Candidate("cancel")])


def test_confusion_counts_true_by_row_and_decided_by_column() -> None:
    decisions = [RouteDecision(c, {c: 1.0}, (), 0.0, "retrieval") for c in ("a", "", "a", "b")]
    labels, counts = confusion(decisions, ["a", "a", "a", ""])
    assert labels == ("a", "b", "")
    assert counts.tolist() == [[2, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert accuracy(decisions, ["a", "a", "a", ""]) == 0.5
    with pytest.raises(ConfigurationError, match="at least one"):
        accuracy([], [])


def test_layers_adapt_to_the_depth() -> None:
    assert layer_range(30) == LAYERS
    assert layer_range(30, (4, 12)) == layer_range(60, (4, 12)) == (4, 12)
    assert layer_range(12, (4, 12)) == (2, 5)
    assert layer_range(1, (4, 12)) == (1, 1)
    with pytest.raises(ConfigurationError, match="no range"):
        layer_range(30, (5, 4))


def test_label_prompt_names_every_candidate() -> None:
    text = label_prompt([Candidate("refund_payment", "money back", "Refund 1."), Candidate("")])
    assert "A: refund payment: money back" in text
    assert "B: anything else" in text
    assert "Request: Refund 1.\nKind: A" in text
