"""Framed objects lie whole under one name each: a header in front of a payload, in stores that keep values by name.

What such stores have in common: they tell by the headers what lies under their names, ask for neighbouring
ranges at once, compare checksums before a byte is copied, and make frames of pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects, room_for_sums
from kvlinker.frames import (
    PREFIX_BYTES,
    Checksum,
    FrameHeaders,
    FrameLayout,
    FrameStatus,
    decode_headers,
    encode_headers,
    header_bytes,
    is_prefix_of,
    read_header_bytes,
    read_range_counts,
)
from kvlinker.moving import range_sums, summing_mover
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ObjectKey, WriteBatch

__all__ = [
    "FoundObjects",
    "Look",
    "Piece",
    "WantedObjects",
    "are_ranges_right",
    "cut_plan",
    "frame_pages",
    "sort_values",
    "which_are_right",
    "which_rows_are_right",
]


_LONG_HEADER_BYTES = 64 << 10
"""A header of 2,700 ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedObjects:
    """Objects that are looked for, and what they must look like."""

    keys: tuple[ObjectKey, ...]
    object_bytes: int
    """Payload bytes."""
    fingerprint: bytes

    def some(self, positions: Sequence[int]) -> WantedObjects:
        """Return some of the objects, in the given order."""
        return WantedObjects(
            keys=tuple(self.keys[at] for at in positions),
            object_bytes=self.object_bytes,
            fingerprint=self.fingerprint,
        )

    @property
    def max_header_bytes(self) -> int:
        """A longer header is none: what anybody may write must not fill the memory of who reads it."""
        return max(_LONG_HEADER_BYTES, self.object_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundObjects:
    """Objects that are there and right as far as their headers say, all with as many ranges."""

    positions: IndexArray
    """[objects] which objects of the request these are, ascending."""
    headers: FrameHeaders
    raw: tuple[bytes, ...]
    """[objects] the headers as they were read."""

    @property
    def header_bytes(self) -> int:
        """Where the payloads begin in their values."""
        return len(self.raw[0])

    def alike(self) -> Iterator[IndexArray]:
        """Yield numbers of objects whose tables of ranges are the same: all at once, as those of one layout are."""
        everything = np.arange(len(self.positions), dtype=np.int64)
        if self.headers.is_uniform:
            yield everything
        else:
            yield from np.split(everything, len(everything))


@dataclass(slots=True, kw_only=True, eq=False)
class Look:
    """What lies under the keys of a request, by position."""

    parts: list[FoundObjects] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    """Keys with no value, or an empty one."""
    others: list[int] = field(default_factory=list)
    """Objects of another layout or length."""
    damaged: list[int] = field(default_factory=list)
    """Values that are no object, or not all of one."""
    cut: dict[int, int] = field(default_factory=dict)
    """Objects of whose headers too little was read, and how long their headers are."""

    @property
    def found(self) -> list[int]:
        """The objects that were looked for, ascending."""
        return sorted(at for part in self.parts for at in part.positions.tolist())

    def renumbered(self, positions: Sequence[int]) -> Look:
        """Return the same for a request in which the objects stand at other positions, ascending."""
        places = np.array(positions, dtype=np.int64)
        return Look(
            parts=[replace(part, positions=places[part.positions]) for part in self.parts],
            absent=[positions[at] for at in self.absent],
            others=[positions[at] for at in self.others],
            damaged=[positions[at] for at in self.damaged],
            cut={positions[at]: size for at, size in self.cut.items()},
        )

    def add(self, other: Look) -> None:
        """Take over what another look at the same request has found."""
        self.parts += other.parts
        self.absent += other.absent
        self.others += other.others
        self.damaged += other.damaged
        self.cut |= other.cut

    def join(self) -> None:
        """Make one part of all whose headers are equally long."""
        alike: dict[int, list[FoundObjects]] = {}
        for part in self.parts:
            alike.setdefault(part.header_bytes, []).append(part)
        self.parts = [_joined(parts) for parts in alike.values()]


def _joined(parts: Sequence[FoundObjects]) -> FoundObjects:
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.positions for part in parts]), kind="stable")
    raw = [one for part in parts for one in part.raw]
    headers = [part.headers for part in parts]
    return FoundObjects(
        positions=np.concatenate([part.positions for part in parts])[order],
        headers=FrameHeaders(
            status=np.concatenate([one.status for one in headers])[order],
            offsets=np.concatenate([one.offsets for one in headers])[order],
            sizes=np.concatenate([one.sizes for one in headers])[order],
            checksums=np.concatenate([one.checksums for one in headers])[order],
        ),
        raw=tuple(raw[at] for at in order.tolist()),
    )


