"""Blocks of host memory are registered with an agent and used again: headers and staged pages go through them."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvlinker_nixl.agents import Agent, Memory, Registration, Transfer

__all__ = ["Block", "Blocks", "Loan"]

_KEPT = 16
"""Three of each call whose pages go through them."""
_MIN_BYTES = 1 << 16
_POLL_SECONDS = 0.005


class Block:
    """Some registered memory, which begins on a page."""

    def __init__(self, agent: Agent, size: int) -> None:
        """Make and register it.

        Raises:
            StoreError: the client refuses.
        """
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self._registration: Registration = agent.register(
            [(self.address, size, 0, "")], Memory.HOST
        )
        self.is_late = False
        """Whether a transfer may still touch it."""
        self.loan: object = None
        """Of the borrower, who gives it back unless a late transfer has it."""
        self.then: Callable[[], object] | None = None
        """What is done when the late transfer is over."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.nbytes

    def rows(self, count: int, row_bytes: int) -> NDArray[np.uint8]:
        """Return its beginning as rows: uint8 [count, row_bytes]."""
        return self.memory[: count * row_bytes].reshape(count, row_bytes)

    def release(self) -> None:
        """Take the registration back; the memory goes with the last view of it."""
        self._registration.release()


class Blocks:
    """Blocks that nobody uses now, and those that a late transfer may still touch."""

    def __init__(self, agent: Agent, max_bytes: int) -> None:
        """Keep no block that is longer."""
        self._agent = agent
        self._max = max_bytes
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._late: list[tuple[Transfer, Block]] = []
        self._is_closed = False

    @contextmanager
    def borrow(self, size: int) -> Iterator[Block]:
        """Lend a block for the length of a `with`; see `lend`.

        Raises:
            StoreError: a new one cannot be registered.
        """
        loan = self.lend(size)
        try:
            yield loan.block
        finally:
            loan.end()

    def lend(self, size: int) -> Loan:
        """Lend a block of at least so many bytes, with anything in it; a late transfer keeps it longer.

        Raises:
            StoreError: a new one cannot be registered.
        """
        return Loan(self, self.take(size))

    def take(self, size: int) -> Block:
        """Return a block of at least so many bytes, with anything in it.

        Raises:
            StoreError: a new one cannot be registered.
        """
        self.sweep()
        with self._lock:
            for at, block in enumerate(self._free):
                if block.size >= size:
                    return self._free.pop(at)
        return Block(self._agent, max(_MIN_BYTES, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))

    def give(self, block: Block) -> None:
        """Let a block be taken again; the longest ones are kept."""
        with self._lock:
            if self._is_closed or block.size > self._max:
                left = [block]
            else:
                # Of those that are alike the last one is taken first: the processor's cache may have it still.
                self._free = sorted([block, *self._free], key=lambda one: one.size)
                left, self._free = self._free[:-_KEPT], self._free[-_KEPT:]
        for one in left:
            one.release()

    def keep_until_over(self, transfer: Transfer, block: Block) -> None:
        """Take over a block that a transfer may touch, for as long as it may."""
        with self._lock:
            block.is_late, block.loan = True, None
            self._late.append((transfer, block))

    def when_over(self, block: Block, then: Callable[[], object]) -> None:
        """Do something once no transfer touches a block any more: now, or behind a late one."""
        with self._lock:
            if block.is_late:
                block.then = then
                return
        then()

    def sweep(self) -> int:
        """Let go of what late transfers are done with; return how many are left."""
        with self._lock:
            over = [one for one in self._late if one[0].has_ended()]
            self._late = [one for one in self._late if one not in over]
            left = len(self._late)
        for transfer, block in over:
            transfer.release()
            with self._lock:
                block.is_late = False
                then, block.then = block.then, None
            if then is not None:
                then()
            self.give(block)
        return left

    def close(self, *, seconds: float) -> bool:
        """Release every block. Idempotent.

        Args:
            seconds: how long late transfers are waited for; a thread goes on to wait where that is not enough.

        Returns:
            Whether none is left.
        """
        end = time.monotonic() + seconds
        while self.sweep() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            free, self._free = self._free, []
            is_late = bool(self._late)
        for block in free:
            block.release()
        if is_late and was_open:
            threading.Thread(target=self._wait, name="kvlinker-nixl-late", daemon=True).start()
        return not is_late

    def _wait(self) -> None:
        while self.sweep():
            time.sleep(_POLL_SECONDS * 20)


class Loan:
    """A block of somebody, until the loan is ended; who forgets that loses the block, and nobody else gets it."""

    def __init__(self, blocks: Blocks, block: Block) -> None:
        """Take a block that nobody uses."""
        self.block = block
        self._blocks = blocks
        block.loan = self

    def end(self) -> None:
        """Give the block back. Idempotent."""
        # Else it was given back behind the late transfer, and may be somebody else's by now.
        if self.block.loan is self:
            self.block.loan = None
            self._blocks.give(self.block)
