"""What benchmarks of stores behind a server have in common: the store beside the client that it is made of.

The client moves values of the same length between a server and one block of memory; the store moves pages
between a server and scattered pool memory, and checks every byte. The server is on the same machine: it takes
a core of its own, and its speed is part of both.
"""

from __future__ import annotations

import ctypes
import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
START_SECONDS = 30.0
"""How long a server may take to take connections."""
MOST_ROUNDS = 5
"""Each shape has six actions and each action three measurements: a few rounds tell as much, and end."""


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

    @abstractmethod
    def forget(self) -> None:
        """Remove what was written."""

    @abstractmethod
    def look_up(self, names: Sequence[str]) -> None:
        """Ask for absent values one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A store, and the client that it is compared with."""

    topic: str
    client: str
    """What the client is called."""
    make_client: Callable[[Shape, NDArray[np.uint8]], RawClient]
    """Of the bytes of all objects: uint8 [objects, bytes]."""
    open_store: Callable[[], Store]
    moved: int = 96 * MIB
    """Bytes of one measurement."""
    looked_up: int = 4096
    where: str = ""
    """What the rows begin with."""
    why_missed: str = ""
    """What is known of targets that are missed."""


class Ours:
    """A store and a pool whose pages it moves."""

    def __init__(self, store: Store, shape: Shape, pages: int) -> None:
        """Make the pool, and write what is to be loaded."""
        self.store = store
        self._pool = PagePool.make("kv", shape.ranges, pages)
        self._shape = shape
        self._pages = pages
        self._salts = itertools.count(1)
        self._stored = object_keys(pages)
        if store.capabilities.registers_memory:
            store.register(unique_regions(self._pool.entry.spans))
        self.offload(slice(None), salt=0)

    def _locations(self, part: slice) -> PreparedPages:
        """Return where some pages are: once for a call, as a linker does."""
        return self._pool.entry.prepare_locations(self._pool.chosen[part])

    def _plan(self, locations: PreparedPages, layer: int | None = None) -> TransferPlan:
        if layer is None:
            return self._pool.entry.page_plan(locations)
        plan = self._pool.entry.layer_plan(locations, layer)
        if plan is None:
            message = f"no layer {layer}"
            raise RuntimeError(message)
        return plan

    def new_salt(self) -> int:
        """Forget what the last offload wrote, and return a number for the keys of the next one."""
        salt = next(self._salts)
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
                if set(session.read(self._plan(locations, layer), HostAccess())) != {ReadStatus.OK}:
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


def rows_of(contest: Contest, what: str, times: Times, moved: int) -> Iterator[Row]:
    """Yield the comparison with the client, and the one with a copy of as many bytes."""
    yield Row(
        topic=contest.topic,
        what=what,
        against=f"{contest.client}, the same bytes",
        ratio=times.ratio("client", "ours"),
        figures=times.figures("client", "ours"),
        target=TARGET,
        why_missed=contest.why_missed,
    )
    if moved:
        yield Row(
            topic=contest.topic,
            what=what,
            against=f"memcpy of {size(moved)}",
            ratio=times.ratio("memcpy", "ours"),
            figures=times.figures("memcpy", "ours"),
        )


def measure_shape(contest: Contest, shape: Shape, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one shape, with one and with two threads."""
    pages = max(2, scale.choose(contest.moved, 2 * MIB) // shape.object_bytes)
    moved = pages * shape.object_bytes
    block = np.random.default_rng(1).integers(0, 255, (pages, shape.object_bytes), dtype=np.uint8)
    target = np.empty_like(block)
    client, ours = contest.make_client(shape, block), Ours(contest.open_store(), shape, pages)
    copy = timed(lambda: ctypes.memmove(target.ctypes.data, block.ctypes.data, moved))
    client.put(slice(None))

    def offload_in(threads: int) -> Callable[[], float]:
        def offload() -> float:
            salt = ours.new_salt()
            return in_threads(pages, threads, lambda part: ours.offload(part, salt=salt))()

        return offload

    for threads in (1, 2):
        with_threads = f"{shape.name}, {threads} thread{'s' if threads > 1 else ''}"
        runs = {
            "offload": (offload_in(threads), client.put),
            "load, whole": (
                in_threads(pages, threads, lambda part: ours.load(part, by_layer=False)),
                client.get,
            ),
            "load, by layer": (
                in_threads(pages, threads, lambda part: ours.load(part, by_layer=True)),
                client.get_ranges,
            ),
        }
        for action, (mine, theirs) in runs.items():
            both = {"ours": mine, "client": in_threads(pages, threads, theirs), "memcpy": copy}
            yield from rows_of(
                contest,
                f"{contest.where}{action}, {with_threads}",
                in_turn(both, rounds=min(MOST_ROUNDS, scale.rounds)),
                moved,
            )
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
    what = f"{contest.where}lookup of {len(keys)} keys"
    yield from rows_of(contest, what, in_turn(both, rounds=min(MOST_ROUNDS, scale.rounds)), 0)
    ours.close()
