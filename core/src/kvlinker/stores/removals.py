"""Removals keep what was removed removed, while copies of it are still on their way between tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Removals"]

_WAIT_SECONDS = 5.0
"""A copy that takes longer to become visible than this hangs, and a removal goes on without it."""


class Removals:
    """Counts removals: a copy that was begun before one is refused, or waited for where it is about to be visible."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._publishing = 0

    @property
    def count(self) -> int:
        """Removals so far; a copy remembers it when it begins."""
        return self._count

    def note(self) -> None:
        """Refuse every copy that was begun before now; to be called before objects are removed."""
        deadline = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            self._count += 1
            while self._publishing and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    @contextmanager
    def copying(self, since: int) -> Iterator[Callable[[], bool]]:
        """Yield the permission to publish copies that were begun after so many removals; the block ends behind them."""
        asked: list[bool] = []

        def may_publish() -> bool:
            with self._changed:
                allowed = self._count == since
                if allowed and not asked:
                    asked.append(allowed)
                    self._publishing += 1
                return allowed

        try:
            yield may_publish
        finally:
            with self._changed:
                self._publishing -= len(asked)
                self._changed.notify_all()
