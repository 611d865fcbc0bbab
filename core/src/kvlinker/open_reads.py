"""Open reads keep what a session has until the last of them is over, whoever closes the session meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from kvlinker.errors import StoreClosedError

__all__ = ["OpenReads"]


class OpenReads:
    """The reads of one session that are under way."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        """Begin with none.

        Args:
            let_go: of what the session keeps; called once, when it is closed and no read is under way.
        """
        self._let_go = let_go
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False

    def reading(self, pool: str) -> AbstractContextManager[None]:
        """Keep everything for the length of a block.

        Raises:
            StoreClosedError: when the block is entered: the session was closed; the text names the pool.
        """
        return _Reading(self, pool)

    def begin(self, pool: str) -> None:
        """Begin what `end` ends; see `reading`."""
        with self._lock:
            if self._is_closed:
                msg = f"pool {pool!r}: this read session was closed; open another"
                raise StoreClosedError(msg)
            self._count += 1

    def end(self) -> None:
        """End what was begun."""
        with self._lock:
            self._count -= 1
            is_last = self._is_closed and not self._count
        if is_last:
            self._let_go()

    def close(self) -> None:
        """Begin no further read, and let go now or behind the last one. Idempotent."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            is_idle = was_open and not self._count
        if is_idle:
            self._let_go()


class _Reading(AbstractContextManager[None]):
    """One read; a class, since a generator costs a layer of a few pages several times as much."""

    __slots__ = ("_pool", "_reads")

    def __init__(self, reads: OpenReads, pool: str) -> None:
        self._reads = reads
        self._pool = pool

    def __enter__(self) -> None:
        self._reads.begin(self._pool)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reads.end()
