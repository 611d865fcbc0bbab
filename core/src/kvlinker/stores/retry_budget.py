"""A retry budget lets a share of all calls be repeated: when everything fails, little more is asked than before."""

from __future__ import annotations

import threading

__all__ = ["RetryBudget"]

_MAX_RETRIES = 10.0
"""Retries that may follow each other at once, after a time in which none was needed."""


class RetryBudget:
    """Retries that calls have earned and that were not used yet."""

    def __init__(self, share: float) -> None:
        """Begin with as many as may follow each other.

        Args:
            share: retries that each call earns.
        """
        self._share = share
        self._left = _MAX_RETRIES
        self._lock = threading.Lock()

    def earn(self) -> None:
        """Note a call."""
        with self._lock:
            self._left = min(_MAX_RETRIES, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; False where none is left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True
