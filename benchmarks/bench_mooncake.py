"""Compare the Mooncake store with Mooncake's own client on the same ranges, and with a copy in memory, over TCP.

The client moves as many ranges of the same lengths between a segment in another process and one registered block,
and once more between the segment and registered pools; the store moves pages between the segment and its own pools,
straight or through host memory where it compares checksums, and answers for each object. Clients listen on every
interface, so that all of it runs in a network namespace of its own, which needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import itertools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from measuring import Row, Scale, missing_peer, run_script
from numpy.typing import NDArray
from remote_stores import (
    SHAPES,
    Contest,
    PageClient,
    Pages,
    RawClient,
    Shape,
    measure_lookup,
    measure_shape,
    wait_for_port,
)

from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions
from kvlinker_mooncake import raw_client as mooncake

TOPIC = "Mooncake store"
CLIENT = "Mooncake's client, the same ranges"
BUFFERS = 960
SEGMENT_BYTES = 3 << 30
"""Of one store and its client: what both wrote of all shapes, since what was read stays leased and is not removed."""
LEASE_MS = 120_000
"""Longer than any measurement: a client's reads fail when a lease ends between them, however busy the machine is."""
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
UP_AND_RUNNING = 0x41
WHY_STRAIGHT = (
    "After each read, and so once for a layer, the store asks the master where the objects are: "
    "a round trip and two changes of thread that the client does not make. A lease that lasts does not spare it: "
    "a master that was started anew knows of no leases. Scattered pages take the client itself longer than one block."
)
WHY_STAGED = (
    "Pages go through host memory and get a header and checksums: each byte is copied once more than the client "
    "does, and both use up the two cores, so that copies beside the next transfer end no sooner."
)
WHY_LOOKUP = (
    "Both ask the master once; the store makes its names from keys, and asks on another thread, so that a deadline "
    "holds whatever the client does."
)
SEGMENT = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def own_network() -> Iterator[None]:
    """Let this thread, and what it starts, see nothing but loopback for the length of a block."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise PermissionError(ctypes.get_errno(), "a network namespace needs root")
        try:
            with socket.socket() as control:
                request = struct.pack("16sh14x", b"lo", UP_AND_RUNNING)
                fcntl.ioctl(control, SIOCSIFFLAGS, request)
            yield
        finally:
            libc.setns(before, CLONE_NEWNET)
    finally:
        os.close(before)


@contextmanager
def cluster() -> Iterator[str]:
    """Run a master and a segment for the length of a block; give the master's address."""
    spec = importlib.util.find_spec("mooncake.store")
    if spec is None or spec.origin is None:
        message = "mooncake is not installed"
        raise FileNotFoundError(message)
    binary = Path(spec.origin).with_name("mooncake_master")
    binary.chmod(0o755)  # wheels carry no permissions
    with (
        socket.create_server(("127.0.0.1", 0)) as probe,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port, metrics = (int(server.getsockname()[1]) for server in (probe, other))
    settings = (
        *(f"--rpc_port={port}", f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"),
        f"--default_kv_lease_ttl={LEASE_MS}",
    )
    with Path(os.devnull).open("wb") as nowhere:
        master = subprocess.Popen(
            [str(binary), "--rpc_address=127.0.0.1", *settings], stdout=nowhere, stderr=nowhere
        )
        try:
            wait_for_port(port)
            address = f"127.0.0.1:{port}"
            with subprocess.Popen(
                [sys.executable, "-c", SEGMENT, address, str(SEGMENT_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=nowhere,
            ) as segment:
                try:
                    _wait_for_word(segment.stdout)
                    yield address
                finally:
                    segment.kill()
        finally:
            master.kill()
            master.wait()


def _wait_for_word(stream: IO[bytes] | None) -> None:
    """Wait until a segment says that it is ready."""
    while stream is not None and (line := stream.readline()) != b"ready\n":
        if not line:
            message = "the segment did not join"
            raise FileNotFoundError(message)


class Calls:
    """Calls of Mooncake's client, as many buffers in each as its transport queues."""

    def __init__(
        self, raw: mooncake.RawClient, shape: Shape, prefix: str, addresses: Sequence[Sequence[int]]
    ) -> None:
        """Take a client that has joined, and the address of every range of each object: registered memory."""
        self._raw = raw
        self._shape = shape
        self._prefix = prefix
        self._addresses = addresses
        self._each = max(1, BUFFERS // len(shape.ranges))
        self._offsets = [0, *itertools.accumulate(shape.ranges[:-1])]
        self._config = mooncake.replicate_config(MooncakeStoreOptions(master="127.0.0.1:1"))

    def _groups(self, part: slice) -> Iterator[tuple[list[str], list[list[int]]]]:
        """Yield names and the addresses of all ranges, some objects at a time."""
        numbers = range(len(self._addresses))[part]
        for start in range(0, len(numbers), self._each):
            chosen = numbers[start : start + self._each]
            names = [f"{self._prefix}/{i}" for i in chosen]
            yield names, [list(self._addresses[i]) for i in chosen]

    def put(self, part: slice) -> None:
        """Write some objects, in the place of those that were written before: they would stay as they are."""
        sizes, offsets = list(self._shape.ranges), list(self._offsets)
        for names, pointers in self._groups(part):
            count = len(names)
            self._raw.batch_remove(names, force=True)
            lengths = [self._shape.object_bytes] * count
            _expect(self._raw.batch_put_session_start(names, lengths, self._config), 0)
            moved = self._raw.batch_put_from_multi_buffer_ranges(
                names, pointers, [sizes] * count, [offsets] * count
            )
            _expect(moved, self._shape.object_bytes)
            _expect(self._raw.batch_put_session_end(names), 0)

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        sizes = list(self._shape.ranges)
        for names, pointers in self._groups(part):
            moved = self._raw.batch_get_into_multi_buffers(names, pointers, [sizes] * len(names))
            _expect(moved, self._shape.object_bytes)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer, in sessions of the client."""
        for layer, size in enumerate(self._shape.ranges):
            for names, pointers in self._groups(part):
                if not layer:
                    _expect(self._raw.batch_get_session_start(names), 0)
                count = len(names)
                moved = self._raw.batch_get_into_multi_buffer_ranges(
                    names,
                    [[each[layer]] for each in pointers],
                    [[size]] * count,
                    [[self._offsets[layer]]] * count,
                )
                _expect(moved, size)

    def forget(self) -> None:
        """Remove what was written."""
        for names, _ in self._groups(slice(None)):
            self._raw.batch_remove(names, force=True)


class Client(RawClient):
    """Mooncake's client: ranges of one registered block."""

    def __init__(
        self, raw: mooncake.RawClient, shape: Shape, block: NDArray[np.uint8], prefix: str
    ) -> None:
        """Take a client that has joined, and the bytes of all objects: uint8 [objects, bytes]."""
        self._raw = raw
        self._shape = shape
        self._block = block
        self._prefix = prefix
        self._paged: PagedClient | None = None
        starts = [0, *itertools.accumulate(shape.ranges[:-1])]
        firsts = [block.ctypes.data + i * shape.object_bytes for i in range(len(block))]
        addresses = [[first + start for start in starts] for first in firsts]
        self._calls = Calls(raw, shape, prefix, addresses)
        if len(block):
            _expect([raw.register_buffer(block.ctypes.data, block.nbytes)], 0)

    def put(self, part: slice) -> None:
        """See RawClient."""
        self._calls.put(part)

    def get(self, part: slice) -> None:
        """See RawClient."""
        self._calls.get(part)

    def get_ranges(self, part: slice) -> None:
        """See RawClient."""
        self._calls.get_ranges(part)

    def from_pages(self, pages: Pages) -> PageClient:
        """Let the client move ranges from and to registered pages, which it can."""
        self._paged = PagedClient(self._raw, self._shape, f"{self._prefix} paged", pages)
        self._paged.put(slice(None))
        return self._paged

    def forget(self) -> None:
        """Remove what was written."""
        self._calls.forget()
        self._raw.unregister_buffer(self._block.ctypes.data)
        if self._paged is not None:
            self._paged.forget()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for objects that nobody wrote."""
        _expect(self._raw.batch_is_exist(list(names)), 0)


class PagedClient(PageClient):
    """Mooncake's client: ranges of registered pools."""

    def __init__(self, raw: mooncake.RawClient, shape: Shape, prefix: str, pages: Pages) -> None:
        """Register the pools."""
        self._raw = raw
        self._buffers = pages.pool.buffers
        addresses = [pages.addresses(number) for number in range(len(pages.block))]
        self._calls = Calls(raw, shape, prefix, addresses)
        for buffer in self._buffers:
            _expect([raw.register_buffer(buffer.ctypes.data, buffer.nbytes)], 0)

    def put(self, part: slice) -> None:
        """See PageClient."""
        self._calls.put(part)

    def get(self, part: slice) -> None:
        """See PageClient."""
        self._calls.get(part)

    def get_ranges(self, part: slice) -> None:
        """See PageClient."""
        self._calls.get_ranges(part)

    def forget(self) -> None:
        """Remove what was written, and let go of the pools."""
        self._calls.forget()
        for buffer in self._buffers:
            self._raw.unregister_buffer(buffer.ctypes.data)


def _expect(codes: Sequence[int], expected: int) -> None:
    if any(code != expected for code in codes):
        message = f"{set(codes)} in the place of {expected}"
        raise RuntimeError(message)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    with ExitStack() as stack:
        try:
            raw = mooncake.make_raw_client()
            stack.enter_context(own_network())
        except (OSError, NotImplementedError) as error:
            yield missing_peer(TOPIC, "everything", CLIENT, f"Error: {error}")
            return
        for staged in (False, True):
            yield from _measure_kind(raw, scale, staged=staged)


def _measure_kind(raw: mooncake.RawClient, scale: Scale, *, staged: bool) -> Iterator[Row]:
    """Yield the rows of one way to move pages, on a cluster of its own."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(cluster())
        except OSError as error:
            yield missing_peer(TOPIC, "everything", CLIENT, f"Error: {error}")
            return
        _expect([raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address)], 0)
        yield from _rows(contest(raw, address, staged=staged), scale)
        raw.close()


def contest(raw: mooncake.RawClient, address: str, *, staged: bool) -> Contest:
    """Return what is compared; every store and client has names of its own, since what was read cannot be removed."""
    numbers = itertools.count()

    def options() -> MooncakeStoreOptions:
        return MooncakeStoreOptions(
            master=address,
            prefix=f"store{next(numbers)}",
            staged=staged,
            reads="whole" if staged else "ranged",
            buffer_bytes=0,
            lease_seconds=LEASE_MS / 1000,
            contended_seconds=0.1,
        )

    return Contest(
        topic=TOPIC,
        client=CLIENT.partition(",")[0],
        make_client=lambda shape, block: Client(raw, shape, block, f"raw{next(numbers)}"),
        open_store=lambda: MooncakeStore(options()),
        where="staged, " if staged else "straight, ",
        why_missed=WHY_STAGED if staged else WHY_STRAIGHT,
        why_lookup=WHY_LOOKUP,
    )


def _rows(contest: Contest, scale: Scale) -> Iterator[Row]:
    """Yield the rows; of one shape where no figures are wanted."""
    for shape in SHAPES if scale.choose(1, 0) else SHAPES[1:2]:
        yield from measure_shape(contest, shape, scale)
    yield from measure_lookup(contest, scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
