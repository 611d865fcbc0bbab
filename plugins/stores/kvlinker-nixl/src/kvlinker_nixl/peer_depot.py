"""A peer depot asks a peer server where objects lie, and knows when the server is not the one that it asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreClosedError, StoreContractError, StoreError, StoreTimeoutError
from kvlinker.frames import MAX_RANGES, header_bytes
from kvlinker.guard import Breaker
from kvlinker.store import ObjectKey, StoreStats
from kvlinker_nixl.agents import Agent, Memory
from kvlinker_nixl.depots import ABSENT, FULL, Depot, Pins, Reservation
from kvlinker_nixl.messages import (
    Message,
    bytes_of,
    flags_of,
    keys_as_text,
    number_of,
    numbers_of,
    receive,
    send,
    text_of,
    within,
)
from kvlinker_nixl.moving import Target
from kvlinker_nixl.peer_server import PROTOCOL

__all__ = ["Channel", "PeerDepot"]

_MAX_ADDRESS = 1 << 62
"""Of anything in a server's memory: sums of two fit in every kind of number."""


class Channel:
    """A connection to a server, for one direction, and the agent that reaches its memory; it is made anew at need."""

    def __init__(
        self, address: tuple[str, int], agent: Agent, *, answer_seconds: float, pause_seconds: float
    ) -> None:
        """Ask nothing yet.

        Args:
            address: host and port.
            agent: is told how to reach the server's memory.
            answer_seconds: how long the server may take to answer.
            pause_seconds: how long it is not asked after it did not.
        """
        self._address = address
        self._agent = agent
        self._seconds = answer_seconds
        self._breaker = Breaker(pause_seconds=pause_seconds)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_closed = False
        self._epoch = ""
        self.connections = 0
        """How often a connection was made: what a server knew of an older one is forgotten."""
        self.target = Target(memory=Memory.HOST)
        """The server's memory, after the first answer."""
        self.max_frame_bytes = 0

    def __str__(self) -> str:
        """Return where the server is, for messages."""
        return f"nixl store UCX {self._address[0]}:{self._address[1]}"

    def ask(self, call: str, *, connection: int | None = None, **fields: object) -> Message:
        """Return the server's answer; see `ask_with_place`."""
        return self.ask_with_place(call, connection=connection, **fields)[0]

    def ask_with_place(
        self, call: str, *, connection: int | None = None, **fields: object
    ) -> tuple[Message, Place]:
        """Return the server's answer, and where its numbers and offsets are true.

        Args:
            call: what is asked.
            connection: the one that numbers among the fields belong to; None where there are none.
            fields: of the message.

        Raises:
            StoreTimeoutError: the server cannot be reached, or not in time, or could not be lately.
            StoreError: it refuses, or the numbers mean nothing to it any more.
        """
        with self._lock:
            for is_last in (False, True):
                was_there = self._connection is not None
                self._connect()
                if connection not in (None, self.connections):
                    msg = (
                        f"{self}: the connection was lost, and what was reserved or pinned with it"
                    )
                    raise StoreError(msg)
                try:
                    answer = self._exchange({"call": call, "epoch": self._epoch, **fields})
                except OSError as error:
                    self._disconnect()
                    if was_there and not is_last and not isinstance(error, TimeoutError):
                        continue  # a server that was restarted since the last question
                    raise self._down(error) from None
                except StoreContractError:
                    self._disconnect()  # what else comes may be taken for the next answer
                    raise
                return self._checked(answer), Place(self.connections, self.target)
        msg = f"{self}: no connection lasts"
        raise StoreTimeoutError(msg)

    def _checked(self, answer: Message) -> Message:
        if "error" in answer:
            msg = f"{self}: the server refuses: {answer['error']}"
            raise StoreError(msg)
        return answer

    def _exchange(self, message: Message) -> Message:
        deadline = time.monotonic() + self._seconds
        if self._connection is None:
            msg = "there is no connection"
            raise ConnectionResetError(msg)
        send(self._connection, message, deadline=deadline)
        return receive(self._connection, deadline=deadline)

    def _down(self, error: OSError) -> StoreTimeoutError:
        self._breaker.trip()
        what = error.strerror or error
        msg = f"{self}: the server cannot be asked: {what}; does `python -m kvlinker_nixl serve` run there?"
        return StoreTimeoutError(msg)

    def _connect(self) -> None:
        if self._is_closed:
            msg = f"{self}: the store was closed; open it again"
            raise StoreClosedError(msg)
        if self._connection is not None:
            return
        if not self._breaker.allow():
            msg = f"{self}: the server could not be asked lately, and is not asked again yet"
            raise StoreTimeoutError(msg)
        timeouts = self._breaker.timeouts
        try:
            self._connection = socket.create_connection(self._address, timeout=self._seconds)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._take(self._exchange({"call": "hello"}))
        except (StoreError, StoreContractError):
            self._disconnect()
            raise
        except OSError as error:
            self._disconnect()
            raise self._down(error) from None
        self._breaker.succeed(timeouts=timeouts)

    def _take(self, welcome: Message) -> None:
        """Take over what a server says of itself; another one's memory is forgotten."""
        if number_of(welcome, "protocol") != PROTOCOL:
            msg = f"{self}: the server speaks another protocol; use the same kvlinker-nixl on both sides"
            raise StoreError(msg)
        self.connections += 1
        epoch = text_of(welcome, "epoch")
        if epoch == self._epoch:
            return
        (base,) = within([number_of(welcome, "base")], "base", 0, _MAX_ADDRESS)
        if self.target.peer:
            self._agent.remove_peer(self.target.peer)
        peer = self._agent.add_peer(bytes_of(welcome, "metadata"))
        self.target = Target(memory=Memory.HOST, base=base, peer=peer)
        self.max_frame_bytes = number_of(welcome, "max_frame_bytes")
        self._epoch = epoch

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._disconnect()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer is true: another thread may have made another connection behind it, to another server."""

    connection: int
    target: Target


class PeerDepot(Depot):
    """A depot whose space is a server's."""

    def __init__(self, reads: Channel, writes: Channel) -> None:
        """Ask the server who it is.

        Raises:
            StoreError: it cannot be asked.
        """
        self._reads = reads
        self._writes = writes
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, int], int] = {}
        """Which connection pins and reservations were made on, by peer and number."""
        self._held = 0
        self._holds: dict[int, tuple[int, int]] = {}
        """The connection and the server's number of each hold: a server that was restarted counts anew."""
        reads.ask("stats")

    @property
    def max_frame_bytes(self) -> int:
        """See Depot."""
        return self._reads.max_frame_bytes

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Depot."""
        answer = self._reads.ask("exists", keys=keys_as_text(keys))
        return flags_of(answer, "flags", len(keys))

    # ---- writing --------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[ObjectKey], frame_bytes: int) -> Reservation:
        """See Depot."""
        answer, place = self._writes.ask_with_place(
            "reserve", keys=keys_as_text(keys), bytes=frame_bytes
        )
        reservation = Reservation(
            number=number_of(answer, "number"),
            offsets=_offsets_of(answer, len(keys), least=FULL),
            target=place.target,
        )
        self._note(place, reservation)
        return reservation

    def publish(self, reservation: Reservation) -> tuple[bool, ...]:
        """See Depot."""
        answer = self._ask(self._writes, "publish", reservation)
        self._forget(reservation)
        return flags_of(answer, "flags", len(reservation.offsets))

    def discard(self, reservation: Reservation) -> None:
        """See Depot; a server without a right answer has let go of it, or does when it finds the connection gone."""
        self._end(self._writes, "discard", reservation)

    # ---- reading --------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ObjectKey], object_bytes: int) -> Pins:
        """See Depot."""
        answer, place = self._reads.ask_with_place(
            "pin", keys=keys_as_text(keys), bytes=object_bytes
        )
        offsets = _offsets_of(answer, len(keys), least=ABSENT)
        pins = Pins(
            number=number_of(answer, "number"),
            offsets=offsets,
            header_bytes=_headers_of(answer, offsets),
            target=place.target,
        )
        self._note(place, pins)
        return pins

    def unpin(self, pins: Pins) -> None:
        """See Depot; see `discard`."""
        self._end(self._reads, "unpin", pins)

    def is_current(self, pins: Pins) -> bool:
        """See Depot."""
        connection = self._connections.get(_name(pins))
        return connection == self._reads.connections and pins.target == self._reads.target

    def find_current(self, pins: Pins) -> bool:
        """See Depot."""
        with suppress(StoreError, StoreContractError):
            self._reads.ask("stats")  # a connection that is gone is made anew
        return self.is_current(pins)

    def drop(self, pins: Pins, keys: Sequence[ObjectKey], positions: Sequence[int]) -> None:
        """See Depot."""
        del keys  # the server knows them
        self._ask(self._reads, "drop", pins, positions=list(positions))

    def hold(self, keys: Sequence[ObjectKey], seconds: float) -> tuple[int, tuple[bool, ...]]:
        """See Depot."""
        milliseconds = max(1, round(seconds * 1000))
        answer, place = self._reads.ask_with_place(
            "hold", keys=keys_as_text(keys), milliseconds=milliseconds
        )
        flags = flags_of(answer, "flags", len(keys))
        with self._lock:
            self._held += 1
            self._holds[self._held] = place.connection, number_of(answer, "number")
            return self._held, flags

    def release(self, number: int) -> None:
        """See Depot; see `discard`."""
        with self._lock:
            connection, its_number = self._holds.pop(number, (-1, 0))
        if connection != self._reads.connections:
            return
        with suppress(StoreError, StoreContractError):
            self._reads.ask("release", connection=connection, number=its_number)

    # ---- numbers --------------------------------------------------------------------------------

    def _note(self, place: Place, given: Pins | Reservation) -> None:
        with self._lock:
            self._connections[_name(given)] = place.connection

    def _forget(self, given: Pins | Reservation) -> int | None:
        with self._lock:
            return self._connections.pop(_name(given), None)

    def _ask(
        self, channel: Channel, call: str, given: Pins | Reservation, **fields: object
    ) -> Message:
        connection = self._connections.get(_name(given), -1)
        return channel.ask(call, connection=connection, number=given.number, **fields)

    def _end(self, channel: Channel, call: str, given: Pins | Reservation) -> None:
        connection = self._forget(given)
        if connection is None or connection != channel.connections:
            return
        with suppress(StoreError, StoreContractError):
            channel.ask(call, connection=connection, number=given.number)

    # ---- removing -------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Depot."""
        answer = self._reads.ask("delete", keys=keys_as_text(keys))
        return flags_of(answer, "flags", len(keys))

    def clear(self, namespace: bytes) -> int:
        """See Depot."""
        return number_of(self._reads.ask("clear", namespace=namespace.hex()), "count")

    def stats(self) -> StoreStats:
        """See Depot."""
        answer = self._reads.ask("stats")
        counters = answer.get("counters")
        found = counters.items() if isinstance(counters, dict) else ()
        return StoreStats(
            objects=number_of(answer, "objects"),
            used_bytes=number_of(answer, "used_bytes"),
            capacity_bytes=number_of(answer, "capacity_bytes"),
            counters={
                name: value
                for name, value in found
                if isinstance(name, str) and isinstance(value, int)
            },
        )

    def close(self) -> None:
        """See Depot."""
        self._reads.close()
        self._writes.close()


def _offsets_of(answer: Message, count: int, *, least: int) -> IndexArray:
    offsets = numbers_of(answer, "offsets", count)
    return np.array(within(offsets, "offsets", least, _MAX_ADDRESS), dtype=np.int64)


def _headers_of(answer: Message, offsets: IndexArray) -> IndexArray:
    """Return how long the headers of objects are, each as one of an object may be; 0 where there is none."""
    headers = numbers_of(answer, "headers", len(offsets))
    there = [
        size for size, offset in zip(headers, offsets.tolist(), strict=True) if offset != ABSENT
    ]
    within(there, "headers", header_bytes(1), header_bytes(MAX_RANGES))
    return np.array(within(headers, "headers", 0, header_bytes(MAX_RANGES)), dtype=np.int64)


def _name(given: Pins | Reservation) -> tuple[str, int]:
    return given.target.peer, given.number
