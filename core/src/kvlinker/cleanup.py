"""Cleanup lets go of a store's holds and sessions in a thread of its own, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.failures import FailureLog
from kvlinker.lanes import Lane

__all__ = ["Cleanup"]


class Cleanup:
    """Releases that a store may fail or hang at: neither stops a lookup or a load."""

    def __init__(self, failures: FailureLog, *, seconds: float) -> None:
        """Make a cleanup that leaves a release behind once it hangs longer than `seconds`."""
        self._failures = failures
        self._lane = Lane("cleanup", task_seconds=seconds)

    def later(self, release: Callable[[], None]) -> bool:
        """Release soon; False where no thread is left for it. Then the store's own expiry has to do."""
        return not self._lane.submit(lambda: self.now(release)).was_dropped

    def now(self, release: Callable[[], None]) -> None:
        """Release in this thread; a failure is reported and ends here."""
        try:
            release()
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            self._failures.report("release", error)

    def close(self, seconds: float) -> None:
        """Let what is queued run for at most `seconds`, and end the thread. Idempotent."""
        self._lane.submit(_nothing).wait(seconds)
        self._lane.close(0)


def _nothing() -> None:
    """Mark the end of the queue."""
