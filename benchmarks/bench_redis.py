"""Compare the Redis store with redis-py itself on the same bytes, and with a copy in memory, on loopback.

redis-py moves values of the same length, as many in a pipeline, between a server and one block of memory;
the store moves pages between a server and scattered pool memory, and checks every byte. The server is one
process on the same machine: it takes a core of its own, and its speed is part of both.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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

from kvlinker_redis import RedisStore, RedisStoreOptions

TOPIC = "Redis store"
CALL_BYTES = 8 * MIB
WHY_MISSED = (
    "redis-py ends with bytes objects, which are dropped and whose memory is used again at once; the store ends with "
    "bytes in the pools' pages, all of which are written, and compares the checksum of each before"
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
            wait_for_port(port)
            yield port
        finally:
            server.kill()
            server.wait()


class Client(RawClient):
    """redis-py itself: values from a block of memory and back as bytes."""

    def __init__(self, port: int, shape: Shape, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes]."""
        from redis import Redis

        self._redis = Redis(host="127.0.0.1", port=port, protocol=2)
        self._round = 0
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

    @staticmethod
    def _name(number: int, of_round: int = 0) -> str:
        """Return the name of an object; what is read was written in round 0."""
        return f"raw:{of_round}:{number}"

    def renew(self) -> None:
        """See RawClient."""
        if self._round:
            self._redis.unlink(*[self._name(i, self._round) for i in range(len(self._block))])
        self._round += 1

    def put(self, part: slice) -> None:
        """Write some objects."""
        each = max(1, CALL_BYTES // self._shape.object_bytes)
        numbers = range(len(self._block))[part]
        self._run([("SET", self._name(i, self._round), self._block[i].data) for i in numbers], each)

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        each = max(1, CALL_BYTES // self._shape.object_bytes)
        numbers = range(len(self._block))[part]
        last = self._shape.object_bytes - 1
        for start in range(0, len(numbers), each):
            chunk = numbers[start : start + each]
            _check(self._run([("GETRANGE", self._name(i), 0, last) for i in chunk], each), last + 1)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""
        start = 0
        for length in self._shape.ranges:
            each = min(1024, CALL_BYTES // length)
            numbers = range(len(self._block))[part]
            commands = [("GETRANGE", self._name(i), start, start + length - 1) for i in numbers]
            for first in range(0, len(commands), each):
                _check(self._run(commands[first : first + each], each), length)
            start += length

    def forget(self) -> None:
        """Empty the server."""
        self._redis.flushall()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for values one by one."""
        if sum(
            int(str(reply))
            for reply in self._run([("EXISTS", f"kvlinker:{{{name}}}") for name in names], 1024)
        ):
            message = "values were found that nobody wrote"
            raise RuntimeError(message)


def _check(replies: Sequence[object], length: int) -> None:
    if any(not isinstance(reply, bytes) or len(reply) != length for reply in replies):
        message = f"not every reply has {length} B"
        raise RuntimeError(message)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    binary = shutil.which("redis-server")
    if binary is None:
        reason = "Error: redis-server is not installed: apt-get install redis-server"
        yield missing_peer(TOPIC, "everything", "redis-py, the same bytes", reason)
        return
    with redis_server(binary) as port:
        url = f"redis://127.0.0.1:{port}/0"
        contest = Contest(
            topic=TOPIC,
            client="redis-py",
            make_client=lambda shape, block: Client(port, shape, block),
            why_missed=WHY_MISSED,
            open_store=lambda: RedisStore(RedisStoreOptions(url=url, call_bytes=CALL_BYTES)),
        )
        for shape in SHAPES[1:2] if scale.is_quick else SHAPES:
            yield from measure_shape(contest, shape, scale)
        yield from measure_lookup(contest, scale)


if __name__ == "__main__":
    run_script(__doc__, measure)
