"""Compare the Redis store with redis-py itself on the same bytes, and with a copy in memory, on loopback.

redis-py moves values of the same length, as many in a pipeline, between a server and one block of memory;
the store moves pages between a server and scattered pool memory, and checks every byte. The server is one
process on the same machine: it takes a core of its own, and its speed is part of both.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from measuring import Row, Scale, Times, in_turn, missing_peer, run_script, size, timed
from numpy.typing import NDArray
from pages import MIB, PagePool, object_keys

from kvlinker.device import HostAccess
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker_redis import RedisStore, RedisStoreOptions

TOPIC = "Redis store"
FINGERPRINT = b"benchmark"
TARGET = 0.9
"""Of the client's own speed."""
CALL_BYTES = 8 * MIB
LOOKED_UP = 4096
START_SECONDS = 30.0


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


@contextmanager
def redis_server(binary: str) -> Iterator[int]:
    """Run a server on a free port for the length of a block; give the port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
        server = subprocess.Popen([*command, "--save", "", "--logfile", f"{folder}/log"])
        try:
            _wait_for(port)
            yield port
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int) -> None:
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


class Client:
    """redis-py itself: values from a block of memory and back as bytes."""

    def __init__(self, port: int, shape: Shape, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes]."""
        from redis import Redis

        self._redis = Redis(host="127.0.0.1", port=port, protocol=2)
        self._shape = shape
        self._block = block

    def _run(self, commands: Sequence[tuple[object, ...]], each: int) -> list[object]:
        """Return all replies, so many commands in a pipeline."""
        replies: list[object] = []
        for start in range(0, len(commands), each):
            pipeline = self._redis.pipeline(transaction=False)
            for command in commands[start : start + each]:
                pipeline.execute_command(*command)
            replies += pipeline.execute()
        return replies

    def put(self, part: slice) -> None:
        """Write some objects."""
        each = max(1, CALL_BYTES // self._shape.object_bytes)
        numbers = range(len(self._block))[part]
        self._run([("SET", f"raw:{i}", self._block[i].data) for i in numbers], each)

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        each = max(1, CALL_BYTES // self._shape.object_bytes)
        numbers = range(len(self._block))[part]
        last = self._shape.object_bytes - 1
        for start in range(0, len(numbers), each):
            chunk = numbers[start : start + each]
            _check(self._run([("GETRANGE", f"raw:{i}", 0, last) for i in chunk], each), last + 1)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""
        start = 0
        for length in self._shape.ranges:
            each = min(1024, CALL_BYTES // length)
            numbers = range(len(self._block))[part]
            commands = [("GETRANGE", f"raw:{i}", start, start + length - 1) for i in numbers]
            for first in range(0, len(commands), each):
                _check(self._run(commands[first : first + each], each), length)
            start += length

    def forget(self) -> None:
        """Empty the server."""
        self._redis.flushall()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for values one by one."""
        if sum(int(str(reply)) for reply in self._run([("EXISTS", name) for name in names], 1024)):
            message = "values were found that nobody wrote"
            raise RuntimeError(message)


def _check(replies: Sequence[object], length: int) -> None:
    if any(not isinstance(reply, bytes) or len(reply) != length for reply in replies):
        message = f"not every reply has {length} B"
        raise RuntimeError(message)


class Ours:
    """A store and a pool whose pages it moves."""

    def __init__(self, port: int, shape: Shape, pages: int) -> None:
        """Make the pool, and open the store."""
        url = f"redis://127.0.0.1:{port}/0"
        self.store = RedisStore(RedisStoreOptions(url=url, call_bytes=CALL_BYTES))
        self._pool = PagePool.make("kv", shape.ranges, pages)
        self._shape = shape
        self._pages = pages
        self._salts = itertools.count(1)
        self._stored = object_keys(pages)
        self.offload(slice(None), salt=0)

    def _plan(self, part: slice, layer: int | None = None) -> TransferPlan:
        locations = self._pool.entry.prepare_locations(self._pool.chosen[part])
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

    def offload(self, part: slice, *, salt: int) -> None:
        """Write some pages."""
        keys = object_keys(self._pages, salt=salt)[part]
        batch = WriteBatch(keys=keys, plan=self._plan(part), fingerprint=FINGERPRINT)
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
        layers: Sequence[int | None] = range(len(self._shape.ranges)) if by_layer else [None]
        with self.store.open_read(request) as session:
            for layer in layers:
                if set(session.read(self._plan(part, layer), HostAccess())) != {ReadStatus.OK}:
                    message = "not everything was read"
                    raise RuntimeError(message)


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


def rows_of(what: str, times: Times, moved: int) -> Iterator[Row]:
    """Yield the comparison with the client, and the one with a copy of as many bytes."""
    yield Row(
        topic=TOPIC,
        what=what,
        against="redis-py, the same bytes",
        ratio=times.ratio("client", "ours"),
        figures=times.figures("client", "ours"),
        target=TARGET,
        why_missed="the client stops at bytes; the store also checks them and copies them to scattered pages",
    )
    if moved:
        yield Row(
            topic=TOPIC,
            what=what,
            against=f"memcpy of {size(moved)}",
            ratio=times.ratio("memcpy", "ours"),
            figures=times.figures("memcpy", "ours"),
        )


def measure_shape(port: int, shape: Shape, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one shape, with one and with two threads."""
    pages = max(2, scale.choose(96 * MIB, 2 * MIB) // shape.object_bytes)
    moved = pages * shape.object_bytes
    block = np.random.default_rng(1).integers(0, 255, (pages, shape.object_bytes), dtype=np.uint8)
    target = np.empty_like(block)
    client, ours = Client(port, shape, block), Ours(port, shape, pages)
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
                f"{action}, {with_threads}", in_turn(both, rounds=scale.rounds), moved
            )
    client.forget()
    ours.store.close()


def measure_lookup(port: int, scale: Scale) -> Iterator[Row]:
    """Yield the row of a lookup of absent objects, which has no bytes to copy."""
    shape = SHAPES[1]
    client = Client(port, shape, np.empty((0, shape.object_bytes), dtype=np.uint8))
    ours = Ours(port, shape, 2)
    keys = object_keys(scale.choose(LOOKED_UP, 128), salt=10**6)
    names = [f"kvlinker:{{{key.hex()}}}" for key in keys]
    both = {
        "ours": timed(lambda: ours.store.exists(keys)),
        "client": timed(lambda: client.look_up(names)),
    }
    yield from rows_of(f"lookup of {len(keys)} keys", in_turn(both, rounds=scale.rounds), 0)
    ours.store.close()


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    binary = shutil.which("redis-server")
    if binary is None:
        reason = "Error: redis-server is not installed: apt-get install redis-server"
        yield missing_peer(TOPIC, "everything", "redis-py, the same bytes", reason)
        return
    with redis_server(binary) as port:
        for shape in SHAPES:
            yield from measure_shape(port, shape, scale)
        yield from measure_lookup(port, scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
