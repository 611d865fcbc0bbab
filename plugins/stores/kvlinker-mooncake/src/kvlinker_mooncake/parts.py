"""Parts of a plan: what one call of the client moves, of fewer buffers than its transport queues for a peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlinker.plans import LayerMetadata, TransferPlan

__all__ = ["MAX_BUFFERS", "CallPart", "buffers_of", "parts_of", "row_parts", "rows_of_call"]

MAX_BUFFERS = 960
"""The TCP transport queues 1024 transfers for a peer, and fails what is more, sometimes after a minute."""
_PIECE_BYTES = 256 << 10
"""Of one buffer of host memory: the segment sends one while another arrives; in one of 8 MB both take turns."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallPart:
    """Objects, or ranges of one, that are moved by one call; lists by position."""

    positions: list[int] = field(default_factory=list)
    """Which objects of the request or batch these are."""
    names: list[str] = field(default_factory=list)
    pointers: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    offsets: list[list[int]] = field(default_factory=list)
    """Of the bytes in the object."""
    expected: list[int] = field(default_factory=list)
    """Bytes that each object has to give."""
    owner: object = None
    """What keeps host memory alive that a call may still write into when nobody waits for it any more."""

    @property
    def buffers(self) -> int:
        """How many there are in all."""
        return sum(map(len, self.sizes))

    def add(self, position: int, name: str, ranges: tuple[list[int], list[int], list[int]]) -> None:
        """Add an object with pointers, sizes and offsets."""
        self.positions.append(position)
        self.names.append(name)
        for column, values in zip((self.pointers, self.sizes, self.offsets), ranges, strict=True):
            column.append(values)
        self.expected.append(sum(ranges[1]))


def rows_of_call(size: int, call_bytes: int) -> int:
    """Return how many objects of some bytes one call moves from or to rows of host memory."""
    pieces = len(_pieces(0, size)[0])
    return max(1, min(MAX_BUFFERS // pieces, call_bytes // size))


def row_parts(
    rows: Sequence[tuple[int, int]],
    names: Sequence[str],
    size: int,
    *,
    call_bytes: int,
    owner: object,
) -> Iterator[CallPart]:
    """Yield what moves whole objects from or to host memory, in order.

    Args:
        rows: position and address of each object to move.
        names: of all objects, by position.
        size: bytes of an object.
        call_bytes: see `parts_of`.
        owner: keeps the memory alive.
    """
    each = rows_of_call(size, call_bytes)
    for start in range(0, len(rows), each):
        part = CallPart(owner=owner)
        for position, address in rows[start : start + each]:
            part.add(position, names[position], _pieces(address, size))
        yield part


def _pieces(address: int, size: int) -> tuple[list[int], list[int], list[int]]:
    """Return pointers, sizes and offsets of the buffers that one object in host memory is moved in."""
    piece = max(_PIECE_BYTES, -(-size // MAX_BUFFERS))
    offsets = list(range(0, size, piece))
    sizes = [min(piece, size - offset) for offset in offsets]
    return [address + offset for offset in offsets], sizes, offsets


def buffers_of(plan: TransferPlan) -> int:
    """Return how many buffers an object of a plan is at most."""
    runs = np.bincount(plan.pages.page).max(initial=0)
    return int(runs) * len(plan.spans.base)


def parts_of(
    plan: TransferPlan, positions: Sequence[int], names: Sequence[str], *, call_bytes: int
) -> Iterator[CallPart]:
    """Yield what a plan moves of some of its objects, in order; an object of more ranges comes in several parts.

    Args:
        plan: of all objects of a request or batch.
        positions: which of them.
        names: of all objects.
        call_bytes: of one part, where it is no single object.
    """
    if not len(positions):
        return
    chosen = plan if len(positions) == plan.num_pages else plan.select(np.array(positions))
    lists = chosen.nested_lists(packed=True)
    if chosen.pages.contiguous and len(lists[1][0]) <= MAX_BUFFERS:
        yield from _even_parts(lists, positions, names, call_bytes)
    else:
        yield from _uneven_parts(lists, positions, names, call_bytes)


def _even_parts(
    lists: LayerMetadata, positions: Sequence[int], names: Sequence[str], call_bytes: int
) -> Iterator[CallPart]:
    """Yield parts of objects whose ranges are all alike, by counting: a layer of few objects is soon moved."""
    ranges, size = len(lists[1][0]), sum(lists[1][0])
    each = max(1, min(MAX_BUFFERS // max(1, ranges), call_bytes // max(1, size)))
    for start in range(0, len(positions), each):
        cut = slice(start, start + each)
        chosen = list(positions[cut])
        pointers, sizes, offsets = (column[cut] for column in lists)
        yield CallPart(
            positions=chosen,
            names=[names[at] for at in chosen],
            pointers=pointers,
            sizes=sizes,
            offsets=offsets,
            expected=[size] * len(chosen),
        )


def _uneven_parts(
    lists: LayerMetadata, positions: Sequence[int], names: Sequence[str], call_bytes: int
) -> Iterator[CallPart]:
    part, room = CallPart(), call_bytes
    for position, *ranges in zip(positions, *lists, strict=True):
        pointers, sizes, offsets = ranges
        total = sum(sizes)
        if part.positions and (part.buffers + len(sizes) > MAX_BUFFERS or total > room):
            yield part
            part, room = CallPart(), call_bytes
        for start in range(0, len(sizes), MAX_BUFFERS):
            if start:
                yield part
                part, room = CallPart(), call_bytes
            cut = slice(start, start + MAX_BUFFERS)
            part.add(position, names[position], (pointers[cut], sizes[cut], offsets[cut]))
        room -= total
    yield part
