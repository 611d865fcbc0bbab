"""A permit lets one transfer touch pool memory, and can be taken back at any time.

After `revoke` returns, no byte of pool memory is read or written for the transfer again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvlinker.device import DeviceAccess, HostObjects, HostPin
from kvlinker.errors import TransferRevokedError
from kvlinker.plans import TransferPlan
from kvlinker.staging import StagedAccess

__all__ = ["PermittedAccess", "TransferPermit"]


class TransferPermit:
    """The right of one transfer to copy and to publish; a transfer that ended has none."""

    def __init__(self) -> None:
        """Make a permit that is valid until it is revoked."""
        self._changed = threading.Condition()
        self._copies = 0
        self._revoked = False
        self._publishing = False
        self._kept: object = None

    @property
    def is_revoked(self) -> bool:
        """Whether the permit was taken back."""
        return self._revoked

    @property
    def is_publishing(self) -> bool:
        """Whether the permission to publish was used."""
        return self._publishing

    def keep(self, owners: object) -> None:
        """Keep the pools' owners alive while copies may run: a group may be closed meanwhile."""
        with self._changed:
            if not self._revoked:
                self._kept = owners

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Hold the permit for one copy.

        Raises:
            TransferRevokedError: it was taken back.
        """
        with self._changed:
            self.check()
            self._copies += 1
        try:
            yield
        finally:
            with self._changed:
                self._copies -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raise TransferRevokedError once the permit was taken back."""
        if self._revoked:
            msg = "the transfer was taken back; its pool memory may belong to another request"
            raise TransferRevokedError(msg)

    def try_publish(self) -> bool:
        """Use the permission to publish; False once the permit was taken back."""
        with self._changed:
            if self._revoked:
                return False
            self._publishing = True
            return True

    def revoke(self) -> None:
        """Take the permit back and wait for copies under way. Idempotent."""
        with self._changed:
            self._revoked = True
            while self._copies:
                self._changed.wait()
            self._kept = None


class PermittedAccess(DeviceAccess):
    """Device access of one transfer: every copy needs the permit and live pools, and is counted.

    The counts show a store that reports bytes which it never moved.
    """

    def __init__(
        self, access: DeviceAccess, permit: TransferPermit, check_live: Callable[[], None]
    ) -> None:
        """Wrap an access; `check_live` raises StalePoolError once the pools are gone."""
        self._access = access
        self._permit = permit
        self._check_live = check_live
        # A store may copy from several threads at once.
        self._counting = threading.Lock()
        self.bytes_read = 0
        """Bytes copied out of pool memory so far."""
        self.bytes_written = 0
        """Bytes copied into pool memory so far."""

    @property
    def tells_copied(self) -> bool:
        """See DeviceAccess."""
        return self._access.tells_copied

    @property
    def makes_sums(self) -> bool:
        """See DeviceAccess."""
        return self._access.makes_sums

    @property
    def pins_host(self) -> bool:
        """See DeviceAccess."""
        return self._access.pins_host

    def pin_host(self, address: int, size: int) -> HostPin | None:
        """See DeviceAccess; the pin is the access's own and outlives this transfer."""
        return self._access.pin_host(address, size)

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        with self._permit.copying():
            self._check_live()
            if isinstance(self._access, StagedAccess):
                self._access.copy_out(plan, host, check=self._permit.check)
            else:
                self._access.copy_out(plan, host)
        with self._counting:
            self.bytes_read += plan.total_bytes

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        with self._permit.copying():
            self._check_live()
            if isinstance(self._access, StagedAccess):
                # In chunks, of which none begins once the permit is taken back: revoke need not wait for all.
                self._access.copy_in(plan, host, check=self._permit.check)
            else:
                self._access.copy_in(plan, host)
        with self._counting:
            self.bytes_written += plan.total_bytes
