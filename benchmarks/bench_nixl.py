"""Compare the NIXL store with NIXL itself on the same bytes, and with a copy in memory.

Objects lie in a file, in the memory of another process, and in a bucket; pages go through host memory of the store, or
straight from and to the pools. NIXL itself moves each object as one range of a block, and asks for its end without a
pause; and once more it moves every range from and to the same scattered pages. The bucket's server is on loopback, one
process that takes a core of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from bench_s3 import BUCKET, s3_server
from measuring import Row, Scale, missing_peer, run_script
from numpy.typing import NDArray
from pages import MIB, object_keys
from remote_stores import (
    MOVED_IN_MEMORY,
    SHAPES,
    Contest,
    CopyingClient,
    PageClient,
    Pages,
    RawClient,
    Shape,
    measure_lookup,
    measure_shape,
)

from kvlinker.secret_references import SecretReference
from kvlinker_nixl import Backend, NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Agent, Descriptors
from kvlinker_nixl.library import ClientAgent, load_client
from kvlinker_nixl.messages import keys_as_text, number_of, numbers_of
from kvlinker_nixl.moving import descriptors
from kvlinker_nixl.peer_depot import Channel

TOPIC = "NIXL store"
CAPACITY = 1 << 30
WHY_MISSED = (
    "NIXL moves a block in one piece, since it merges what lies side by side: one copy in memory; the store also makes "
    "the checksum of every range, and where it is staged copies it to a place of its own in the same pass: a second "
    "pass beside the first on another core, with which it shares the memory's speed. What is offloaded goes past the "
    "cache into the block that NIXL takes it from, and is read from memory twice. Straight, every range is a transfer "
    "of its own, and a file that was written so lies in smaller pieces of the page cache, which take longer to read. "
    "The rows of the same pages have the scattered ranges on both sides"
)
WHY_MISSED_OBJECTS = (
    "before an offload the store asks for each object's length, and before a load for lengths and headers, each a "
    "question of its own that the server takes as long for as for a range"
)
SERVER_KEY = "benchmark"
"""Name and secret of a key; the server takes any."""
ENDLESS = 1 << 40
"""Objects are registered longer than any is."""
NEAR = {"UCX_TLS": "self,sm,tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}


class Client(RawClient):
    """NIXL itself: one transfer for each call."""

    def __init__(self, shape: Shape, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes]."""
        self.shape = shape
        self.block = block
        self.offsets = np.arange(len(block), dtype=np.int64) * shape.object_bytes

    @abstractmethod
    def move(self, operation: str, local: Descriptors, starts: NDArray[np.int64]) -> None:
        """Move ranges of the block from or to their places."""

    @abstractmethod
    def register(self, address: int, size: int) -> None:
        """Let ranges of memory be moved."""

    def from_pages(self, pages: Pages) -> PageClient:
        """See RawClient; NIXL can do that by itself."""
        return ScatteredClient(self, pages)

    def put(self, part: slice) -> None:
        """Write some objects."""
        self._move("WRITE", part, 0, self.shape.object_bytes)

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        self._move("READ", part, 0, self.shape.object_bytes)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""
        start = 0
        for length in self.shape.ranges:
            self._move("READ", part, start, length)
            start += length

    def _move(self, operation: str, part: slice, start: int, size: int) -> None:
        rows = self.block[part]
        addresses = rows.ctypes.data + start + np.arange(len(rows)) * rows.strides[0]
        self.move(operation, descriptors(addresses, size, 0), self.offsets[part] + start)


class ScatteredClient(PageClient):
    """A client that moves every range of an object from or to its page, all in one transfer."""

    def __init__(self, client: Client, pages: Pages) -> None:
        """Register the pages."""
        self._client, self._memory = client, pages  # what is registered stays allocated
        for buffer in pages.pool.buffers:
            client.register(buffer.ctypes.data, buffer.nbytes)
        self._addresses = np.array([pages.addresses(i) for i in range(len(pages.block))])
        self._sizes = np.array(pages.ranges)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def put(self, part: slice) -> None:
        """See PageClient."""
        self._move("WRITE", part, slice(None))

    def get(self, part: slice) -> None:
        """See PageClient."""
        self._move("READ", part, slice(None))

    def get_ranges(self, part: slice) -> None:
        """See PageClient."""
        for layer in range(len(self._sizes)):
            self._move("READ", part, slice(layer, layer + 1))

    def _move(self, operation: str, part: slice, layers: slice) -> None:
        addresses = self._addresses[part, layers]
        sizes = np.broadcast_to(self._sizes[layers], addresses.shape)
        starts = self._client.offsets[part, None] + self._starts[layers]
        local = descriptors(addresses.reshape(-1), sizes.reshape(-1), 0)
        self._client.move(operation, local, starts.reshape(-1))


