"""Failures: each is logged once, with pool, key and store, and counted."""

from __future__ import annotations

import logging
import traceback

from kvlinker.guard import BreakerOpenError
from kvlinker.metrics import LinkerMetrics
from kvlinker.store import ObjectKey

__all__ = ["FailureLog"]

logger = logging.getLogger(__name__)


class FailureLog:
    """Where a linker reports what must not be raised into an engine."""

    def __init__(self, store: str, metrics: LinkerMetrics) -> None:
        """Report for a store of that name."""
        self._store = store
        self._metrics = metrics

    def report(
        self,
        what: str,
        error: BaseException | str,
        *,
        pool: str | None = None,
        key: ObjectKey | None = None,
        outer: BaseException | None = None,
    ) -> None:
        """Log one failure and count it as `<what>_errors`; the traceback is logged at level DEBUG.

        What an open breaker refuses is only counted, as `<what>_refused`: the failure that opened it was logged.

        Only the error's text is kept. Its frames are let go of, also where the store keeps the error:
        they hold pools and indices, which would stay in memory with it.

        Args:
            what: the call that failed, one of `kvlinker.metrics.FAILING_CALLS`.
            error: why.
            pool: where it is known.
            key: of one object, where it is known.
            outer: what the caller was handling before; its frames are not ours to drop.
        """
        if isinstance(error, BreakerOpenError):
            self._metrics.count(f"{what}_refused")
            return
        self._metrics.count(f"{what}_errors")
        shown = "-" if key is None else key.hex()
        text = error if isinstance(error, str) else _text(error)
        logger.warning(
            "%s failed: store=%s pool=%s key=%s: %s", what, self._store, pool or "-", shown, text
        )
        if isinstance(error, BaseException):
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", "".join(traceback.format_tb(error.__traceback__)))
            _forget_frames(error, outer)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # an error of a plugin whose own text fails
        return f"{type(error).__name__} without a text"


def _forget_frames(error: BaseException, outer: BaseException | None) -> None:
    """Drop the tracebacks of an error and of what led to it, up to what was there before."""
    seen = {id(outer)}
    open_errors: list[BaseException | None] = [error]
    while open_errors:
        one = open_errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            open_errors += [one.__cause__, one.__context__]
