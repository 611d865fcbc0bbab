"""Failures: each is logged once, with pool, key and store, and counted."""

from __future__ import annotations

import logging

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
    ) -> None:
        """Log one failure and count it as `<what>_errors`.

        Only the error's text is kept: its traceback would keep frames, and with them tensors, alive.
        """
        self._metrics.count(f"{what}_errors")
        shown = "-" if key is None else key.hex()
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        logger.warning(
            "%s failed: store=%s pool=%s key=%s: %s", what, self._store, pool or "-", shown, text
        )
