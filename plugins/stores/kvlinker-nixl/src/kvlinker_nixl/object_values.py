"""Values are objects of a bucket, whose bytes NIXL moves and whose lengths the catalog tells."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker.named_values import Beginning, Fetched, NamedValues, Range, parts_of
from kvlinker.store import ObjectKey
from kvlinker_nixl.agents import Memory, Operation
from kvlinker_nixl.blocks import Block
from kvlinker_nixl.moving import LateTransferError, Line, Target, descriptors
from kvlinker_nixl.object_catalog import ObjectCatalog

__all__ = ["ObjectValues"]

_TARGET = Target(memory=Memory.OBJECT)
_ENDLESS = 1 << 40
"""No object is so long: its registration is by name."""
_TRIES = 4
"""Of an object that others remove and write again meanwhile."""


class ObjectValues(NamedValues):
    """The objects of a store, through one of its lines."""

    def __init__(self, line: Line, catalog: ObjectCatalog) -> None:
        """Take a line that moves bytes, and a catalog that knows lengths."""
        self._line = line
        self._catalog = catalog

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._line.limits.call_bytes

    # ---- reading --------------------------------------------------------------------------------

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues."""
        for part in parts_of(len(keys), max(1, self.answer_bytes // size)):
            lengths = self._catalog.lengths(keys[part])
            there = [at for at, length in enumerate(lengths) if length]
            sizes = np.array([min(size, lengths[at] or 0) for at in there], dtype=np.int64)
            wanted = [keys[part][at] for at in there]
            with self._read(wanted, np.zeros(len(there), dtype=np.int64), sizes) as views:
                found = dict(zip(there, views, strict=True))
                yield [
                    (part.start + at, _beginning(found.get(at), length))
                    for at, length in enumerate(lengths)
                ]

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """See NamedValues."""
        for number, (start, size) in enumerate([*ranges, *expected]):
            for part in parts_of(len(keys), max(1, self.answer_bytes // size)):
                starts = np.full(part.stop - part.start, start, dtype=np.int64)
                sizes = np.full(part.stop - part.start, size, dtype=np.int64)
                with self._read(keys[part], starts, sizes) as views:
                    yield Fetched(range=number, numbers=range(part.start, part.stop), views=views)

    @contextmanager
    def _read(
        self, keys: Sequence[ObjectKey], starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Iterator[Sequence[memoryview | None]]:
        """Read a range of each object; None where one is gone or ends before."""
        ends = np.cumsum(sizes)
        places = ends - sizes
        with self._line.blocks.borrow(max(1, int(sizes.sum()))) as block:
            there = [True] * len(keys)
            try:
                self._move(Operation.READ, block, keys, places, (starts, sizes))
            except LateTransferError:
                raise
            except StoreError:
                # One of them may be gone, which fails all.
                there = [
                    self._is_read(
                        block, key, places[at : at + 1], (starts[at : at + 1], sizes[at : at + 1])
                    )
                    for at, key in enumerate(keys)
                ]
            yield [
                block.memory[place:end].data if is_there else None
                for is_there, place, end in zip(there, places.tolist(), ends.tolist(), strict=True)
            ]

    def _is_read(
        self,
        block: Block,
        key: ObjectKey,
        place: NDArray[np.int64],
        ranges: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> bool:
        """Read a range of one object; False where it is gone or ends before.

        Raises:
            StoreError: it is there and cannot be read, several times.
        """
        error: StoreError | None = None
        for _ in range(_TRIES):
            try:
                self._move(Operation.READ, block, [key], place, ranges)
            except LateTransferError:
                raise
            except StoreError as raised:
                error = raised
            else:
                return True
            length = self._catalog.lengths([key])[0] or 0
            if length < int(ranges[0][0] + ranges[1][0]):
                return False
        if error is not None:
            raise error
        return False

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self._catalog.remove(keys)

    # ---- writing --------------------------------------------------------------------------------

    def put(self, keys: Sequence[ObjectKey], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Write whole values, which replace what is there; each appears when all of it is there.

        Raises:
            StoreError: not all were written; nobody knows which.
        """
        size = rows[0].nbytes
        with self._line.blocks.borrow(size * len(rows)) as block:
            block.rows(len(rows), size)[:] = rows
            places = np.arange(len(rows), dtype=np.int64) * size
            whole = np.zeros_like(places), np.full_like(places, size)
            self._move(Operation.WRITE, block, keys, places, whole)

    def _move(
        self,
        operation: Operation,
        block: Block,
        keys: Sequence[ObjectKey],
        places: NDArray[np.int64],
        ranges: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> None:
        """Move a range of each object, (starts, sizes), from or to a place in a block."""
        if not len(keys):
            return
        starts, sizes = ranges
        numbers = self._line.numbers(len(keys))
        names = [
            (0, _ENDLESS, number, self._catalog.name_of(key))
            for number, key in zip(numbers, keys, strict=True)
        ]
        registration = self._line.agent.register(names, Memory.OBJECT)
        remote = descriptors(starts, sizes, 0)
        remote[:, 2] = numbers
        try:
            local = descriptors(block.address + places, sizes, 0)
            self._line.move(operation, local, remote, _TARGET, block=block)
        except LateTransferError:
            self._line.kept.append(registration)  # the transfer may still need the names
            raise
        except BaseException:
            registration.release()
            raise
        registration.release()


def _beginning(view: memoryview | None, length: int | None) -> Beginning | None:
    if length is None or (view is None and length):
        return None  # it went between two questions
    return Beginning(raw=view if view is not None else memoryview(b""), length=length)
