"""The layer counter is what an engine's forward waits on, layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvlinker.failures import FailureLog
from kvlinker.load_batch import LoadBatch

__all__ = ["LayerCounter"]


class LayerCounter:
    """Where a forward waits for the layers of a batch; it never raises and never waits for ever."""

    def __init__(
        self,
        find: Callable[[int], LoadBatch | None],
        expire: Callable[[LoadBatch], None],
        failures: FailureLog,
    ) -> None:
        """Wait on the batches that `find` knows; `expire` is called at a batch's deadline."""
        self._find = find
        self._expire = expire
        self._failures = failures
        self._consumer = -1

    @property
    def consumer_index(self) -> int:
        """The batch that is waited on; -1 for none. Engines read it before they wait for several layers."""
        return self._consumer

    def set_consumer(self, index: int) -> None:
        """Wait on the batch that `start_layer_wise_loading` returned; -1 for none."""
        self._consumer = index

    def wait_until(self, layer: int) -> None:
        """Return when every pool's part of the layer has landed, or the batch failed or is unknown."""
        outer = sys.exc_info()[1]
        try:
            batch = self._find(self._consumer)
            if batch is None or layer not in batch.mapped_layers:
                return
            if not batch.wait_layer(layer):
                self._expire(batch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # the forward runs on, and finish reports
            self._failures.report("wait", error, outer=outer)