def sort_values(
    wanted: WantedObjects,
    beginnings: Sequence[bytes | memoryview | None],
    lengths: Sequence[int],
    *,
    checksum: Checksum,
    tells_cut: bool = False,
) -> Look:
    """Tell what lies under each key.

    Args:
        wanted: what is looked for.
        beginnings: [keys] what each value begins with, at least its header; None where there is no value.
        lengths: [keys] bytes of each value.
        checksum: the function that made the headers' checksums.
        tells_cut: whether more of a header can be read: objects that need it are `cut`, and `damaged` otherwise.
    """
    look = Look()
    groups: dict[int, list[int]] = {}
    counts = read_range_counts([(raw or b"")[:PREFIX_BYTES] for raw in beginnings])
    for at, (raw, length, ranges) in enumerate(zip(beginnings, lengths, counts, strict=True)):
        if raw is None or not length:
            look.absent.append(at)
        elif tells_cut and len(raw) < PREFIX_BYTES <= length:
            look.cut[at] = PREFIX_BYTES  # it is the answer that is short, and not the value
        elif not ranges:
            look.damaged.append(at)
        elif len(raw) < header_bytes(ranges):
            _sort_cut(look, wanted, at, raw, length, tells_cut=tells_cut)
        else:
            groups.setdefault(ranges, []).append(at)
    for ranges, positions in groups.items():
        headers = [(beginnings[at] or b"")[: header_bytes(ranges)] for at in positions]
        sizes = np.array([lengths[at] for at in positions])
        _sort_group(look, wanted, np.array(positions, dtype=np.int64), headers, sizes, checksum)
    return look


def _sort_cut(
    look: Look,
    wanted: WantedObjects,
    at: int,
    raw: bytes | memoryview,
    length: int,
    *,
    tells_cut: bool,
) -> None:
    """Put a value where it belongs of whose header too little was read."""
    prefix, size = raw[:PREFIX_BYTES], read_header_bytes(raw[:PREFIX_BYTES]) or 0
    if tells_cut and size <= min(length, wanted.max_header_bytes):
        look.cut[at] = size
        return
    is_own = is_prefix_of(
        prefix,
        key=wanted.keys[at],
        fingerprint=wanted.fingerprint,
        payload_bytes=wanted.object_bytes,
    )
    (look.damaged if is_own else look.others).append(at)


