"""Buckets find the row of a key: open addressing with linear probing, whole batches at a time.

A bucket is 0 where it was never used, -1 where its row went, and otherwise the row's number plus one.
Whatever the buckets hold, a row that is found lies within the table and has the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import StoreError
from kvlinker.keys import OBJECT_KEY_BYTES

__all__ = [
    "ABSENT",
    "KEY_WORDS",
    "bucket_count",
    "distinct",
    "find_rows",
    "insert_rows",
    "key_hashes",
    "key_words",
    "remove_rows",
]

ABSENT = -1
KEY_WORDS = OBJECT_KEY_BYTES // 8

_MIN_BUCKETS = 1024
_PROBES = 512
"""Buckets that are looked at for one key: at most half of them are in use, and hashes are even."""
_WINDOWS = (7, 24, 96, 384)
"""How many of them are looked at together behind the first: where objects come and go, some keys have long ways."""
_EMPTY, _GONE = 0, -1
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93],
    dtype=np.uint64,
)
_SHIFT = np.uint64(32)

_N = TypeVar("_N", np.int64, np.uint64)
Keys = NDArray[np.uint64]
"""[keys, 4]"""


def bucket_count(rows: int) -> int:
    """Return how many buckets so many rows need: a power of two, at least twice as many."""
    return max(_MIN_BUCKETS, 1 << (2 * rows - 1).bit_length()) if rows else _MIN_BUCKETS


def key_words(keys: Sequence[bytes]) -> Keys:
    """Return keys of the right length as words."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), KEY_WORDS)


def key_hashes(keys: Keys) -> NDArray[np.uint64]:
    """Return an even hash of each key."""
    mixed = (keys * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> _SHIFT
    mixed *= _FACTORS[0]
    return np.asarray(mixed ^ (mixed >> _SHIFT), dtype=np.uint64)


def _starts(buckets: NDArray[np.int32], keys: Keys) -> IndexArray:
    return (key_hashes(keys) & np.uint64(len(buckets) - 1)).astype(np.int64)


def distinct(numbers: NDArray[_N]) -> NDArray[_N]:
    """Return each number once, ascending; by sorting, for np.unique hashes and is far slower."""
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return np.asarray(ordered[is_first], dtype=numbers.dtype)


def find_rows(buckets: NDArray[np.int32], table: Keys, keys: Keys) -> IndexArray:
    """Return the row of each key; ABSENT where there is none.

    Args:
        buckets: where to look.
        table: [rows, 4] the key of each row.
        keys: what to look for.
    """
    at, limit = _starts(buckets, keys), len(buckets) - 1
    rows = buckets[at].astype(np.int64) - 1
    goes_on = rows != _EMPTY - 1
    at_row = np.flatnonzero((rows >= 0) & (rows < len(table)))
    hits = at_row[np.all(table[rows[at_row]] == keys[at_row], axis=1)]
    found = np.full(len(keys), ABSENT, dtype=np.int64)
    found[hits] = rows[hits]
    goes_on[hits] = False
    left, at = np.flatnonzero(goes_on), at + 1
    for width in _WINDOWS:
        if not len(left):
            break
        window = (at[left][:, None] + np.arange(width)) & limit
        goes_on = _look_into(buckets[window], table, keys, left, found)
        left, at = left[goes_on], at + width
    return found


def _look_into(
    entries: NDArray[np.int32], table: Keys, keys: Keys, left: IndexArray, found: IndexArray
) -> NDArray[np.bool_]:
    """Note the rows of those keys that a window has; return which must look further: [left].

    Args:
        entries: [left, width] the next buckets of each key.
        table: [rows, 4] the key of each row.
        keys: all.
        left: which of them are looked for.
        found: [keys] gets the rows.
    """
    is_reached = np.logical_and.accumulate(entries != _EMPTY, axis=1)  # nobody looks past it
    asked, place = np.nonzero(is_reached & (entries > _EMPTY) & (entries <= len(table)))
    rows = entries[asked, place].astype(np.int64) - 1
    same = np.flatnonzero(table[rows, 0] == keys[left[asked], 0])
    same = same[np.all(table[rows[same]] == keys[left[asked[same]]], axis=1)]
    found[left[asked[same]]] = rows[same]
    goes_on = is_reached[:, -1]
    goes_on[asked[same]] = False
    return np.asarray(goes_on, dtype=np.bool_)


def insert_rows(buckets: NDArray[np.int32], keys: Keys, rows: IndexArray) -> int:
    """Enter rows under keys that find nothing yet, each once; return how many unused buckets that took.

    Raises:
        StoreError: the buckets are too full.
    """
    at, limit, used = _starts(buckets, keys), len(buckets) - 1, 0
    for _ in range(_PROBES):
        if not len(rows):
            return used
        before = buckets[at]
        tried = np.flatnonzero(before <= _EMPTY)
        buckets[at[tried]] = rows[tried] + 1
        won = tried[buckets[at[tried]] == rows[tried] + 1]  # several may have tried the same one
        used += int(np.count_nonzero(before[won] == _EMPTY))
        lost = np.ones(len(rows), dtype=np.bool_)
        lost[won] = False
        rows, at = rows[lost], (at[lost] + 1) & limit
    if len(rows):
        msg = (
            f"the index has no bucket left for {len(rows)} objects among {len(buckets)}; close the store everywhere, "
            f"and it is made again at the next opening"
        )
        raise StoreError(msg)
    return used


def remove_rows(buckets: NDArray[np.int32], keys: Keys, rows: IndexArray) -> int:
    """Let keys find rows no longer; return how many buckets are unused again."""
    at, limit = _starts(buckets, keys), len(buckets) - 1
    freed = 0
    for _ in range(_PROBES):
        if not len(rows):
            break
        entries = buckets[at]
        hits = at[entries == rows + 1]
        buckets[hits] = _GONE
        # Nobody looks past an unused bucket, so that one before it need not be kept.
        ends = hits[buckets[(hits + 1) & limit] == _EMPTY]
        buckets[ends] = _EMPTY
        freed += len(ends)
        goes_on = (entries != rows + 1) & (entries != _EMPTY)
        rows, at = rows[goes_on], (at[goes_on] + 1) & limit
    return freed