def transfer(agent: ClientAgent, operation: str, sides: tuple[object, object], peer: str) -> None:
    """Move ranges, and ask for the end without a pause."""
    local, remote = sides
    handle = agent.initialize_xfer(operation, local, remote, peer)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        message = f"a transfer ended as {state}"
        raise RuntimeError(message)


class FileClient(Client):
    """A file beside the store's."""

    def __init__(self, shape: Shape, block: NDArray[np.uint8], path: Path) -> None:
        """Make the file, as long as it will be."""
        super().__init__(shape, block)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, max(1, block.nbytes))
        self._agent = load_client().make_agent("file")
        self._agent.create_backend("POSIX", {"use_aio": "true"})
        self.register(block.ctypes.data, max(1, block.nbytes))
        self._agent.register_memory([(0, 1 << 60, self._fd, "")], "FILE")

    def register(self, address: int, size: int) -> None:
        """See Client."""
        self._agent.register_memory([(address, size, 0, "")], "DRAM")

    def move(self, operation: str, local: Descriptors, starts: NDArray[np.int64]) -> None:
        """See Client."""
        agent = self._agent
        remote = descriptors(starts, local[:, 1].astype(np.int64), self._fd)
        sides = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "FILE")
        transfer(agent, operation, sides, "file")

    def forget(self) -> None:
        """See RawClient."""
        os.close(self._fd)
        self._path.unlink()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for files by name, which is what NIXL can be asked for."""
        if any((self._path.parent / name).exists() for name in names):
            message = "files were found that nobody wrote"
            raise RuntimeError(message)


class PeerClient(Client):
    """Places in the same server, reserved and not given to the store."""

    def __init__(self, shape: Shape, block: NDArray[np.uint8], address: tuple[str, int]) -> None:
        """Reserve them."""
        super().__init__(shape, block)
        self._agent = Agent(load_client(), "UCX", {}, advice="see UCX_TLS")
        self._raw = self._agent.client
        self.register(block.ctypes.data, max(1, block.nbytes))
        self._channel = Channel(address, self._agent, answer_seconds=10, pause_seconds=1)
        keys = keys_as_text(object_keys(len(block), salt=10**5))
        answer = self._channel.ask("reserve", keys=keys, bytes=shape.object_bytes)
        self._number = number_of(answer, "number")
        self.offsets = np.array(numbers_of(answer, "offsets", len(block)), dtype=np.int64)

    def register(self, address: int, size: int) -> None:
        """See Client."""
        self._raw.register_memory([(address, size, 0, "")], "DRAM")

    def move(self, operation: str, local: Descriptors, starts: NDArray[np.int64]) -> None:
        """See Client."""
        target = self._channel.target
        remote = descriptors(starts + target.base, local[:, 1].astype(np.int64), 0)
        agent = self._raw
        sides = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        transfer(agent, operation, sides, target.peer)

    def forget(self) -> None:
        """See RawClient."""
        self._channel.ask("discard", number=self._number)
        self._channel.close()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask the server, which is ours, since NIXL knows no names."""
        self._channel.ask("exists", keys="".join(names))


@runtime_checkable
class AskedAgent(ClientAgent, Protocol):
    """An agent that can be asked what there is, which the store has no use for."""

    def query_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], backend: str, mem_type: str
    ) -> Sequence[object]:
        """Return what is known of each, None where there is nothing."""
        ...


class ObjectClient(Client):
    """Objects of the same bucket, registered by their names."""

    def __init__(
        self, shape: Shape, block: NDArray[np.uint8], options: NixlStoreOptions, number: int
    ) -> None:
        """Register the names; `number` is no other client's."""
        super().__init__(shape, block)
        self._folder = f"raw{number}"
        self._agent = load_client().make_agent("objects")
        self._agent.create_backend(
            "OBJ",
            {
                "bucket": options.bucket,
                "region": options.region,
                "endpoint_override": options.endpoint,
                "scheme": "http",
                "use_virtual_addressing": "false",
                "access_key": SERVER_KEY,
                "secret_key": SERVER_KEY,
                "req_checksum": "required",
            },
        )
        self.register(block.ctypes.data, max(1, block.nbytes))
        names = [(0, ENDLESS, number, f"{self._folder}/{number}") for number in range(len(block))]
        if names:
            self._agent.register_memory(names, "OBJ")

    def register(self, address: int, size: int) -> None:
        """See Client."""
        self._agent.register_memory([(address, size, 0, "")], "DRAM")

    def from_pages(self, pages: Pages) -> PageClient:
        """See RawClient; an object is written as one piece, so that ranges are copied."""
        return CopyingClient(self, pages)

    def move(self, operation: str, local: Descriptors, starts: NDArray[np.int64]) -> None:
        """See Client; an offset of the block is an object and an offset in it."""
        agent = self._agent
        numbers, offsets = np.divmod(starts, self.shape.object_bytes)
        remote = descriptors(offsets, local[:, 1].astype(np.int64), 0)
        remote[:, 2] = numbers
        sides = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "OBJ")
        transfer(agent, operation, sides, "objects")

    def forget(self) -> None:
        """See RawClient; the objects end with their server."""

    def look_up(self, names: Sequence[str]) -> None:
        """Ask whether objects are there, as many at once as NIXL takes."""
        if not isinstance(self._agent, AskedAgent):
            message = "the installed NIXL cannot be asked for objects"
            raise TypeError(message)
        asked = [(0, 0, 0, f"{self._folder}/{name}") for name in names]
        if any(one is not None for one in self._agent.query_memory(asked, "OBJ", "OBJ")):
            message = "objects were found that nobody wrote"
            raise RuntimeError(message)


