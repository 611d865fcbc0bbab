"""A breaker remembers that a server is down, so that it costs one wait and not one for each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Whether a server is asked; after a pause, one call tries."""

    def __init__(
        self, *, pause_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a breaker that lets calls through, and refuses them for a while once it is opened."""
        self._pause = pause_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until: float | None = None

    def may_ask(self) -> bool:
        """Return whether a call may be made; after the pause one is, and the others wait for what becomes of it."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            self._open_until = self._clock() + self._pause
            return True

    def open(self) -> None:
        """Note that a call was given up."""
        with self._lock:
            self._open_until = self._clock() + self._pause

    def close(self) -> None:
        """Note an answer."""
        with self._lock:
            self._open_until = None
