"""Notices: warnings that could come with every write, said at once and then at most once a minute each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Notices"]

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 60.0


class Notices:
    """What one opener says of its trouble; a full disk must not fill the log, which may lie on it."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Say it of a store at a path, by a clock in seconds."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}
        """What was said to when, and how often it was left out since."""

    def warn(self, what: str, why: object) -> None:
        """Log what went wrong, unless the same was logged less than a minute ago: then it is counted for the next time.

        Args:
            what: the kind of trouble, one of few constant texts.
            why: the case at hand.
        """
        now = self._clock()
        with self._lock:
            last, left_out = self._said.get(what, (now - _PAUSE_SECONDS, 0))
            is_due = now - last >= _PAUSE_SECONDS
            self._said[what] = (now, 0) if is_due else (last, left_out + 1)
        if is_due:
            more = f" ({left_out} more like it since the last line)" if left_out else ""
            _log.warning("%s: %s: %s%s", self._path, what, why, more)