def _sort_group(
    look: Look,
    wanted: WantedObjects,
    positions: IndexArray,
    raw: Sequence[bytes | memoryview],
    lengths: NDArray[np.int64],
    checksum: Checksum,
) -> None:
    """Put values whose headers are equally long where they belong."""
    size = len(raw[0])
    headers = decode_headers(
        np.frombuffer(b"".join(raw), dtype=np.uint8).reshape(len(raw), size),
        ranges=read_range_counts([raw[0][:PREFIX_BYTES]])[0],
        keys=[wanted.keys[at] for at in positions.tolist()],
        fingerprint=wanted.fingerprint,
        payload_bytes=wanted.object_bytes,
        checksum=checksum,
    )
    is_intact = headers.status == FrameStatus.INTACT
    is_whole = lengths == size + wanted.object_bytes
    is_damaged = (headers.status == FrameStatus.BROKEN) | (is_intact & ~is_whole)
    look.others += positions[headers.status == FrameStatus.FOREIGN].tolist()
    look.damaged += positions[is_damaged].tolist()
    kept = np.flatnonzero(is_intact & is_whole)
    if not len(kept):
        return
    look.parts.append(
        FoundObjects(
            positions=positions[kept],
            headers=FrameHeaders(
                status=headers.status[kept],
                offsets=headers.offsets[kept],
                sizes=headers.sizes[kept],
                checksums=headers.checksums[kept],
            ),
            raw=tuple(bytes(raw[i]) for i in kept.tolist()),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Neighbouring ranges of an object, and what of a plan lies in them."""

    start: int
    """Offset in the payload."""
    size: int
    frames: slice
    """Which ranges of the header these are."""
    plan: TransferPlan


def cut_plan(headers: FrameHeaders, number: int, plan: TransferPlan, limit: int) -> Iterator[Piece]:
    """Cut what a plan needs of an object into neighbouring ranges of at most `limit` bytes, where that can be."""
    offsets, sizes = headers.offsets[number], headers.sizes[number]
    lows, highs = plan.spans.offset, plan.spans.offset + plan.range_bytes
    ranges = headers.covering(number, lows, plan.range_bytes)
    if not len(ranges):
        return
    ends = offsets + sizes
    first = int(ranges[0])
    for last, following in zip(ranges.tolist(), [*ranges.tolist()[1:], -1], strict=True):
        end = int(ends[last])
        is_gap = following != last + 1
        is_long = not is_gap and int(ends[following]) - int(offsets[first]) > limit
        if is_gap or (is_long and not ((lows < end) & (highs > end)).any()):
            start = int(offsets[first])
            yield Piece(
                start=start,
                size=end - start,
                frames=slice(first, last + 1),
                plan=plan.select_spans((lows >= start) & (highs <= end)),
            )
            first = following


def are_ranges_right(
    headers: FrameHeaders, number: int, piece: Piece, view: memoryview, *, checksum: Checksum
) -> bool:
    """Whether the bytes of a piece have the length and the checksums that the header says."""
    if len(view) != piece.size:
        return False
    starts = headers.offsets[number, piece.frames] - piece.start
    ends = starts + headers.sizes[number, piece.frames]
    expected = headers.checksums[number, piece.frames].tolist()
    places = zip(starts.tolist(), ends.tolist(), expected, strict=True)
    return all(checksum(view[start:end]) == wanted for start, end, wanted in places)


def which_are_right(
    headers: FrameHeaders,
    numbers: IndexArray,
    piece: Piece,
    views: Sequence[memoryview | None],
    *,
    checksum: Checksum,
) -> NDArray[np.bool_]:
    """Tell for each object, all of the same ranges, whether the bytes of a piece are what its header says."""
    first, frames = int(numbers[0]), piece.frames
    is_right = np.array([view is not None and len(view) == piece.size for view in views])
    whole = [view for view, right in zip(views, is_right.tolist(), strict=True) if view and right]
    starts = headers.offsets[first, frames] - piece.start
    found = range_sums(checksum, whole, starts, headers.sizes[first, frames])
    is_right[is_right] = (found == headers.checksums[numbers[is_right], frames]).all(axis=1)
    return is_right


def which_rows_are_right(
    headers: FrameHeaders,
    numbers: IndexArray,
    piece: Piece,
    rows: NDArray[np.uint8],
    *,
    checksum: Checksum,
) -> NDArray[np.bool_]:
    """Tell the same as `which_are_right` of rows, [objects, bytes], with nothing done for each of them."""
    mover = summing_mover(checksum)
    if mover is None or rows.shape[1] != piece.size:
        views = [row.data for row in rows]
        return which_are_right(headers, numbers, piece, views, checksum=checksum)
    first, frames = int(numbers[0]), piece.frames
    begun = int(rows.__array_interface__["data"][0]) + rows.strides[0] * np.arange(len(rows))
    starts = headers.offsets[first, frames] - piece.start
    addresses = (begun[:, np.newaxis] + starts).reshape(-1)
    found = mover.sums(addresses, np.tile(headers.sizes[first, frames], len(rows)))
    is_right = found.reshape(len(rows), -1) == headers.checksums[numbers, frames]
    return np.asarray(is_right.all(axis=1), dtype=np.bool_)


def frame_pages(
    batch: WriteBatch,
    layout: FrameLayout,
    positions: IndexArray,
    rows: NDArray[np.uint8],
    memory: DeviceAccess,
    *,
    checksum: Checksum,
) -> None:
    """Copy objects of a batch out of pool memory, and write their headers in front of them.

    Args:
        batch: whose objects.
        layout: of every object.
        positions: [rows] which objects.
        rows: [rows, header_bytes + payload_bytes] is filled.
        memory: copies them.
        checksum: of ranges and headers.
    """
    plan = batch.plan if len(positions) == batch.plan.num_pages else batch.plan.select(positions)
    span = BufferSpan(
        base_ptr=rows.ctypes.data,
        rows=len(rows),
        row_bytes=rows.shape[1],
        row_stride=rows.shape[1],
        label="values",
    )
    slots = np.arange(len(rows), dtype=np.int64)
    order = np.argsort(plan.spans.offset, kind="stable")
    is_alike = layout.is_of(plan.spans.offset[order], plan.range_bytes[order])
    sums = room_for_sums(plan, memory, checksum) if is_alike else None
    objects = HostObjects(span=span, slots=slots, first_offset=-layout.header_bytes, sums=sums)
    memory.copy_out(plan, objects)
    if sums is None:
        starts = np.array(layout.offsets) + layout.header_bytes
        checksums = range_sums(checksum, [row.data for row in rows], starts, np.array(layout.sizes))
    else:
        checksums = sums[order].T
    rows[:, : layout.header_bytes] = encode_headers(
        layout,
        [batch.keys[at] for at in positions.tolist()],
        batch.fingerprint,
        checksums,
        checksum=checksum,
    )
