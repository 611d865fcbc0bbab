"""A line moves bytes one way: an agent of its own, a breaker, and a deadline for every transfer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.guard import Breaker
from kvlinker_nixl.agents import Agent, Descriptors, Memory, Operation, Registration, Transfer
from kvlinker_nixl.blocks import Block, Blocks

__all__ = ["LateTransferError", "Line", "LineLimits", "Target", "descriptors", "wait_for"]

_MAX_DESCRIPTORS = 8192
"""Ranges of one transfer: backends have queues of limited length."""
_FIRST_POLL_SECONDS = 0.00002
_MAX_POLL_SECONDS = 0.001
_MORE = 1.2
"""Each pause is so much longer than the last one, and a sixth of all of them at most."""
_WORKING_SECONDS = 0.00001
"""A question that takes longer has moved something: the next few of many short ranges take little more."""
_CACHED_BYTES = 8 << 20
"""So much is looked at again while it is in the processor's last cache; with less, calls cost more than memory."""
_LEAST_BYTES = 4 << 20
"""Of which what is done once for each transfer costs little."""
_TURNS = 5
"""Transfers of one call: what is done behind the last one, and before the second, goes on beside none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a store's objects lie, as a transfer names the place."""

    memory: Memory
    device: int = 0
    """Descriptor of a file."""
    base: int = 0
    """Address of offset 0."""
    peer: str = ""
    """The agent that has it; empty for the line's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """How much at once, and how long to wait."""

    transfer_seconds: float
    pause_seconds: float
    call_bytes: int
    close_seconds: float
    errors_add_up: bool = True
    """Whether failed transfers in a row say that nothing works; not where one object may fail a transfer."""


def descriptors(
    addresses: Sequence[int] | NDArray[np.int64],
    sizes: int | NDArray[np.int64],
    device: int,
) -> Descriptors:
    """Return ranges as NIXL takes them: [ranges, 3]."""
    table = np.empty((len(addresses), 3), dtype=np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = addresses, sizes, device
    return table


class Line:
    """Transfers of one direction: a load never waits behind an offload."""

    def __init__(self, agent: Agent, label: str, limits: LineLimits) -> None:
        """Take an agent that nobody else uses.

        Args:
            agent: moves the bytes.
            label: of the store and the direction, for messages.
            limits: see LineLimits.
        """
        self.agent = agent
        self.limits = limits
        self.blocks = Blocks(agent, limits.call_bytes)
        self.breaker = Breaker(pause_seconds=limits.pause_seconds)
        self._label = label
        self._process = os.getpid()
        self._is_closed = False
        self._idle = threading.Condition()
        self._moves = 0
        self._numbers = 0
        self.kept: list[Registration] = []
        """Of files that transfers name; released with the line."""

    def bytes_at_once(self, total: int, *, is_cached: bool) -> int:
        """Return how many of some bytes to move before they are looked at, which others are moved beside.

        Args:
            total: bytes of a call.
            is_cached: memory is what limits, and not a device: then no more than a cache has.
        """
        most = _CACHED_BYTES if is_cached else self.limits.call_bytes
        return min(max(total // _TURNS, _LEAST_BYTES), most, self.limits.call_bytes)

    def __str__(self) -> str:
        """Return the store and the direction, for messages."""
        return self._label

    def numbers(self, count: int) -> range:
        """Return numbers that no other object of this line was registered by."""
        with self._idle:
            self._numbers += count
            return range(self._numbers - count, self._numbers)

    def check_open(self) -> None:
        """Do nothing while the store is open in this process.

        Raises:
            StoreClosedError: it was closed, or belongs to the process that this one was forked from.
        """
        if self._is_closed:
            msg = f"{self}: the store was closed; open it again"
            raise StoreClosedError(msg)
        if self._process != os.getpid():
            msg = f"{self}: the store belongs to the process {self._process} and is closed in its child; open another"
            raise StoreClosedError(msg)

    def move(
        self,
        operation: Operation,
        local: Descriptors,
        remote: Descriptors,
        target: Target,
        *,
        block: Block | None = None,
        memory: Memory = Memory.HOST,
    ) -> None:
        """Move range i of local memory from or to range i of the target, and return when that is over.

        Args:
            operation: which way.
            local: addresses in this process.
            remote: offsets in the target.
            target: where that is.
            block: what the local ranges lie in. None for pool memory: then nothing is left behind, and a
                transfer that is late is waited for, since it cannot be taken back.
            memory: kind of the local addresses.

        Raises:
            StoreTimeoutError: the transfer took longer than it may, or one did lately.
            StoreError: it failed; nobody knows what was moved.
        """
        if target.base:
            remote = remote + np.array([target.base, 0, 0], dtype=np.uint64)
        with self._moving():
            for part in self._parts(local):
                sides = (memory, local[part]), (target.memory, remote[part])
                self._move(operation, *sides, target, block)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Let nothing be released while bytes move."""
        with self._idle:
            self.check_open()
            self._moves += 1
        try:
            yield
        finally:
            with self._idle:
                self._moves -= 1
                self._idle.notify_all()

    def _parts(self, local: Descriptors) -> Iterator[slice]:
        """Yield ranges that go in one transfer."""
        if len(local) <= _MAX_DESCRIPTORS and int(local[:, 1].sum()) <= self.limits.call_bytes:
            yield slice(None)
            return
        ends = np.cumsum(local[:, 1])
        first, limit = 0, np.uint64(self.limits.call_bytes)
        while first < len(ends):
            done = ends[first - 1] if first else np.uint64(0)
            last = int(np.searchsorted(ends, done + limit, side="right"))
            last = min(max(last, first + 1), first + _MAX_DESCRIPTORS)
            yield slice(first, last)
            first = last

    def _move(
        self,
        operation: Operation,
        local: tuple[Memory, Descriptors],
        remote: tuple[Memory, Descriptors],
        target: Target,
        block: Block | None,
    ) -> None:
        if not self.breaker.allow():
            msg = f"{self}: a transfer did not end lately, and none is begun yet"
            raise StoreTimeoutError(msg)
        timeouts = self.breaker.timeouts
        try:
            transfer = self.agent.begin(operation, local, remote, target.peer or self.agent.name)
        except StoreError as error:
            self.breaker.fail()
            msg = f"{self}: {len(local[1])} ranges were refused with {error}; is their memory registered?"
            raise StoreError(msg) from None
        self._finish(transfer, block)
        if transfer.problem:
            if self.limits.errors_add_up:
                self.breaker.fail()
            msg = f"{self}: a transfer of {len(local[1])} ranges failed with {transfer.problem}"
            raise StoreError(msg)
        self.breaker.succeed(timeouts=timeouts)

    def _finish(self, transfer: Transfer, block: Block | None) -> None:
        """Wait for a transfer, and release it.

        Raises:
            StoreTimeoutError: it is late.
        """
        seconds = self.limits.transfer_seconds
        if wait_for(transfer, seconds):
            transfer.release()
            return
        self.breaker.trip()
        if block is None:
            wait_for(transfer, None)
            transfer.release()
        else:
            self.blocks.keep_until_over(transfer, block)
        msg = f"{self}: a transfer took longer than {seconds} s (transfer_seconds)"
        raise LateTransferError(msg)

    def close(self) -> bool:
        """Begin no more transfers, wait for those that run, and release what was registered. Idempotent.

        Returns:
            Whether no byte moves any more. Otherwise what a transfer may touch stays registered.
        """
        with self._idle:
            self._is_closed = True
            is_idle = self._idle.wait_for(lambda: not self._moves, self.limits.close_seconds)
        is_quiet = (
            self.blocks.close(seconds=self.limits.close_seconds if is_idle else 0) and is_idle
        )
        while is_quiet and self.kept:
            self.kept.pop().release()
        return is_quiet


class LateTransferError(StoreTimeoutError):
    """A transfer was not over in time; a block that it may touch was taken over from the caller."""


def wait_for(transfer: Transfer, seconds: float | None) -> bool:
    """Poll until a transfer has ended; False when the time is over first."""
    end = None if seconds is None else time.monotonic() + seconds
    pause = _FIRST_POLL_SECONDS
    asked = time.monotonic()
    while not transfer.has_ended():
        now = time.monotonic()
        if end is not None and now >= end:
            return False
        if now - asked > _WORKING_SECONDS:
            pause = (
                _FIRST_POLL_SECONDS  # files are read and written while the client is asked: ask on
            )
        else:
            time.sleep(pause)
            pause = min(pause * _MORE, _MAX_POLL_SECONDS)
        asked = time.monotonic()
    return True
