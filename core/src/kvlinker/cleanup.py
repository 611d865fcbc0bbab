"""Cleanup lets go of a store's holds and sessions in a thread of its own, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.failures import FailureLog
from kvlinker.lanes import Lane

__all__ = ["Cleanup"]


class Cleanup:
    """Releases that a store may fail or hang at: neither stops a lookup, a load or a close."""

    def __init__(self, failures: FailureLog, *, seconds: float) -> None:
        """Make a cleanup that leaves a release behind once it hangs longer than `seconds`."""
        self._failures = failures
        self._lane = Lane("cleanup", task_seconds=seconds)

    def later(self, release: Callable[[], None], *, what: str = "release") -> bool:
        """Release soon; False where no thread is left for it. Then the store's own expiry has to do.

        Args:
            release: what a store may fail or hang at.
            what: the call that a failure is counted for.
        """
        return not self._lane.submit(lambda: self.now(release, what=what)).was_dropped

    def now(self, release: Callable[[], None], *, what: str = "release") -> None:
        """Release in this thread; a failure is reported and ends here."""
        try:
            release()
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            self._failures.report(what, error)

    def close(self, seconds: float) -> bool:
        """Let what is queued run for at most `seconds`, and end the thread; False if it did not. Idempotent."""
        return self._lane.finish(seconds)
