"""Arrays as compressed bytes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from db.values.blobs import decode_ids, decode_logprobs, decode_mask, encode_ids, encode_logprobs, encode_mask
from errors import StoreError

# No deadline: a busy machine is not a wrong result.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PAIRS = ((encode_ids, decode_ids), (encode_logprobs, decode_logprobs), (encode_mask, decode_mask))


@quick
@given(hnp.arrays(np.int32, st.integers(0, 300)))
def test_ids_round_trip(ids: np.ndarray) -> None:
    assert np.array_equal(decode_ids(encode_ids(ids)), ids)
    assert np.array_equal(decode_ids(encode_ids(ids.tolist())), ids)


@quick
@given(hnp.arrays(np.float32, st.integers(0, 300)))
def test_logprobs_round_trip_bit_for_bit(values: np.ndarray) -> None:
    assert decode_logprobs(encode_logprobs(values)).tobytes() == values.tobytes()


@quick
@given(hnp.arrays(np.bool_, st.integers(0, 300)))
def test_masks_round_trip(mask: np.ndarray) -> None:
    decoded = decode_mask(encode_mask(mask))
    assert decoded.dtype == bool
    assert np.array_equal(decoded, mask)


@quick
@given(st.binary(max_size=60))
def test_foreign_bytes_are_refused(blob: bytes) -> None:
    for decode in (decode_ids, decode_logprobs, decode_mask):
        with pytest.raises(StoreError, match="damaged"):
            decode(blob)


@quick
@given(hnp.arrays(np.int32, st.integers(1, 50)), st.data())
def test_damage_is_found(ids: np.ndarray, data: st.DataObject) -> None:
    for encode, decode in PAIRS:
        blob = encode(ids)
        where = data.draw(st.integers(0, len(blob) - 1))
        damaged = blob[:where] + bytes([blob[where] ^ data.draw(st.integers(1, 255))]) + blob[where + 1 :]
        for wrong in (damaged, blob[:where], blob + b"x"):
            with pytest.raises(StoreError, match="damaged"):
                decode(wrong)


def test_nothing_is_unpickled_and_kinds_are_not_mixed_up() -> None:
    with pytest.raises(StoreError, match="damaged"):
        decode_ids(pickle.dumps([1, 2]))
    with pytest.raises(StoreError, match="ids1"):
        decode_ids(encode_logprobs([0.5]))


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [0.5], [[1, 2]], ["1"], [True]])
def test_what_is_no_row_of_int32_is_refused(ids: list) -> None:
    with pytest.raises(StoreError, match="token ids must"):
        encode_ids(ids)


def test_arrays_take_little_room() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 2000, dtype=np.int32)
    assert len(encode_ids(ids)) < 2.2 * len(ids)
    logprobs = np.where(np.arange(2000) % 4 == 0, -0.5, 0.0)
    assert len(encode_logprobs(logprobs)) < 1.2 * len(logprobs)
