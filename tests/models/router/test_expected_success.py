"""Expected success, linear in where a task lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from errors import ConfigurationError
from models.router.regression import SHARPNESS, expect, share_right, sharpness
from models.router.router import Router


def made(count: int, seed: int = 0, noise: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Vectors (n, 24) far from the origin, and the success of two classes, of which a direction says one."""
    rng = np.random.default_rng(seed)
    vectors = 50 + rng.normal(size=(count, 24)) * np.geomspace(0.1, 10, 24)
    first = vectors[:, 3] - 50 + noise * rng.normal(size=count) * 0.2 > 0
    return vectors.astype(np.float32), np.stack([first, ~first], axis=1).astype(float)


def test_a_row_left_out_is_expected_as_by_a_fit_without_it() -> None:
    vectors, successes = made(30)
    successes[4, 1] = np.nan
    weights = [1.0 + i % 3 for i in range(30)]
    whole = expect(vectors, successes, weights)
    assert np.isnan(whole.left_out[4, 1])
    assert np.isfinite(np.delete(whole.left_out, 4, axis=0)).all()
    # The same penalty and the same scaling, without row 7.
    mean, spread = vectors.mean(axis=0), vectors.std(axis=0)
    rows = (vectors - mean).astype(float) / (spread * np.sqrt(24))
    at = [i for i in range(30) if i != 7]
    kernel = rows[at] @ rows[at].T + 1 + whole.penalty * np.diag([1 / weights[i] for i in at])
    without = np.linalg.solve(kernel, successes[at, 0]) @ (rows[at] @ rows[7] + 1)
    assert whole.left_out[7, 0] == pytest.approx(without, abs=1e-9)


def test_slopes_and_offsets_are_for_vectors_as_they_come() -> None:
    vectors, successes = made(200)
    fresh, truth = made(200, seed=1)
    found = expect(vectors, successes)
    expected = fresh @ found.slopes + found.offsets
    assert (expected.argmax(axis=1) == truth.argmax(axis=1)).mean() > 0.85
    count, right = share_right(found.left_out, successes)
    assert count == 200
    assert right == pytest.approx((expected.argmax(axis=1) == truth.argmax(axis=1)).mean(), abs=0.1)


def test_a_row_that_counts_many_times_pulls_what_lies_near_it() -> None:
    vectors, successes = made(60)
    odd = int(np.argmax(vectors[:, 3]))
    successes[odd] = 1 - successes[odd]
    plain, firm = (
        expect(vectors, successes),
        expect(vectors, successes, [500.0 if i == odd else 1.0 for i in range(60)]),
    )
    at = vectors[odd : odd + 1]
    assert (at @ plain.slopes + plain.offsets).argmax() == 0
    assert (at @ firm.slopes + firm.offsets).argmax() == 1


def test_a_direction_without_spread_says_nothing() -> None:
    vectors, successes = made(40)
    vectors[:, 5] = 7.0
    found = expect(vectors, successes)
    assert np.isfinite(found.slopes).all()
    assert not found.slopes[5].any()


def test_a_class_that_has_not_played_is_refused() -> None:
    vectors, successes = made(10)
    successes[1:, 1] = np.nan
    with pytest.raises(ConfigurationError, match=r"\[10, 1\] rows"):
        expect(vectors, successes)


def test_only_tasks_that_tell_classes_apart_say_how_sure_to_be() -> None:
    alike = np.ones((4, 2))
    assert sharpness(np.zeros((4, 2)), alike) == SHARPNESS[0]
    assert share_right(np.zeros((4, 2)), 0 * alike) == (0, None)
    vectors, successes = made(100)
    clear = sharpness(expect(vectors, successes).left_out, successes)
    noisy = sharpness(expect(vectors, made(100, seed=3)[1]).left_out, made(100, seed=3)[1])
    assert clear > noisy


def test_a_linear_router_is_saved_with_all_that_it_decides_by(tmp_path: Path) -> None:
    vectors, successes = made(80)
    labels = ["a" if first else "" for first in successes[:, 0]]
    voting = Router.fit(vectors, labels, [str(i) for i in range(80)])
    router, left_out = voting.expecting(vectors, successes)
    assert (router.mode, left_out.shape) == ("linear", (80, 2))
    assert router.version == router.save(tmp_path) != voting.version
    loaded, (fresh, truth) = Router.load(tmp_path), made(50, seed=2)
    decided = loaded.decide(fresh)
    assert [d.probabilities for d in decided] == [d.probabilities for d in router.decide(fresh)]
    assert np.mean([(d.capability == "a") == t for d, t in zip(decided, truth[:, 0] == 1, strict=True)]) > 0.8
    assert all(len(d.neighbours) == 5 and sum(d.probabilities.values()) == pytest.approx(1) for d in decided)
    with pytest.raises(ConfigurationError, match="take retrieval, or fit it"):
        voting.with_mode("linear")
