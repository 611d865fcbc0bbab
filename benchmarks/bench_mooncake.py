"""Compare the Mooncake store with Mooncake's own client on the same ranges, and with a copy in memory, over TCP.

The client moves as many ranges of the same lengths between a segment in another process and one registered block;
the store moves pages between the segment and scattered pool memory, and answers for each object. Clients listen on
every interface, so that all of it runs in a network namespace of its own, which needs root.
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
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from measuring import Row, Scale, missing_peer, run_script
from numpy.typing import NDArray
from pages import MIB
from remote_stores import (
    SHAPES,
    Contest,
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
SEGMENT_BYTES = 1 << 30
LEASE_MS = 500
"""Short: what was read is removed when a shape is done, and nothing is removed that is leased."""
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
UP_AND_RUNNING = 0x41
WHY_MISSED = (
    "After each read, and so once for a layer, the store asks the master where the objects are: "
    "a round trip and two changes of thread that the client does not make."
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


class Client(RawClient):
    """Mooncake's client: ranges of one registered block, as many buffers in a call as its transport queues."""

    def __init__(
        self, raw: mooncake.RawClient, shape: Shape, block: NDArray[np.uint8], number: int
    ) -> None:
        """Take a client that has joined, and the bytes of all objects: uint8 [objects, bytes]."""
        self._raw = raw
        self._shape = shape
        self._block = block
        self._number = number
        self._each = max(1, BUFFERS // len(shape.ranges))
        self._offsets = [0, *itertools.accumulate(shape.ranges[:-1])]
        self._config = mooncake.replicate_config(MooncakeStoreOptions(master="127.0.0.1:1"))
        if len(block):
            _expect([raw.register_buffer(block.ctypes.data, block.nbytes)], 0)

    def _groups(self, part: slice) -> Iterator[tuple[list[str], list[list[int]]]]:
        """Yield names and the addresses of all ranges, some objects at a time."""
        numbers = range(len(self._block))[part]
        for start in range(0, len(numbers), self._each):
            chosen = numbers[start : start + self._each]
            firsts = [self._block.ctypes.data + i * self._shape.object_bytes for i in chosen]
            names = [f"raw{self._number}/{i}" for i in chosen]
            yield names, [[first + offset for offset in self._offsets] for first in firsts]

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
        self._raw.unregister_buffer(self._block.ctypes.data)

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for objects that nobody wrote."""
        _expect(self._raw.batch_is_exist(list(names)), 0)


def _expect(codes: Sequence[int], expected: int) -> None:
    if any(code != expected for code in codes):
        message = f"{set(codes)} in the place of {expected}"
        raise RuntimeError(message)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    try:
        raw = mooncake.make_raw_client()
        network = own_network()
        with network, cluster() as address:
            _expect([raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address)], 0)
            yield from _rows(raw, address, scale)
            raw.close()
    except (OSError, NotImplementedError) as error:
        yield missing_peer(TOPIC, "everything", CLIENT, f"Error: {error}")


def _rows(raw: mooncake.RawClient, address: str, scale: Scale) -> Iterator[Row]:
    numbers = itertools.count()
    options = MooncakeStoreOptions(
        master=address, buffer_bytes=0, reads="ranged", lease_seconds=LEASE_MS / 1000
    )
    contest = Contest(
        topic=TOPIC,
        client=CLIENT.partition(",")[0],
        make_client=lambda shape, block: Client(raw, shape, block, next(numbers)),
        open_store=lambda: MooncakeStore(options),
        moved=48 * MIB,
        why_missed=WHY_MISSED,
    )
    for shape in SHAPES if scale.choose(1, 0) else SHAPES[1:2]:
        yield from measure_shape(contest, shape, scale)
    yield from measure_lookup(contest, scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
