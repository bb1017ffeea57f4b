"""Token ids, masks and log-probabilities as compressed bytes, and back, bit for bit.

Form: 4 bytes tag, 4 bytes count (little-endian), then zlib of the values. The bytes of 4-byte values are stored plane
by plane (all lowest bytes first), because the high bytes of token ids are nearly constant. No pickle anywhere.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from errors import StoreError

_HEADER = struct.Struct("<4sI")
_IDS, _MASK, _LOGPROBS = b"ids1", b"msk1", b"lgp1"


def encode_ids(ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Token ids [T] as bytes; `StoreError` when one does not fit int32."""
    wide = np.asarray(ids)
    if wide.size == 0:
        wide = wide.astype(np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise StoreError(f"token ids must be one row of integers, not {wide.dtype} of shape {wide.shape}")
    limits = np.iinfo(np.int32)
    if wide.size and (wide.min() < limits.min or wide.max() > limits.max):
        raise StoreError(f"token ids must fit int32; got {wide.min()} to {wide.max()}")
    return _pack(_IDS, wide.astype("<i4"))


def decode_ids(blob: bytes) -> NDArray[np.int32]:
    """Token ids [T] int32 from `encode_ids`."""
    return _unpack(_IDS, blob, "<i4").astype(np.int32)


def encode_logprobs(logprobs: Sequence[float] | NDArray[np.floating]) -> bytes:
    """Log-probabilities [T] as bytes, rounded to float32."""
    values = np.asarray(logprobs, dtype="<f4")
    if values.ndim != 1:
        raise StoreError(f"log-probabilities must be one row, not of shape {values.shape}")
    return _pack(_LOGPROBS, values)


def decode_logprobs(blob: bytes) -> NDArray[np.float32]:
    """Log-probabilities [T] float32 from `encode_logprobs`."""
    return _unpack(_LOGPROBS, blob, "<f4").astype(np.float32)


def encode_mask(mask: Sequence[bool] | NDArray[np.bool_]) -> bytes:
    """A mask [T] as bytes, one bit each."""
    bits = np.asarray(mask, dtype=bool)
    if bits.ndim != 1:
        raise StoreError(f"a mask must be one row, not of shape {bits.shape}")
    return _HEADER.pack(_MASK, bits.size) + zlib.compress(np.packbits(bits).tobytes(), 1)


def decode_mask(blob: bytes) -> NDArray[np.bool_]:
    """A mask [T] bool from `encode_mask`."""
    count, data = _open(_MASK, blob, lambda n: (n + 7) // 8)
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)


def _pack(tag: bytes, values: NDArray[np.generic]) -> bytes:
    planes = values.view(np.uint8).reshape(-1, 4).T if values.size else np.zeros((4, 0), np.uint8)
    return _HEADER.pack(tag, values.size) + zlib.compress(np.ascontiguousarray(planes).tobytes(), 1)


def _unpack(tag: bytes, blob: bytes, dtype: str) -> NDArray[np.generic]:
    count, data = _open(tag, blob, lambda n: 4 * n)
    planes = np.frombuffer(data, np.uint8).reshape(4, count)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(count)


def _open(tag: bytes, blob: bytes, size_of: Callable[[int], int]) -> tuple[int, bytes]:
    """Count and plain bytes; zlib's own checksum finds damage, and the size is bounded before anything is inflated."""
    if len(blob) < _HEADER.size or blob[:4] != tag:
        raise StoreError(f"stored array starts with {bytes(blob[:4])!r} where {tag!r} belongs; the row is damaged")
    count = _HEADER.unpack_from(blob)[1]
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(blob[_HEADER.size :], size_of(count) + 1)
    except zlib.error as error:
        raise StoreError(f"stored array of {count} values cannot be inflated ({error}); the row is damaged") from error
    if len(data) != size_of(count) or not inflater.eof or inflater.unused_data:
        raise StoreError(f"stored array should hold {count} values and does not; the row is damaged")
    return count, data
