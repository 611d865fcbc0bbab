"""What every mover has to do right: subclass MoverTests and give the mover; needs pytest."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlinker.frames import Checksum
from kvlinker.moving import Mover
from kvlinker.testing.verdicts import expect, fail

__all__ = ["MoverTests"]

_GAP = 64
"""Bytes between ranges that nobody may touch."""
_SHAPES = {
    "nothing": [],
    "an empty range": [0],
    "one byte": [1],
    "few short ones": [1, 2, 3, 5, 7, 63, 64, 65],
    "around a cache line": list(range(4090, 4110)),
    "many of a layer": [16_384] * 140,
    "odd ones": [41_983] * 61,
    "long ones": [160_000] * 41,
    "some alike": [8192, 8192, 4096, 8192, 8192, 8192, 4096] * 9,
    "one long one": [(3 << 20) + 13],
    "short beside long": [(1 << 20) + 1, 1, 100, 5000, 0, 70_001] * 3,
}
_UNTOUCHED = 0xA5
_SLANTS = (0, 17)
"""Where the first target begins, from a cache line on."""


class _Bench:
    """Ranges of random bytes, and room for their copies, with bytes between that have to stay."""

    def __init__(self, sizes: Sequence[int], *, slant: int) -> None:
        starts = np.concatenate([[0], np.cumsum([size + _GAP for size in sizes])]).astype(np.int64)
        whole = int(starts[-1]) + 2 * _GAP
        self.block = np.random.default_rng(whole).integers(0, 256, whole, dtype=np.uint8)
        self.room = np.full(whole + _GAP, _UNTOUCHED, dtype=np.uint8)
        self.sizes = np.array(sizes, dtype=np.int64)
        self.starts = starts[:-1]
        self.first = -self.room.ctypes.data % _GAP + slant
        # Backwards: nothing says that ranges lie in the order of their targets.
        self.sources = (self.block.ctypes.data + 1 + self.starts)[::-1].copy()
        self.targets = (self.room.ctypes.data + self.first + self.starts)[::-1].copy()
        self.backwards = self.sizes[::-1].copy()

    def source(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a range, in the order of the columns."""
        first = int(self.sources[number]) - self.block.ctypes.data
        return self.block[first : first + int(self.backwards[number])]

    def sums(self, checksum: Checksum) -> list[int]:
        """Return what the checksums have to be."""
        return [checksum(self.source(number).data) for number in range(len(self.sizes))]

    def check_room(self) -> None:
        """Fail unless the room is what a copy leaves behind."""
        wrong = np.flatnonzero(self.room != self.expected())
        if len(wrong):
            fail(f"{len(wrong)} bytes are wrong after a copy, the first one at {wrong[0]}")

    def expected(self) -> NDArray[np.uint8]:
        """Return what the room has to be after a copy."""
        room = np.full_like(self.room, _UNTOUCHED)
        for number, target in enumerate(self.targets.tolist()):
            first = target - self.room.ctypes.data
            room[first : first + int(self.backwards[number])] = self.source(number)
        return room


@pytest.mark.parametrize("slant", _SLANTS)
@pytest.mark.parametrize("shape", _SHAPES)
class MoverTests:
    """Give the fixtures `mover` and `checksum`."""

    @pytest.fixture
    def bench(self, shape: str, slant: int) -> _Bench:
        """Give ranges of one shape."""
        return _Bench(_SHAPES[shape], slant=slant)

    def test_every_byte_is_copied_and_no_other_is_touched(
        self, mover: Mover, bench: _Bench
    ) -> None:
        """Bytes between ranges stay as they were."""
        before = bench.block.copy()

        mover.move(bench.targets, bench.sources, bench.backwards)

        bench.check_room()
        if not np.array_equal(bench.block, before):
            fail("a copy changed its source")

    def test_copies_with_checksums_are_the_same_and_checksums_are_those_of_the_function(
        self, mover: Mover, bench: _Bench, checksum: Checksum
    ) -> None:
        """Sums stand in the order of the ranges."""
        sums = mover.move_and_sum(bench.targets, bench.sources, bench.backwards)

        bench.check_room()
        expect("the type of checksums", sums.dtype, np.dtype(np.uint64))
        expect("a copy with checksums", sums.tolist(), bench.sums(checksum))

    def test_checksums_alone_copy_nothing(
        self, mover: Mover, bench: _Bench, checksum: Checksum
    ) -> None:
        """They are read from where they lie."""
        sums = mover.sums(bench.sources, bench.backwards)

        expect("checksums", sums.tolist(), bench.sums(checksum))
        if (bench.room != _UNTOUCHED).any():
            fail("making checksums copied something")

    def test_columns_of_any_kind_are_taken(
        self, mover: Mover, bench: _Bench, checksum: Checksum
    ) -> None:
        """Views with strides, such as those of a broadcast, are columns too."""
        columns = np.stack([bench.targets, bench.sources, bench.backwards], axis=1)

        sums = mover.move_and_sum(columns[:, 0], columns[:, 1], columns[:, 2])

        bench.check_room()
        expect("a copy with checksums", sums.tolist(), bench.sums(checksum))

    def test_threads_that_copy_at_once_do_not_meet(
        self, mover: Mover, shape: str, slant: int, checksum: Checksum
    ) -> None:
        """Each has ranges of its own."""
        benches = [_Bench(_SHAPES[shape], slant=slant) for _ in range(4)]
        found: dict[int, list[int]] = {}

        def run(number: int) -> None:
            one = benches[number]
            found[number] = mover.move_and_sum(one.targets, one.sources, one.backwards).tolist()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(benches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for number, one in enumerate(benches):
            one.check_room()
            expect(f"thread {number}", found[number], one.sums(checksum))
