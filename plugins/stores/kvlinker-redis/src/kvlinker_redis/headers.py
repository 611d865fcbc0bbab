"""Headers stand in front of every payload: they are read once for a session or a write, and say what is there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.frames import (
    PREFIX_BYTES,
    FrameHeaders,
    FrameStatus,
    decode_headers,
    header_bytes,
    read_range_count,
)
from kvlinker.store import ObjectKey
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.replies import expect_bytes, expect_number, is_other_type
from kvlinker_redis.state import MAX_COMMANDS, StoreState, checksum, run_in_parts
from kvlinker_redis.values import Command

__all__ = ["FoundPart", "Look", "Wanted", "look_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Objects that are looked for, and what they must look like."""

    keys: tuple[ObjectKey, ...]
    object_bytes: int
    """Payload bytes."""
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPart:
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


@dataclass(slots=True, kw_only=True, eq=False)
class Look:
    """What lies under the keys of a request, by position."""

    parts: list[FoundPart] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    """Keys with no value."""
    others: list[int] = field(default_factory=list)
    """Objects of another layout or length."""
    damaged: list[int] = field(default_factory=list)
    """Values that are no object, or not all of one."""

    @property
    def found(self) -> list[int]:
        """The objects that were looked for, ascending."""
        return sorted(at for part in self.parts for at in part.positions.tolist())


def look_at(state: StoreState, lane: RedisLane, wanted: Wanted) -> Look:
    """Read the headers of objects and the lengths of their values; with a TTL, what is looked at lives on.

    Raises:
        StoreError: see `RedisLane.run`.
    """
    values = _Values(state, lane, wanted)
    look = Look()
    groups: dict[int, list[int]] = {}
    for at, (raw, length) in enumerate(zip(values.raw, values.lengths, strict=True)):
        ranges = read_range_count(raw[:PREFIX_BYTES])
        if length == 0 or (not raw and at not in values.strangers):
            look.absent.append(at)  # now, or when the other question was answered
        elif ranges is None or len(raw) < header_bytes(ranges):
            look.damaged.append(at)
        else:
            groups.setdefault(ranges, []).append(at)
    for ranges, positions in groups.items():
        _sort(look, values, ranges, np.array(positions, dtype=np.int64))
    return look


def _sort(look: Look, values: _Values, ranges: int, positions: IndexArray) -> None:
    """Put values with as many ranges where they belong."""
    size, wanted = header_bytes(ranges), values.wanted
    raw = [values.raw[at][:size] for at in positions.tolist()]
    headers = decode_headers(
        np.frombuffer(b"".join(raw), dtype=np.uint8).reshape(len(raw), size),
        ranges=ranges,
        keys=[wanted.keys[at] for at in positions.tolist()],
        fingerprint=wanted.fingerprint,
        payload_bytes=wanted.object_bytes,
        checksum=checksum,
    )
    lengths = np.array([values.lengths[at] for at in positions.tolist()])
    is_intact = headers.status == FrameStatus.INTACT
    is_whole = lengths == size + wanted.object_bytes
    look.others += positions[headers.status == FrameStatus.FOREIGN].tolist()
    look.damaged += positions[
        (headers.status == FrameStatus.BROKEN) | (is_intact & ~is_whole)
    ].tolist()
    if not (is_intact & is_whole).any():
        return
    kept = np.flatnonzero(is_intact & is_whole)
    values.state.note_header_bytes(wanted.fingerprint, wanted.object_bytes, size)
    look.parts.append(
        FoundPart(
            positions=positions[kept],
            headers=FrameHeaders(
                status=headers.status[kept],
                offsets=headers.offsets[kept],
                sizes=headers.sizes[kept],
                checksums=headers.checksums[kept],
            ),
            raw=tuple(raw[i] for i in kept.tolist()),
        )
    )


class _Values:
    """What stands at the beginning of each value, and how long each is."""

    def __init__(self, state: StoreState, lane: RedisLane, wanted: Wanted) -> None:
        self.state = state
        self.wanted = wanted
        self._lane = lane
        self._names = state.names.of_objects(wanted.keys)
        self.raw: list[bytes] = []
        self.lengths: list[int] = []
        self.strangers: set[int] = set()
        """Values of another type than text."""
        self._read(state.header_bytes(wanted.fingerprint, wanted.object_bytes))
        self._read_longer()

    def _read(self, guess: int) -> None:
        ttl = self.state.options.ttl_seconds
        commands: list[Command] = []
        for name in self._names:
            commands += [("GETRANGE", name, 0, guess - 1), ("STRLEN", name)]
            if ttl is not None:
                commands.append(("EXPIRE", name, ttl))
        step = 2 if ttl is None else 3
        each = min(MAX_COMMANDS // step, max(1, self.state.options.call_bytes // guess))
        replies = run_in_parts(self._lane, commands, size=each * step)
        self.strangers = {at for at, reply in enumerate(replies[1::step]) if is_other_type(reply)}
        self.raw = [
            b"" if is_other_type(reply) else expect_bytes(reply, "GETRANGE")
            for reply in replies[::step]
        ]
        self.lengths = [
            1 if at in self.strangers else expect_number(reply, "STRLEN")
            for at, reply in enumerate(replies[1::step])
        ]

    def _read_longer(self) -> None:
        """Read those headers again that are longer than was thought."""
        sizes: dict[int, int] = {}
        for at, raw in enumerate(self.raw):
            ranges = read_range_count(raw[:PREFIX_BYTES])
            if ranges is not None and len(raw) < header_bytes(ranges) <= self.lengths[at]:
                sizes[at] = header_bytes(ranges)
        if not sizes:
            return
        commands: list[Command] = [
            ("GETRANGE", self._names[at], 0, size - 1) for at, size in sizes.items()
        ]
        each = max(1, self.state.options.call_bytes // max(sizes.values()))
        replies = run_in_parts(self._lane, commands, size=min(MAX_COMMANDS, each))
        for at, reply in zip(sizes, replies, strict=True):
            self.raw[at] = b"" if is_other_type(reply) else expect_bytes(reply, "GETRANGE")