@contextmanager
def peer_server() -> Iterator[int]:
    """Run a peer server on a free port for the length of a block; give the port."""
    command = [sys.executable, "-m", "kvlinker_nixl", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--capacity", str(CAPACITY)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **NEAR},
    )
    try:
        line = server.stdout.readline() if server.stdout is not None else ""
        yield int(line.rpartition(":")[2])
    finally:
        server.terminate()
        server.communicate()


def measure_place(contest: Contest, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one place; of one shape where no figures are wanted."""
    for shape in SHAPES if scale.choose(1, 0) else SHAPES[1:2]:
        yield from measure_shape(contest, shape, scale)
    yield from measure_lookup(contest, scale)


def in_a_file(folder: Path, *, staged: bool) -> Contest:
    """Return what is compared in a file."""
    numbers = itertools.count()

    def options() -> NixlStoreOptions:
        return NixlStoreOptions(
            backend=Backend.POSIX,
            path=folder / f"store {next(numbers)}",
            capacity=CAPACITY,
            staged=staged,
        )

    return Contest(
        topic=TOPIC,
        client="NIXL",
        make_client=lambda shape, block: FileClient(shape, block, folder / f"raw {next(numbers)}"),
        open_store=lambda: open_nixl_store(options()),
        moved=MOVED_IN_MEMORY,
        where="in a file, staged, " if staged else "in a file, straight, ",
        why_missed=WHY_MISSED,
    )


def in_a_peer(port: int, *, staged: bool) -> Contest:
    """Return what is compared in the memory of a peer."""
    options = NixlStoreOptions(backend=Backend.UCX, server=f"127.0.0.1:{port}", staged=staged)
    return Contest(
        topic=TOPIC,
        client="NIXL",
        make_client=lambda shape, block: PeerClient(shape, block, options.address),
        open_store=lambda: open_nixl_store(options),
        moved=MOVED_IN_MEMORY,
        where="in a peer, staged, " if staged else "in a peer, straight, ",
        why_missed=WHY_MISSED,
    )


def in_a_bucket(port: int, secret: Path) -> Contest:
    """Return what is compared in a bucket, whose pages go through host memory in any case."""
    numbers = itertools.count()
    options = NixlStoreOptions(
        backend=Backend.OBJ,
        bucket=BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        access_key=SERVER_KEY,
        secret_key=SecretReference.of_value(f"${{file:{secret}}}"),
    )
    return Contest(
        topic=TOPIC,
        client="NIXL",
        make_client=lambda shape, block: ObjectClient(shape, block, options, next(numbers)),
        open_store=lambda: open_nixl_store(options),
        moved=8 * MIB,
        looked_up=256,
        where="in a bucket, ",
        why_missed=WHY_MISSED_OBJECTS,
    )


def measure_bucket(scale: Scale) -> Iterator[Row]:
    """Yield the rows of a bucket, or why there are none."""
    for module, package in {"obstore": "obstore", "moto": "'moto[s3]' flask flask-cors"}.items():
        if importlib.util.find_spec(module) is None:
            reason = f"Error: {module} is not installed: pip install {package}"
            yield missing_peer(TOPIC, "in a bucket", "NIXL, the same bytes", reason)
            return
    with tempfile.TemporaryDirectory() as folder, s3_server() as port:
        secret = Path(folder) / "secret"
        secret.write_text(SERVER_KEY)
        yield from measure_place(in_a_bucket(port, secret), scale)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    if importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl") is None:
        yield missing_peer(TOPIC, "everything", "NIXL", "Error: NIXL is not installed")
        return
    os.environ.update(NEAR)
    for staged in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            yield from measure_place(in_a_file(Path(folder), staged=staged), scale)
        with peer_server() as port:
            yield from measure_place(in_a_peer(port, staged=staged), scale)
    yield from measure_bucket(scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
