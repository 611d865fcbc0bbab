"""Device access is the only thing that touches pool memory: copies out, copies in, events.

A store that moves bytes through the host is handed an access and host slots; it never dereferences an address.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.host_copies import copy_ranges
from kvlinker.integers import as_integer
from kvlinker.moving import current_mover, summing_mover
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.transfers import as_index_array

__all__ = [
    "DeviceAccess",
    "DeviceEvent",
    "HostAccess",
    "HostObjects",
    "HostPin",
    "room_for_sums",
    "wait_for_events",
]

_FIRST_POLL_SECONDS = 0.00002
_MAX_POLL_SECONDS = 0.002


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in an engine's stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether everything before the point is done."""
        ...


def wait_for_events(
    events: Iterable[DeviceEvent],
    *,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    """Poll until every event is done; False when `deadline` (of `time.monotonic`) or a cancellation comes first."""
    pause = _FIRST_POLL_SECONDS
    for event in events:
        while not event.query():
            if time.monotonic() >= deadline or is_cancelled():
                return False
            time.sleep(pause)
            pause = min(pause * 2, _MAX_POLL_SECONDS)
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostObjects:
    """Objects in host memory, one in each named slot of a span of equal slots.

    Object i's payload byte `o` lies at `span.base_ptr + slots[i] * span.row_stride + o - first_offset`.
    """

    span: BufferSpan
    """Rows are slots; `row_bytes` bytes of each may be used."""
    slots: IndexArray
    """[objects] slot of each object of the plan, in the plan's page order."""
    first_offset: int = 0
    """Payload offset of a slot's first byte, for buffers that hold a part of an object.

    Negative where something else stands in front of the payload, such as a header.
    """
    copied: Callable[[int, slice], None] | None = None
    """What an access that `tells_copied` calls during a copy in of whole pages, with a span's number in the plan
    and some pages, once these ranges were copied and while they are still in the processor's cache."""
    sums: NDArray[np.uint64] | None = None
    """[spans, pages] of `room_for_sums`: filled with the checksums of the ranges, in the place of calling anything."""
    _outer_slots: tuple[int, int] = field(init=False, repr=False)
    """Lowest and highest slot: looked for once, since the same objects are copied from layer by layer."""

    def __post_init__(self) -> None:
        slots = as_index_array(self.slots, pool=self.span.label)
        object.__setattr__(self, "slots", slots)
        outer = (int(slots.min()), int(slots.max())) if len(slots) else (0, 0)
        object.__setattr__(self, "_outer_slots", outer)
        what = f"span {self.span.label!r}: first_offset"
        object.__setattr__(self, "first_offset", as_integer(self.first_offset, what))

    def summed_into(self, sums: NDArray[np.uint64] | None) -> HostObjects:
        """Return the same objects, for a copy that makes checksums; for each read, and so nothing is checked again."""
        other = object.__new__(HostObjects)
        for name, value in (
            ("span", self.span),
            ("slots", self.slots),
            ("first_offset", self.first_offset),
            ("copied", None),
            ("sums", sums),
            ("_outer_slots", self._outer_slots),
        ):
            object.__setattr__(other, name, value)
        return other

    def check(self, plan: TransferPlan) -> None:
        """Refuse a plan that does not fit.

        Raises:
            ContractError: the counts differ, a slot is out of bounds, or a range leaves its slot.
            StalePoolError: the plan's memory was given up.
        """
        plan.check_live()
        if len(plan.part_bytes) != 1 or len(self.slots) != plan.num_pages:
            msg = (
                f"pool {plan.pool!r}: {plan.num_pages} pages of {len(plan.part_bytes)} objects "
                f"do not fit {len(self.slots)} slots"
            )
            raise ContractError(msg)
        if not len(self.slots) or not len(plan.spans.base):
            return
        low, high = self._outer_slots
        # As Python's integers: most plans are of a layer, whose spans are one or two.
        offsets = plan.spans.offset.tolist()
        first = min(offsets) - self.first_offset
        last = max(map(add, offsets, plan.range_bytes.tolist())) - self.first_offset
        if low < 0 or high >= self.span.rows or first < 0 or last > self.span.row_bytes:
            msg = (
                f"pool {plan.pool!r}: bytes [{first}, {last}) of slots {low}..{high} leave "
                f"{self.span.rows} slots of {self.span.row_bytes} B"
            )
            raise ContractError(msg)


class HostPin(ABC):
    """Host memory that copies in take without a buffer between, until it is released."""

    @abstractmethod
    def release(self) -> bool:
        """Wait for copies that use it and let go; True where it may be unmapped from now on. Idempotent.

        The access's own close releases it too.
        """


class DeviceAccess(ABC):
    """Copies between pool memory and host slots, each finished when the call returns."""

    @property
    def tells_copied(self) -> bool:
        """Whether a copy in of whole pages calls `HostObjects.copied` for every range, each once."""
        return False

    @property
    def makes_sums(self) -> bool:
        """Whether copies of whole pages fill `HostObjects.sums`, with checksums of `kvlinker.moving.current_mover`."""
        return False

    @abstractmethod
    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy the plan's ranges from pool memory to their offsets in the host slots.

        Raises:
            ContractError: plan and slots do not fit.
            TransferRevokedError: the transfer was taken back; nothing more is read.
        """

    @abstractmethod
    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy the plan's ranges from their offsets in the host slots to pool memory.

        Raises:
            ContractError: plan and slots do not fit.
            TransferRevokedError: the transfer was taken back; nothing more is written.
        """

    @property
    def pins_host(self) -> bool:
        """Whether pinned host memory spares a copy, so that `pin_host` is worth a call."""
        return False

    def pin_host(self, address: int, size: int) -> HostPin | None:  # noqa: ARG002  # nothing to pin for
        """Pin host memory that stays mapped until the pin is released, so that the device copies it itself.

        The same bytes are copied with and without. Bytes that are pinned already have their pin returned.

        Args:
            address: of whole pages of memory that belong to nobody else.
            size: bytes.

        Returns:
            The pin; None where this cannot be, and copies go on as they did.
        """
        return None

    def close(self) -> None:  # noqa: B027  # an access that holds nothing has nothing to release
        """Release staging buffers and streams. Idempotent."""


class HostAccess(DeviceAccess):
    """Access to pools in host memory: one copy, straight between pool and slot."""

    @property
    def tells_copied(self) -> bool:
        """See DeviceAccess."""
        return True

    @property
    def makes_sums(self) -> bool:
        """See DeviceAccess."""
        return current_mover() is not None

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        _check_host(plan, host)
        copy_ranges(plan, host, to_host=True)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        _check_host(plan, host)
        copy_ranges(plan, host, to_host=False)


def room_for_sums(
    plan: TransferPlan, memory: DeviceAccess, checksum: Callable[[memoryview], int]
) -> NDArray[np.uint64] | None:
    """Return room for the checksums of what a copy moves, as `HostObjects.sums`: [spans, pages].

    Args:
        plan: of the copy.
        memory: what copies.
        checksum: the function whose checksums these are to be.

    Returns:
        None where the copy makes no such checksums: the plan's pages are not whole, or nothing compiled is installed.
    """
    if not memory.makes_sums or not plan.pages.contiguous or summing_mover(checksum) is None:
        return None
    return np.zeros((len(plan.spans.base), plan.num_pages), dtype=np.uint64)


def _check_host(plan: TransferPlan, host: HostObjects) -> None:
    host.check(plan)
    for what, device in (("pool", plan.spans.device), ("slots", host.span.device)):
        if device != "cpu":
            msg = f"pool {plan.pool!r}: its {what} on {device} cannot be copied by the host; use that device's access"
            raise ContractError(msg)
