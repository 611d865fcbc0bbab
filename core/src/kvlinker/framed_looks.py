"""A look tells what lies under the keys of a request, by the headers and lengths of their values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvlinker.event_counts import EventCounts
from kvlinker.framed_objects import Look, WantedObjects, sort_values
from kvlinker.frames import Checksum
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import Beginning, NamedValues, parts_of

__all__ = ["FramedState", "look_at"]

_LAYOUTS = 256
_USUAL_HEADER_BYTES = 4096
"""More than the header of an object with 128 ranges."""


class FramedState:
    """What all calls of an open store of framed values share: counters, blocks, and how long headers were lately."""

    def __init__(self, *, checksum: Checksum, blocks: HostBlocks, counters: Iterable[str]) -> None:
        """Make the state of a store that has asked nothing yet.

        Args:
            checksum: of ranges and headers.
            blocks: host memory for what is read and written.
            counters: names of events, which are 0 from the start, so that a rate shows the first of a kind too.
        """
        self.checksum = checksum
        self.blocks = blocks
        self._counts = EventCounts(counters)
        self._lock = threading.Lock()
        self._header_bytes: OrderedDict[tuple[bytes, int], int] = OrderedDict()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self._counts.add(name, number)

    @property
    def counters(self) -> Mapping[str, int]:
        """A copy of all counters."""
        return self._counts.snapshot()

    def header_bytes(
        self, fingerprint: bytes, object_bytes: int, *, guess: int | None = None
    ) -> int:
        """Return how long the headers of a layout are, as far as was seen; else the guess."""
        with self._lock:
            return self._header_bytes.get((fingerprint, object_bytes), guess or _USUAL_HEADER_BYTES)

    def note(self, wanted: WantedObjects, header_bytes: int) -> None:
        """Note how long the headers of a layout are."""
        layout = wanted.fingerprint, wanted.object_bytes
        with self._lock:
            self._header_bytes[layout] = header_bytes
            self._header_bytes.move_to_end(layout)
            if len(self._header_bytes) > _LAYOUTS:
                self._header_bytes.popitem(last=False)


_Take = Callable[[Look, Mapping[int, Beginning]], None]


def _ignore(_look: Look, _found: Mapping[int, Beginning]) -> None:
    """Do without what comes behind the headers."""


def look_at(
    values: NamedValues,
    state: FramedState,
    wanted: WantedObjects,
    *,
    size: int | None = None,
    take: _Take = _ignore,
) -> Look:
    """Read the headers of objects and the lengths of their values, and tell what lies under each key.

    Args:
        values: where they are.
        state: knows how long headers were.
        wanted: what is looked for.
        size: bytes that are read of each value, a header and what is wanted behind it; a header by default.
        take: called with each part of the look, and the beginnings of its values, which are gone after that.

    Raises:
        StoreError: the values cannot be asked for.
    """
    known = state.header_bytes(wanted.fingerprint, wanted.object_bytes)
    look = Look()
    everything = range(len(wanted.keys))
    _look(values, state, wanted, everything, size or known, look, take)
    alike: dict[int, list[int]] = {}
    for at, length in look.cut.items():
        alike.setdefault(length, []).append(at)
    look.cut.clear()
    for length, positions in alike.items():
        # A few at a time: headers that are so long are rare, and may be somebody's to fill our memory.
        for part in parts_of(len(positions), max(1, values.answer_bytes // length)):
            _look(values, state, wanted, positions[part], length, look, take)
    look.others += look.cut  # they were written anew meanwhile, with headers of yet another length
    look.join()
    for found in look.parts:
        state.note(wanted, found.header_bytes)
    return look


def _look(
    values: NamedValues,
    state: FramedState,
    wanted: WantedObjects,
    positions: Sequence[int],
    size: int,
    look: Look,
    take: _Take,
) -> None:
    """Read so many bytes of some values, and add what is found to a look."""
    for found in values.begin([wanted.keys[at] for at in positions], size):
        places = sorted(positions[number] for number, _ in found)
        beginnings = {positions[number]: one for number, one in found}
        listed = [beginnings[at] for at in places]
        some = sort_values(
            wanted.some(places),
            [None if one is None else one.raw for one in listed],
            [0 if one is None else one.length for one in listed],
            checksum=state.checksum,
            tells_cut=True,
        ).renumbered(places)
        take(some, {at: one for at, one in beginnings.items() if one is not None})
        look.add(some)
