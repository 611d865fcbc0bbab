"""A peer server lends its memory to other processes: they write pages there and read them, and it says where.

Bytes go through UCX, past this process; what goes over the socket is where they are. Whatever a client had reserved,
pinned or held is let go of when its connection ends.
"""

from __future__ import annotations

import base64
import logging
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from kvlinker.errors import KVLinkerError, StoreContractError
from kvlinker_nixl.agents import Agent, Memory
from kvlinker_nixl.depots import LocalDepot, Pins, Reservation
from kvlinker_nixl.library import Client, load_client
from kvlinker_nixl.messages import (
    Message,
    digits_of,
    keys_of,
    number_of,
    numbers_of,
    receive,
    send,
    text_of,
    within,
)
from kvlinker_nixl.moving import Target
from kvlinker_nixl.peer_memory import PeerMemory, memory_layout
from kvlinker_nixl.space import Space

__all__ = ["PROTOCOL", "PeerServer"]

_log = logging.getLogger(__name__)

PROTOCOL = 1
_ANSWER_SECONDS = 10.0
_MAX_OBJECT_BYTES = 1 << 62
_BUSY_POLL_SECONDS = 0.0002
"""Between two looks at the backend while somebody reads or writes: a part of a percent of a core each."""


class PeerServer:
    """Memory that other processes keep objects in."""

    def __init__(
        self,
        capacity: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        client: Client | None = None,
    ) -> None:
        """Take the memory, and listen.

        Args:
            capacity: bytes of memory.
            host: that is listened on; who reaches it can read and replace every object.
            port: 0 for any that is free.
            client: NIXL, where it is loaded already.

        Raises:
            StoreError: NIXL or its UCX cannot be had.
            OSError: the port is taken.
        """
        self.epoch = uuid.uuid4().hex
        """Tells this server from another one at the same address: what is known of one is not true of the other."""
        layout = memory_layout(capacity)
        self._room = PeerMemory(layout)
        self._agent = Agent(
            client or load_client(),
            "UCX",
            {},
            advice="is UCX_TLS set to something that this machine has?",
        )
        place = (self._room.address, self._room.memory.nbytes, 0, "")
        self._registration = self._agent.register([place], Memory.HOST)
        self._depot = LocalDepot(
            Space(layout, self._room),
            self._room,
            capacity=capacity,
            target=Target(memory=Memory.HOST),
        )
        self._work = threading.Event()
        self._is_closed = False
        self._server = _Listener((host, port), self)
        names = {"listen": self._listen, "progress": self._progress}
        self._threads = [
            threading.Thread(target=run, name=f"kvlinker-nixl-{name}", daemon=True)
            for name, run in names.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port, *_ = self._server.server_address
        return str(host), int(port)

    @property
    def depot(self) -> LocalDepot:
        """What says where objects are."""
        return self._depot

    def welcome(self) -> Message:
        """Return what a client must know."""
        return {
            "protocol": PROTOCOL,
            "epoch": self.epoch,
            "metadata": base64.b64encode(self._agent.metadata).decode(),
            "base": self._room.address,
            "max_frame_bytes": self._depot.max_frame_bytes,
        }

    def wake(self) -> None:
        """Look at the backend for as long as somebody reads or writes."""
        self._work.set()

    def _listen(self) -> None:
        self._server.serve_forever(poll_interval=3600)  # a shutdown wakes it by a connection

    def _progress(self) -> None:
        """Let the backend answer while bytes may move, and sleep otherwise."""
        while not self._is_closed:
            self._work.wait()
            self._agent.progress()
            if not self._depot.is_busy:
                self._work.clear()
                if not self._depot.is_busy:
                    continue
                self._work.set()
            time.sleep(_BUSY_POLL_SECONDS)

    def close(self) -> None:
        """End; every object is gone. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        with suppress(OSError):
            socket.create_connection(self.address, timeout=1).close()
        stopper.join()
        self._server.server_close()
        self._server.end_connections()
        self._work.set()
        for thread in self._threads:
            thread.join()
        self._registration.release()


class _Listener(socketserver.ThreadingTCPServer):
    """Takes connections for a server."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: PeerServer) -> None:
        super().__init__(address, _Connection)
        self.owner = owner
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def note(self, connection: socket.socket, *, is_open: bool) -> None:
        """Note that a connection was made, or is over."""
        with self._lock:
            if is_open:
                self._open.add(connection)
            else:
                self._open.discard(connection)

    def end_connections(self) -> None:
        """End what is open: a client sees that the server is gone, and not one that is silent."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    """One client, or one direction of one."""

    request: socket.socket

    def setup(self) -> None:
        """See BaseRequestHandler."""
        if not isinstance(self.server, _Listener):
            msg = f"a connection of a peer server was made by a {type(self.server).__name__}"
            raise TypeError(msg)
        self._owner = self.server.owner
        self.server.note(self.request, is_open=True)
        self._depot = self._owner.depot
        self._reserved: dict[int, Reservation] = {}
        self._pinned: dict[int, Pins] = {}
        self._held: set[int] = set()
        self._calls: Mapping[str, Callable[[Message], Message]] = {
            "hello": lambda _: self._owner.welcome(),
            "exists": lambda message: {"flags": list(self._depot.exists(keys_of(message)))},
            "reserve": self._reserve,
            "publish": self._publish,
            "discard": self._discard,
            "pin": self._pin,
            "unpin": self._unpin,
            "drop": self._drop,
            "hold": self._hold,
            "release": self._release,
            "delete": lambda message: {"flags": list(self._depot.delete(keys_of(message)))},
            "clear": self._clear,
            "stats": self._stats,
        }

    def handle(self) -> None:
        """See BaseRequestHandler."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                message = receive(self.request, deadline=None)
                answer = self._answer(message)
                send(self.request, answer, deadline=time.monotonic() + _ANSWER_SECONDS)
            except (OSError, StoreContractError):
                return

    def finish(self) -> None:
        """See BaseRequestHandler."""
        if isinstance(self.server, _Listener):
            self.server.note(self.request, is_open=False)
        for reservation in self._reserved.values():
            self._depot.discard(reservation)
        for pins in self._pinned.values():
            self._depot.unpin(pins)
        for number in self._held:
            self._depot.release(number)

    def _answer(self, message: Message) -> Message:
        name = text_of(message, "call")
        if name != "hello" and message.get("epoch") != self._owner.epoch:
            return {"error": "another epoch"}
        call = self._calls.get(name)
        if call is None:
            return {"error": f"no call {name!r}"}
        try:
            return call(message)
        except KVLinkerError as error:
            return {"error": str(error)}

    # ---- calls ----------------------------------------------------------------------------------

    def _reserve(self, message: Message) -> Message:
        (size,) = within([number_of(message, "bytes")], "bytes", 1, _MAX_OBJECT_BYTES)
        reservation = self._depot.reserve(keys_of(message), size)
        self._reserved[reservation.number] = reservation
        self._owner.wake()
        return {"number": reservation.number, "offsets": reservation.offsets.tolist()}

    def _publish(self, message: Message) -> Message:
        reservation = self._reserved.pop(number_of(message, "number"), None)
        if reservation is None:
            return {"error": "no such reservation"}
        return {"flags": list(self._depot.publish(reservation))}

    def _discard(self, message: Message) -> Message:
        reservation = self._reserved.pop(number_of(message, "number"), None)
        if reservation is not None:
            self._depot.discard(reservation)
        return {}

    def _pin(self, message: Message) -> Message:
        pins = self._depot.pin(keys_of(message), number_of(message, "bytes"))
        self._pinned[pins.number] = pins
        self._owner.wake()
        return {
            "number": pins.number,
            "offsets": pins.offsets.tolist(),
            "headers": pins.header_bytes.tolist(),
        }

    def _unpin(self, message: Message) -> Message:
        pins = self._pinned.pop(number_of(message, "number"), None)
        if pins is not None:
            self._depot.unpin(pins)
        return {}

    def _drop(self, message: Message) -> Message:
        pins = self._pinned.get(number_of(message, "number"))
        positions = np.array(numbers_of(message, "positions"), dtype=np.int64)
        if pins is not None and (positions >= 0).all():
            self._depot.drop(pins, (), positions.tolist())
        return {}

    def _hold(self, message: Message) -> Message:
        seconds = number_of(message, "milliseconds") / 1000
        number, present = self._depot.hold(keys_of(message), seconds)
        self._held.add(number)
        return {"number": number, "flags": list(present)}

    def _release(self, message: Message) -> Message:
        number = number_of(message, "number")
        if number in self._held:
            self._held.remove(number)
            self._depot.release(number)
        return {}

    def _clear(self, message: Message) -> Message:
        return {"count": self._depot.clear(digits_of(message, "namespace"))}

    def _stats(self, _message: Message) -> Message:
        found = self._depot.stats()
        return {
            "objects": found.objects,
            "used_bytes": found.used_bytes,
            "capacity_bytes": found.capacity_bytes,
            "counters": dict(found.counters),
        }
