"""Pool memory is registered with the agents of both lines: all of its regions, or none."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from kvlinker.errors import ContractError, RegistrationError, StoreError, UnsupportedOperationError
from kvlinker.spans import MemoryRegion
from kvlinker_nixl.agents import Agent, Memory, Registration
from kvlinker_nixl.pool_memory import device_of

__all__ = ["PoolRegistrations"]


class PoolRegistrations:
    """The regions of the pools, for stores that move their bytes without a copy."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        kinds: frozenset[Memory],
        max_regions: int,
        max_region_bytes: int,
    ) -> None:
        """Register nothing yet.

        Args:
            agents: each of them gets every region; none where the store does not need it.
            kinds: of memory that the backend reaches.
            max_regions: how many there may be at most.
            max_region_bytes: how long each may be.
        """
        self._agents = tuple(agents)
        self._kinds = kinds
        self._max_regions = max_regions
        self._max_region_bytes = max_region_bytes
        self._registered: list[Registration] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register every region, or roll all of them back.

        Raises:
            RegistrationError: one is refused; the message names it, its bytes, and the client's code.
            UnsupportedOperationError: the store copies, and registers no pool memory.
        """
        if not self._agents:
            msg = f"nixl store: cannot take {len(regions)} regions, since it is staged; open it with staged: false"
            raise UnsupportedOperationError(msg)
        if self._registered:
            msg = f"nixl store: {len(self._registered)} registrations are there already; unregister first"
            raise RegistrationError(msg)
        if len(regions) > self._max_regions:
            msg = f"nixl store: {len(regions)} regions are more than the {self._max_regions} of max_regions"
            raise RegistrationError(msg)
        for number, region in enumerate(regions):
            try:
                self._register(region)
            except StoreError as error:
                self.unregister()
                raise _refused(number, len(regions), region, error) from None

    def _register(self, region: MemoryRegion) -> None:
        if region.size_bytes > self._max_region_bytes:
            msg = f"the {self._max_region_bytes} B of max_region_bytes"
            raise StoreError(msg)
        try:
            kind, device = device_of(region.device)
        except ContractError as error:
            raise StoreError(str(error)) from None
        if kind not in self._kinds:
            msg = f"no way to reach memory of {region.device}: use the backend GDS, or staged: true"
            raise StoreError(msg)
        place = (region.base_ptr, region.size_bytes, device, "")
        for agent in self._agents:
            self._registered.append(agent.register([place], kind))

    def unregister(self) -> None:
        """Take every region back, the last one first; a client that refuses keeps nobody from going on."""
        while self._registered:
            self._registered.pop().release()


def _refused(number: int, count: int, region: MemoryRegion, error: StoreError) -> RegistrationError:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = (
        "" if limit == resource.RLIM_INFINITY else f"; at most {limit} B may be locked (ulimit -l)"
    )
    return RegistrationError(
        f"nixl store: region {number} of {count} at {region.base_ptr:#x} with {region.size_bytes} B on "
        f"{region.device} was refused with {error}; the {number} regions before it were rolled back{locked}"
    )
