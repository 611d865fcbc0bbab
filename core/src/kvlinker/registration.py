"""Registration of device memory with a store's client: all regions of a call, or none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvlinker.errors import RegistrationError
from kvlinker.lanes import Lane
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import MemoryRegion
from kvlinker.store import Store

__all__ = ["RegisteredMemory", "pools_in", "register_within"]


class RegisteredMemory:
    """The regions that a client holds registered, for stores that move device memory themselves."""

    def __init__(
        self,
        register: Callable[[MemoryRegion], int],
        unregister: Callable[[MemoryRegion], int],
    ) -> None:
        """Use a client's two calls, each of which returns 0 for success."""
        self._register = register
        self._unregister = unregister
        self._regions: list[MemoryRegion] = []

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """What is registered now, in order."""
        return tuple(self._regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register every region, or roll back those of this call.

        Raises:
            RegistrationError: something is registered already, or the client refused a region; the
                message names the region's number, address, bytes and the client's code.
        """
        if self._regions:
            msg = f"{len(self._regions)} regions are registered already; unregister them first"
            raise RegistrationError(msg)
        for number, region in enumerate(regions):
            if (code := self._register(region)) != 0:
                self.unregister()
                msg = (
                    f"region {number} of {len(regions)} at {region.base_ptr:#x} with {region.size_bytes} B "
                    f"was refused with code {code}; the {number} regions before it were rolled back"
                )
                raise RegistrationError(msg)
            self._regions.append(region)

    def unregister(self) -> None:
        """Take every region back, the last one first; a client that refuses keeps nobody from going on."""
        while self._regions:
            self._unregister(self._regions.pop())


def pools_in(group: DevicePoolGroup, region: MemoryRegion) -> tuple[str, ...]:
    """Return the names of the pools that have spans in a region."""
    return tuple(
        entry.name for entry in group.entries if any(span.region == region for span in entry.spans)
    )


def register_within(store: Store, regions: Sequence[MemoryRegion], *, seconds: float) -> None:
    """Let a store register memory, and wait for at most so many seconds.

    Raises:
        RegistrationError: the store refused, or did not answer in time; what it registers later is taken back.
    """
    attempt = _Attempt(store, regions)
    lane = Lane("register")
    task = lane.submit(attempt.run)
    if not task.wait(seconds) and attempt.give_up():
        lane.abandon(task)
        msg = f"no answer within {seconds} s; is its server up? raise register_seconds where memory is large"
        raise RegistrationError(msg)
    lane.close(0)
    if attempt.error is not None:
        raise attempt.error


class _Attempt:
    """One registration that nobody may be waiting for any more when it ends."""

    def __init__(self, store: Store, regions: Sequence[MemoryRegion]) -> None:
        self._store = store
        self._regions = regions
        self._lock = threading.Lock()
        self._ended = False
        self._given_up = False
        self.error: BaseException | None = None

    def run(self) -> None:
        error: BaseException | None = None
        try:
            self._store.register(self._regions)
        except BaseException as raised:  # noqa: BLE001  # whoever waits gets it
            error = raised
        with self._lock:
            self._ended, self.error = True, error
            is_late = self._given_up and error is None
        if is_late:
            with suppress(Exception):
                self._store.unregister()

    def give_up(self) -> bool:
        """Stop waiting; False where it has ended after all."""
        with self._lock:
            self._given_up = not self._ended
            return self._given_up
