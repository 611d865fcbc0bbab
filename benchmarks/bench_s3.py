"""Compare the object store with obstore itself on the same bytes, and with a copy in memory.

Objects lie in a server of S3's kind on loopback, which is one process and takes a core of its own, and then in a
directory, where nothing but the file system stands between; obstore's own calls run as many at once as the store's.
"""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from measuring import Row, Scale, missing_peer, run_script
from numpy.typing import NDArray
from pages import MIB
from remote_stores import MOVED, SHAPES, Contest, RawClient, Shape, measure_lookup, measure_shape

from kvlinker_s3 import S3Store, S3StoreOptions
from kvlinker_s3.client import open_client

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TOPIC = "Object store"
BUCKET = "kv-pages"
FOLDER = "raw"
WHY_MISSED = (
    "obstore copies files out of the system's cache into buffers that are dropped at once, so that their memory is "
    "used again while the processor has it at hand; the store's bytes end in the pools' pages, all of which are "
    "written, and the checksum of every range is made on the way. By layer, a few pages take less time to copy than "
    "Python takes to compare and place them, in which two threads take turns"
)
"""Of loads from a directory, whose files are in the system's cache here."""
START_SECONDS = 60.0
OK = 200


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's server on a free port for the length of a block; give the port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_SECONDS
        while not _makes_bucket(port):
            if time.monotonic() > end:
                message = f"moto did not start on port {port}"
                raise RuntimeError(message)
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


def _makes_bucket(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", f"/{BUCKET}")
        return connection.getresponse().status == OK
    except OSError:
        return False
    finally:
        connection.close()


class Client(RawClient):
    """obstore itself: objects from a block of memory and back as buffers."""

    def __init__(
        self, options: S3StoreOptions, shape: Shape, block: NDArray[np.uint8], number: int
    ) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes], and a number that no other client has."""
        self._client: ObjectStore = open_client(options)
        self._threads = ThreadPoolExecutor(options.concurrency)
        self._shape = shape
        self._block = block
        self._folder = f"{FOLDER}{number}"

    def _each(self, part: slice, ask: Callable[[int], object]) -> None:
        for _ in self._threads.map(ask, range(len(self._block))[part]):
            pass

    def put(self, part: slice) -> None:
        """Write some objects."""
        self._each(
            part,
            lambda i: self._client.put(
                f"{self._folder}/{i}", self._block[i].data, use_multipart=False
            ),
        )

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        self._get(part, 0, self._shape.object_bytes)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""
        start = 0
        for length in self._shape.ranges:
            self._get(part, start, length)
            start += length

    def _get(self, part: slice, start: int, length: int) -> None:
        def ask(number: int) -> None:
            name = f"{self._folder}/{number}"
            (value,) = self._client.get_ranges(name, starts=[start], lengths=[length])
            if len(value) != length:
                message = f"{len(value)} B in the place of {length}"
                raise RuntimeError(message)

        self._each(part, ask)

    def forget(self) -> None:
        """Remove what was written."""
        self._client.delete([f"{self._folder}/{i}" for i in range(len(self._block))])
        self._threads.shutdown()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for objects one by one."""

        def is_there(name: str) -> bool:
            try:
                self._client.head(f"{self._folder}/{name}")
            except FileNotFoundError:
                return False
            return True

        if any(self._threads.map(is_there, names)):
            message = "objects were found that nobody wrote"
            raise RuntimeError(message)


def contest_of(
    options: S3StoreOptions, where: str, *, moved: int, looked_up: int, why_missed: str = ""
) -> Contest:
    """Return what is compared in one place."""
    numbers = itertools.count()
    return Contest(
        topic=TOPIC,
        client="obstore",
        make_client=lambda shape, block: Client(options, shape, block, next(numbers)),
        open_store=lambda: S3Store(options),
        moved=moved,
        looked_up=looked_up,
        where=where,
        why_missed=why_missed,
    )


def measure_place(contest: Contest, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one place; of one shape where no figures are wanted."""
    for shape in SHAPES if scale.choose(1, 0) else SHAPES[1:2]:
        yield from measure_shape(contest, shape, scale)
    yield from measure_lookup(contest, scale)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    if importlib.util.find_spec("obstore") is None:
        yield missing_peer(TOPIC, "everything", "obstore", "Error: obstore is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        options = S3StoreOptions(url=Path(folder).as_uri())
        place = contest_of(
            options, "in a directory, ", moved=MOVED, looked_up=4096, why_missed=WHY_MISSED
        )
        yield from measure_place(place, scale)
    if importlib.util.find_spec("moto") is None:
        reason = "Error: moto is not installed: pip install 'moto[s3]' flask flask-cors"
        yield missing_peer(TOPIC, "in a server", "obstore, the same bytes", reason)
        return
    with tempfile.TemporaryDirectory() as folder, s3_server() as port:
        secret = Path(folder) / "secret"
        secret.write_text("any will do")
        options = S3StoreOptions(
            url=f"s3://{BUCKET}",
            settings={
                "endpoint": f"http://127.0.0.1:{port}",
                "region": "us-east-1",
                "access_key_id": "benchmark",
                "secret_access_key": f"${{file:{secret}}}",
                "virtual_hosted_style_request": False,
            },
        )
        place = contest_of(options, "in a server, ", moved=16 * MIB, looked_up=512)
        yield from measure_place(place, scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
