"""Registration of device memory with a store's client: all regions of a call, or none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.errors import RegistrationError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import MemoryRegion

__all__ = ["RegisteredMemory", "pools_in"]


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
