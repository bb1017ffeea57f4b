"""Token ids, masks and log-probabilities as small bytes, and back, bit for bit. No pickle anywhere.

Form: 4 bytes tag, count, and CRC-32 of count and values (little-endian), then the values:
ids   zlib of the byte planes, lowest first, without the high planes that are zero (of most vocabularies: two of four);
mask  one bit each;
log-probabilities  one bit each for "not 0.0", then the others as float32: most tokens are not sampled and have 0.0,
and the digits of the others are noise that no compressor makes smaller.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from errors import StoreError

_HEADER = struct.Struct("<4sII")
_IDS, _MASK, _LOGPROBS = b"ids1", b"msk1", b"lgp1"


def encode_ids(ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Token ids [T] as bytes; `StoreError` when one does not fit int32."""
    wide = np.asarray(ids)
    if wide.size == 0:
        wide = wide.astype(np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise StoreError(f"token ids must be one row of integers, not {wide.dtype} of shape {wide.shape}")
    low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
    limits = np.iinfo(np.int32)
    if low < limits.min or high > limits.max:
        raise StoreError(f"token ids must fit int32; got {low} to {high}")
    planes = 4 if low < 0 else max(1, (high.bit_length() + 7) // 8)
    columns = wide.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :planes]
    return _seal(_IDS, wide.size, bytes([planes]) + zlib.compress(columns.T.tobytes(), 1))


def decode_ids(blob: bytes) -> NDArray[np.int32]:
    """Token ids [T] int32 from `encode_ids`."""
    count, body = _open(_IDS, blob)
    planes = body[0] if body else 0
    try:
        # The size is bounded before anything is inflated.
        data = zlib.decompressobj().decompress(body[1:], count * planes + 1)
    except zlib.error as error:
        raise _damaged(_IDS, count) from error
    if planes not in (1, 2, 3, 4) or len(data) != count * planes:
        raise _damaged(_IDS, count)
    columns = np.zeros((count, 4), np.uint8)
    columns[:, :planes] = np.frombuffer(data, np.uint8).reshape(planes, count).T
    return columns.view("<i4").reshape(count).astype(np.int32)


def encode_mask(mask: Sequence[bool] | NDArray[np.bool_]) -> bytes:
    """A mask [T] as bytes."""
    bits = np.asarray(mask, dtype=bool)
    if bits.ndim != 1:
        raise StoreError(f"a mask must be one row, not of shape {bits.shape}")
    return _seal(_MASK, bits.size, np.packbits(bits).tobytes())


def decode_mask(blob: bytes) -> NDArray[np.bool_]:
    """A mask [T] bool from `encode_mask`."""
    count, body = _open(_MASK, blob)
    if len(body) != (count + 7) // 8:
        raise _damaged(_MASK, count)
    return np.unpackbits(np.frombuffer(body, np.uint8), count=count).astype(bool)


def encode_logprobs(logprobs: Sequence[float] | NDArray[np.floating]) -> bytes:
    """Log-probabilities [T] as bytes, rounded to float32."""
    values = np.asarray(logprobs, dtype="<f4")
    if values.ndim != 1:
        raise StoreError(f"log-probabilities must be one row, not of shape {values.shape}")
    # By bits, so that -0.0 and NaN come back as they were.
    words = np.ascontiguousarray(values).view("<u4")
    present = words != 0
    return _seal(_LOGPROBS, words.size, np.packbits(present).tobytes() + words[present].tobytes())


def decode_logprobs(blob: bytes) -> NDArray[np.float32]:
    """Log-probabilities [T] float32 from `encode_logprobs`."""
    count, body = _open(_LOGPROBS, blob)
    bits = (count + 7) // 8
    if len(body) < bits:
        raise _damaged(_LOGPROBS, count)
    present = np.unpackbits(np.frombuffer(body[:bits], np.uint8), count=count).astype(bool)
    if len(body) != bits + 4 * int(present.sum()):
        raise _damaged(_LOGPROBS, count)
    words = np.zeros(count, "<u4")
    words[present] = np.frombuffer(body[bits:], "<u4")
    return words.view("<f4").astype(np.float32)


def _seal(tag: bytes, count: int, body: bytes) -> bytes:
    return _HEADER.pack(tag, count, zlib.crc32(body, count)) + body


def _open(tag: bytes, blob: bytes) -> tuple[int, bytes]:
    if len(blob) < _HEADER.size or blob[:4] != tag:
        raise StoreError(f"stored array starts with {bytes(blob[:4])!r} where {tag!r} belongs; the row is damaged")
    _, count, checksum = _HEADER.unpack_from(blob)
    body = bytes(blob[_HEADER.size :])
    if zlib.crc32(body, count) != checksum:
        raise _damaged(tag, count)
    return count, body


def _damaged(tag: bytes, count: int) -> StoreError:
    return StoreError(
        f"stored array {tag!r} does not hold its {count} values; the row is damaged: restore the database"
    )
