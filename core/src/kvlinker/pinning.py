"""Host memory that a device copies itself: which bytes are pinned, and which copies use them now.

Memory is unmapped only after its pin was released, and a pin is released only when no copy uses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import HostPin

__all__ = ["HostPins"]

_log = logging.getLogger(__name__)


class _Pin(HostPin):
    """Bytes that are pinned."""

    def __init__(self, address: int, size: int, release: Callable[[_Pin], bool]) -> None:
        self.address = address
        self.end = address + size
        self.users = 0
        """Copies that use the bytes now."""
        self.is_pinned = True
        self._release = release

    def release(self) -> bool:
        """See HostPin."""
        return self._release(self)


class HostPins:
    """Everything that one access has pinned."""

    def __init__(
        self, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        """Pin nothing yet.

        Args:
            register: pins bytes at an address; raises RuntimeError where the device or the system refuses.
            unregister: ends that for the bytes at an address; raises RuntimeError where the device fails.
        """
        self._register = register
        self._unregister = unregister
        self._pins: dict[tuple[int, int], _Pin] = {}
        self._starts = np.empty(0, dtype=np.int64)
        self._table: tuple[_Pin, ...] = ()
        """In order of address, as `_starts`."""
        self._changing = threading.Lock()
        """Of whoever pins or releases: that takes the device a while."""
        self._users_changed = threading.Condition()
        self._is_refused = False

    def pin(self, address: int, size: int) -> HostPin | None:
        """Pin bytes, or return their pin; None where they cannot be, and then for all that follow too."""
        with self._changing:
            known = self._pins.get((address, size))
            if known is not None or self._is_refused:
                return known
            try:
                self._register(address, size)
            except RuntimeError as error:
                self._is_refused = True
                _log.warning(
                    "kvlinker: %d B of host memory cannot be pinned (%s); copies go through staging buffers from "
                    "now on; look at the limit of locked memory (ulimit -l), or let less of the store be pinned",
                    size,
                    error,
                )
                return None
            pin = self._pins[address, size] = _Pin(address, size, self._release)
            self._tabulate()
            return pin

    def _tabulate(self) -> None:
        table = tuple(sorted(self._pins.values(), key=lambda pin: pin.address))
        with self._users_changed:
            self._table = table
            self._starts = np.array([pin.address for pin in table], dtype=np.int64)

    @contextmanager
    def using(self, addresses: IndexArray, size: int) -> Iterator[bool]:
        """Keep `size` bytes from each address on pinned; False where not all of them are."""
        with self._users_changed:
            users = self._pins_of(addresses, size)
            for pin in users:
                pin.users += 1
        try:
            yield bool(users)
        finally:
            with self._users_changed:
                for pin in users:
                    pin.users -= 1
                self._users_changed.notify_all()

    def _pins_of(self, addresses: IndexArray, size: int) -> tuple[_Pin, ...]:
        """Return the pins that bytes lie in, each range in one of them; none where a range lies in none."""
        numbers = np.searchsorted(self._starts, addresses, side="right") - 1
        if not len(addresses) or int(numbers.min()) < 0:
            return ()
        ends = np.array([pin.end for pin in self._table], dtype=np.int64)
        if bool(np.any(addresses + size > ends[numbers])):
            return ()
        return tuple(self._table[number] for number in np.unique(numbers).tolist())

    def _release(self, pin: _Pin) -> bool:
        with self._changing:
            place = pin.address, pin.end - pin.address
            if self._pins.get(place) is pin:  # and not a later pin of the same bytes
                del self._pins[place]
                self._tabulate()  # no copy begins to use it any more
                with self._users_changed:
                    self._users_changed.wait_for(lambda: not pin.users)
                try:
                    self._unregister(pin.address)
                    pin.is_pinned = False
                except RuntimeError as error:
                    _log.warning("kvlinker: the device does not let go of host memory: %s", error)
            return not pin.is_pinned

    def close(self) -> None:
        """Release everything, and pin nothing any more. Idempotent."""
        with self._changing:
            self._is_refused = True
            pins = tuple(self._pins.values())
        for pin in pins:
            pin.release()
