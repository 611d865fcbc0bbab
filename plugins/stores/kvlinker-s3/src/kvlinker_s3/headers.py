"""Headers stand in front of every payload: they are read once for a session or a write, and say what is there."""

from __future__ import annotations

from kvlinker.framed_objects import Look, WantedObjects, sort_values
from kvlinker.frames import PREFIX_BYTES, read_header_bytes
from kvlinker_s3.lanes import Lane
from kvlinker_s3.requests import Beginning, begin_of
from kvlinker_s3.state import StoreState, checksum

__all__ = ["look_at"]


def look_at(state: StoreState, lane: Lane, wanted: WantedObjects) -> Look:
    """Read the headers of objects and the lengths of what they are in.

    Raises:
        StoreError: see `Lane.run`.
    """
    guess = state.header_bytes(wanted.fingerprint, wanted.object_bytes)
    names = state.names.of_objects(wanted.keys)
    beginnings = lane.run([begin_of(name, guess) for name in names])
    _read_longer(lane, names, beginnings)
    look = sort_values(
        wanted,
        [None if found is None else bytes(found.raw) for found in beginnings],
        [0 if found is None else found.length for found in beginnings],
        checksum=checksum,
    )
    for part in look.parts:
        state.note_header_bytes(wanted.fingerprint, wanted.object_bytes, part.header_bytes)
    return look


def _read_longer(lane: Lane, names: list[str], beginnings: list[Beginning | None]) -> None:
    """Read those headers again that are longer than was thought."""
    sizes: dict[int, int] = {}
    for at, found in enumerate(beginnings):
        size = None if found is None else read_header_bytes(bytes(found.raw[:PREFIX_BYTES]))
        if found is not None and size is not None and len(found.raw) < size <= found.length:
            sizes[at] = size
    again = lane.run([begin_of(names[at], size) for at, size in sizes.items()])
    for at, found in zip(sizes, again, strict=True):
        beginnings[at] = found
