"""Waiting for what another thread or process does: until it is so, and never by a guess of how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from kvlinker.testing.verdicts import fail

__all__ = ["wait_for"]

_LIMIT_SECONDS = 60.0
"""More than any machine takes: what does not come by then never does."""
_PAUSE_SECONDS = 0.001


def wait_for(
    is_so: Callable[[], object],
    what: str,
    *,
    despite: tuple[type[Exception], ...] = (),
    pause_seconds: float = _PAUSE_SECONDS,
) -> None:
    """Return once something is so.

    Args:
        is_so: is asked again and again; what is true of it ends the wait.
        what: is waited for, for the message.
        despite: errors that say that it is not so yet, as those of a server that is left alone for a while.
        pause_seconds: between two questions.

    Raises:
        AssertionError: it did not come within a minute.
    """
    end = time.monotonic() + _LIMIT_SECONDS
    while True:
        with suppress(*despite):
            if is_so():
                return
        if time.monotonic() > end:
            fail(f"waited {_LIMIT_SECONDS:g} s in vain for {what}")
        time.sleep(pause_seconds)
