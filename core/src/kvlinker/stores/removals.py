"""Removals keep what was removed removed, while copies of it are still on their way between tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Removal", "Removals"]

_WAIT_SECONDS = 5.0
"""A copy that takes longer to become visible than this hangs, and removals go on without it."""


class Removal:
    """One removal, whose end is known once it is over."""

    def __init__(self) -> None:
        self.since: int | None = None
        """Where the block has ended: what copies that begin now remember; None where another removal ran beside."""


class Removals:
    """Tells copies whether what they copy may have been removed since they began.

    A copy that was begun before a removal, or during one, is refused; one that is about to be visible when a
    removal begins is waited for, and removed with the rest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._removing = 0
        self._publishing: set[object] = set()
        self._hanging: set[object] = set()

    @property
    def count(self) -> int:
        """Removals begun and ended so far; a copy remembers it when it begins."""
        return self._count

    @contextmanager
    def removing(self) -> Iterator[Removal]:
        """Refuse copies as long as the block runs, and all that were begun before its end."""
        removal = Removal()
        with self._changed:
            self._count += 1
            self._removing += 1
            is_alone, begun = self._removing == 1, self._count
            self._wait_for_publishing()
        try:
            yield removal
        finally:
            with self._changed:
                is_alone = is_alone and self._count == begun
                self._count += 1
                self._removing -= 1
                removal.since = self._count if is_alone else None

    def _wait_for_publishing(self) -> None:
        """Wait for copies that are about to be visible; for each that hangs, one removal waits."""
        waited = self._publishing - self._hanging
        deadline = time.monotonic() + _WAIT_SECONDS
        while waited & self._publishing and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        self._hanging |= waited & self._publishing

    @contextmanager
    def copying(self, since: int) -> Iterator[Callable[[], bool]]:
        """Yield the permission to publish copies that were begun at a count; the block ends behind them."""
        copy = object()

        def may_publish() -> bool:
            with self._changed:
                allowed = self._count == since and not self._removing
                if allowed:
                    self._publishing.add(copy)
                return allowed

        try:
            yield may_publish
        finally:
            with self._changed:
                self._publishing.discard(copy)
                self._hanging.discard(copy)
                self._changed.notify_all()
