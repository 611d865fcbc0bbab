"""What benchmarks of stores behind a server have in common: the store beside the client that it is made of.

The client moves values of the same length between a server and one block of memory, which is less than an engine
needs; and once more from and to the same scattered pages as the store, by itself where it can do that and with a
memcpy of each range where it cannot. The store checks every byte as well. The server is on the same machine: it
takes a core of its own, and its speed is part of both.
"""

from __future__ import annotations

import ctypes
import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from measuring import Row, Scale, Times, in_turn, size, timed
from numpy.typing import NDArray
from pages import MIB, PagePool, object_keys

from kvlinker.device import HostAccess
from kvlinker.plans import PreparedPages, TransferPlan
from kvlinker.spans import unique_regions
from kvlinker.store import ReadRequest, ReadStatus, Store, WriteBatch, WriteStatus

FINGERPRINT = b"benchmark"
TARGET = 0.9
"""Of the client's own speed."""
HELD_SECONDS = 900.0
"""Longer than any shape is measured."""
START_SECONDS = 30.0
"""How long a server may take to take connections."""
MOST_ROUNDS = 5
"""Each shape has six actions and each action four measurements: a few rounds tell as much, and end."""
MOVED = 48 * MIB
"""Bytes of one measurement: larger than the caches of a core, and few enough for many measurements."""
MOVED_IN_MEMORY = 192 * MIB
"""Where nothing but the machine's memory limits, as 4,700 tokens of a large model have: 48 MiB take 3 ms there, of
which a call's fixed costs would be half."""
WHY_MISSED = (
    "The library leaves what it read in one block, or wherever it likes, and looks at none of it; the store brings "
    "every range to a place of its own and makes its checksum. What the places alone cost stands in the rows of the "
    "same pages."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Objects of one kind."""

    name: str
    ranges: Sequence[int]
    """Bytes of each range, one for a layer."""

    @property
    def object_bytes(self) -> int:
        """Bytes of an object."""
        return sum(self.ranges)


SHAPES = (
    Shape(name="61 ranges of 42 KB", ranges=[41_984] * 61),
    Shape(name="objects of 0.5 MB", ranges=[65_536] * 8),
    Shape(name="objects of 8 MB", ranges=[131_072] * 64),
)


class RawClient(ABC):
    """The library itself: values from a block of memory, uint8 [objects, bytes], and back."""

    @abstractmethod
    def put(self, part: slice) -> None:
        """Write some objects."""

    @abstractmethod
    def get(self, part: slice) -> None:
        """Read some objects whole."""

    @abstractmethod
    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""

    def renew(self) -> None:  # noqa: B027  # most servers take as long for both
        """Let the next `put` write what is not there, as a store does: some servers overwrite in half the time."""

    @abstractmethod
    def forget(self) -> None:
        """Remove what was written."""

    @abstractmethod
    def look_up(self, names: Sequence[str]) -> None:
        """Ask for absent values one by one."""

    def from_pages(self, pages: Pages) -> PageClient:
        """Return what moves the same bytes from and to pages; others copy each range, since their library cannot."""
        return CopyingClient(self, pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the bytes of objects are when an engine has them: a range of each in every layer's buffer."""

    pool: PagePool
    ranges: Sequence[int]
    """Bytes of each range."""
    block: NDArray[np.uint8]
    """Where a client has them: uint8 [objects, bytes]."""

    def addresses(self, number: int) -> list[int]:
        """Return the addresses of all ranges of one object."""
        row = int(self.pool.chosen[number])
        return [buffer.ctypes.data + row * buffer.shape[1] for buffer in self.pool.buffers]

    def views(self, number: int) -> list[memoryview]:
        """Return the memory of all ranges of one object."""
        row = int(self.pool.chosen[number])
        return [memoryview(buffer[row]) for buffer in self.pool.buffers]


class PageClient(ABC):
    """A client whose bytes come from, and end in, the pages of a pool."""

    how: ClassVar[str] = "from and to the same pages"
    """How it does that, in words."""

    @abstractmethod
    def put(self, part: slice) -> None:
        """Write some objects."""

    @abstractmethod
    def get(self, part: slice) -> None:
        """Read some objects whole."""

    @abstractmethod
    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""


class CopyingClient(PageClient):
    """A client of one block, and a memcpy of each range.

    A library that returns values of its own leaves them anywhere; as many bytes are copied then, from the block.
    """

    how: ClassVar[str] = "and a memcpy of each range from or to the same pages"

    def __init__(self, client: RawClient, pages: Pages) -> None:
        """Note where everything is."""
        self._client, self._memory = client, pages  # what is copied stays allocated
        self._ranges = list(pages.ranges)
        block = pages.block
        starts = [0, *itertools.accumulate(self._ranges[:-1])]
        self._pages = [pages.addresses(number) for number in range(len(block))]
        firsts = [block.ctypes.data + number * block.strides[0] for number in range(len(block))]
        self._places = [[first + start for start in starts] for first in firsts]

    def _copy(self, part: slice, *, is_read: bool) -> None:
        for pages, places in zip(self._pages[part], self._places[part], strict=True):
            for page, place, length in zip(pages, places, self._ranges, strict=True):
                target, source = (page, place) if is_read else (place, page)
                ctypes.memmove(target, source, length)

    def put(self, part: slice) -> None:
        """See PageClient."""
        self._copy(part, is_read=False)
        self._client.put(part)

    def get(self, part: slice) -> None:
        """See PageClient."""
        self._client.get(part)
        self._copy(part, is_read=True)

    def get_ranges(self, part: slice) -> None:
        """See PageClient."""
        self._client.get_ranges(part)
        self._copy(part, is_read=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A store, and the client that it is compared with."""

    topic: str
    client: str
    """What the client is called."""
    make_client: Callable[[Shape, NDArray[np.uint8]], RawClient]
    """Of the bytes of all objects: uint8 [objects, bytes]."""
    open_store: Callable[[], Store]
    moved: int = MOVED
    """Bytes of one measurement."""
    looked_up: int = 4096
    where: str = ""
    """What the rows begin with."""
    why_missed: str = WHY_MISSED
    """What is known of targets that are missed where bytes are moved."""
    evicts: bool = False
    """The store has room for little more than is loaded and offloaded at once, so that offloads evict."""
    why_lookup: str = ""
    """What is known of a target that a lookup misses."""


class Ours:
    """A store and a pool whose pages it moves."""

    def __init__(self, store: Store, shape: Shape, pages: int, *, evicts: bool = False) -> None:
        """Make the pool, and write what is to be loaded.

        Args:
            store: the store.
            shape: of its objects.
            pages: how many of them.
            evicts: leave it to the store to make room, as one that is full does; what is to be loaded is held.
        """
        self.store = store
        self._evicts = evicts
        self.pool = PagePool.make("kv", shape.ranges, pages)
        self._shape = shape
        self._pages = pages
        self._salts = itertools.count(1)
        self._stored = object_keys(pages)
        if store.capabilities.registers_memory:
            store.register(unique_regions(self.pool.entry.spans))
        self.offload(slice(None), salt=0)
        if evicts:
            store.hold(self._stored, seconds=HELD_SECONDS)

    def _locations(self, part: slice) -> PreparedPages:
        """Return where some pages are: once for a call, as a linker does."""
        return self.pool.entry.prepare_locations(self.pool.chosen[part])

    def _plan(self, locations: PreparedPages, layer: int | None = None) -> TransferPlan:
        if layer is None:
            return self.pool.entry.page_plan(locations)
        plan = self.pool.entry.layer_plan(locations, layer)
        if plan is None:
            message = f"no layer {layer}"
            raise RuntimeError(message)
        return plan

    def new_salt(self) -> int:
        """Forget what the last offload wrote, and return a number for the keys of the next one."""
        salt = next(self._salts)
        if self._evicts:
            return salt
        self.store.delete(object_keys(self._pages, salt=salt - 1) if salt > 1 else [])
        return salt

    def close(self) -> None:
        """Forget what was written to be loaded, and close the store."""
        self.store.delete(self._stored)
        self.store.close()

    def offload(self, part: slice, *, salt: int) -> None:
        """Write some pages."""
        keys = object_keys(self._pages, salt=salt)[part]
        batch = WriteBatch(
            keys=keys, plan=self._plan(self._locations(part)), fingerprint=FINGERPRINT
        )
        (statuses,) = self.store.write([batch], HostAccess(), may_publish=lambda: True)
        if set(statuses) != {WriteStatus.WRITTEN}:
            message = f"not everything was written: {set(statuses)}"
            raise RuntimeError(message)

    def load(self, part: slice, *, by_layer: bool) -> None:
        """Read some pages, whole or layer by layer."""
        request = ReadRequest(
            keys=self._stored[part],
            object_bytes=self._shape.object_bytes,
            fingerprint=FINGERPRINT,
        )
        locations = self._locations(part)
        layers: Sequence[int | None] = range(len(self._shape.ranges)) if by_layer else [None]
        with self.store.open_read(request) as session:
            for layer in layers:
                statuses = session.read(self._plan(locations, layer), HostAccess())
                if statuses.count(ReadStatus.OK) != len(statuses):
                    message = "not everything was read"
                    raise RuntimeError(message)


def wait_for_port(port: int) -> None:
    """Wait until a server of this machine takes connections.

    Raises:
        OSError: it does not within half a minute.
    """
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def in_threads(pages: int, threads: int, run: Callable[[slice], object]) -> Callable[[], float]:
    """Return what runs a share of the pages in each of some threads, and returns the seconds."""
    step = -(-pages // threads)
    parts = [slice(start, start + step) for start in range(0, pages, step)]

    def measure() -> float:
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            for task in [pool.submit(run, part) for part in parts]:
                task.result()
            return time.perf_counter() - start

    return measure


def client_row(contest: Contest, what: str, times: Times, why_missed: str) -> Row:
    """Return the comparison with the client."""
    return Row(
        topic=contest.topic,
        what=f"{contest.where}{what}",
        against=f"{contest.client}, the same bytes",
        ratio=times.ratio("client", "ours"),
        figures=times.figures("client", "ours"),
        target=TARGET,
        why_missed=why_missed,
    )


def rows_of(contest: Contest, what: str, times: Times, how: str, moved: int) -> Iterator[Row]:
    """Yield the comparison with the client, with the client and the same pages, and with a copy of as many bytes."""
    yield client_row(contest, what, times, contest.why_missed)
    against = {"pages": f"{contest.client}, {how}", "memcpy": f"memcpy of {size(moved)}"}
    for peer, words in against.items():
        yield Row(
            topic=contest.topic,
            what=f"{contest.where}{what}",
            against=words,
            ratio=times.ratio(peer, "ours"),
            figures=times.figures(peer, "ours"),
        )


def _actions(
    ours: Ours, client: RawClient, scattered: PageClient, pages: int, threads: int
) -> Iterator[tuple[str, Mapping[str, Callable[[], float]]]]:
    """Yield each action, and what runs it in some threads: ours, the client's, and the client's with pages."""

    def offload() -> float:
        salt = ours.new_salt()
        return in_threads(pages, threads, lambda part: ours.offload(part, salt=salt))()

    def both(
        mine: Callable[[], float],
        theirs: Callable[[slice], object],
        paged: Callable[[slice], object],
    ) -> Mapping[str, Callable[[], float]]:
        raw, with_pages = (in_threads(pages, threads, run) for run in (theirs, paged))
        return {"ours": mine, "client": raw, "pages": with_pages}

    whole = in_threads(pages, threads, lambda part: ours.load(part, by_layer=False))
    by_layer = in_threads(pages, threads, lambda part: ours.load(part, by_layer=True))
    # A store that reads whole objects alone is never asked for a layer, and a linker waits for the whole.
    has_ranges = ours.store.capabilities.ranged_reads
    puts = both(offload, client.put, scattered.put)
    yield (
        "offload",
        {name: run if name == "ours" else _renewed(client, run) for name, run in puts.items()},
    )
    yield "load, whole", both(whole, client.get, scattered.get)
    if has_ranges:
        yield "load, by layer", both(by_layer, client.get_ranges, scattered.get_ranges)


def _renewed(client: RawClient, run: Callable[[], float]) -> Callable[[], float]:
    """Return what runs a `put` that finds nothing in its place."""

    def measure() -> float:
        client.renew()
        return run()

    return measure


def measure_shape(contest: Contest, shape: Shape, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one shape, with one and with two threads."""
    most = scale.choose(contest.moved, 2 * MIB)
    pages = max(2, most // shape.object_bytes)
    moved = pages * shape.object_bytes
    block = np.random.default_rng(1).integers(0, 255, (pages, shape.object_bytes), dtype=np.uint8)
    target = np.empty_like(block)
    client, ours = (
        contest.make_client(shape, block),
        Ours(contest.open_store(), shape, pages, evicts=contest.evicts),
    )
    pool = PagePool.make("raw", shape.ranges, pages)
    scattered = client.from_pages(Pages(pool=pool, ranges=shape.ranges, block=block))
    copy = timed(lambda: ctypes.memmove(target.ctypes.data, block.ctypes.data, moved))
    client.put(slice(None))
    for threads in (1, 2):
        what = f"{shape.name}, {threads} thread{'s' if threads > 1 else ''}"
        for action, runs in _actions(ours, client, scattered, pages, threads):
            times = in_turn({**runs, "memcpy": copy}, rounds=min(MOST_ROUNDS, scale.rounds))
            yield from rows_of(contest, f"{action}, {what}", times, scattered.how, moved)
    client.forget()
    ours.close()


def measure_lookup(contest: Contest, scale: Scale) -> Iterator[Row]:
    """Yield the row of a lookup of absent objects, which has no bytes to copy."""
    shape = SHAPES[1]
    client = contest.make_client(shape, np.empty((0, shape.object_bytes), dtype=np.uint8))
    ours = Ours(contest.open_store(), shape, 2)
    keys = object_keys(scale.choose(contest.looked_up, 128), salt=10**6)
    both = {
        "ours": timed(lambda: ours.store.exists(keys)),
        "client": timed(lambda: client.look_up([key.hex() for key in keys])),
    }
    times = in_turn(both, rounds=min(MOST_ROUNDS, scale.rounds))
    yield client_row(contest, f"lookup of {len(keys)} keys", times, contest.why_lookup)
    ours.close()
