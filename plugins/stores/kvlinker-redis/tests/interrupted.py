"""An access that does something before each copy."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.plans import TransferPlan

__all__ = ["Interrupted"]


class Interrupted(DeviceAccess):
    """Does something before each copy."""

    def __init__(self, access: DeviceAccess, interrupt: Callable[[], object]) -> None:
        self._access = access
        self._interrupt = interrupt
        self.copies = 0

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self.copies += 1
        self._interrupt()
        self._access.copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self.copies += 1
        self._interrupt()
        self._access.copy_in(plan, host)
