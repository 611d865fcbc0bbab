"""The store contract: batches in, one status per object out, and a miss is a result.

A store knows bytes and keys, no models. "Exists" is a hint, and "written" may mean "already there".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self, TypeAlias

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError, UnsupportedOperationError
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion

__all__ = [
    "Hold",
    "Integrity",
    "ObjectKey",
    "ReadRequest",
    "ReadSession",
    "ReadStatus",
    "Store",
    "StoreCapabilities",
    "StoreStats",
    "WriteBatch",
    "WriteStatus",
]

ObjectKey: TypeAlias = bytes
"""32 bytes from a KeyBuilder; the first 12 name the namespace."""


class Integrity(Enum):
    """How a store notices that an object is not what was written."""

    CHECKSUM = "checksum"
    """A header in front of the payload, with a checksum for each range that is read alone."""
    LENGTH = "length"
    """The length alone: for stores that move device memory without seeing the bytes."""


class ReadStatus(Enum):
    """What became of one object's read."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """The object was there and was not right; it was dropped."""
    FAILED = "failed"


class WriteStatus(Enum):
    """What became of one object's write."""

    WRITTEN = "written"
    EXISTS = "exists"
    """The store holds the key already; nothing was written."""
    FULL = "full"
    """No space, and nothing may be evicted for it."""
    FAILED = "failed"
    DISCARDED = "discarded"
    """The caller took the permission to publish back."""
    NOT_ADMITTED = "not_admitted"
    """The store keeps out, as it was told to, what it may take when it is offered again; nothing went wrong."""

    @property
    def is_stored(self) -> bool:
        """Whether the store says that it holds the object now."""
        return self in (WriteStatus.WRITTEN, WriteStatus.EXISTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCapabilities:
    """What a store can do; the linker adapts to it and never guesses."""

    persistent: bool
    """Objects outlive the process."""
    shared: bool
    """Other processes see the objects."""
    ranged_reads: bool
    """A read may take some ranges of an object, such as one layer's."""
    whole_reads: bool = True
    atomic_batches: bool = False
    """The batches of one write become visible together or not at all."""
    overwrite: bool = False
    """A write of an existing key replaces the object."""
    device_memory: bool = False
    """The store reads and writes device addresses itself; otherwise it goes through DeviceAccess."""
    registers_memory: bool = False
    revocable: bool = True
    """A read writes pool memory only through DeviceAccess, so that it can be taken back at any time."""
    leases: bool = False
    """`hold` keeps objects from eviction."""
    integrity: Integrity = Integrity.CHECKSUM
    max_object_bytes: int | None = None
    max_ranges_per_call: int | None = None

    def __post_init__(self) -> None:
        if not (self.ranged_reads or self.whole_reads):
            msg = "a store must be able to read whole objects or ranges of them"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteBatch:
    """Objects of one pool to write: object i holds page i of the plan."""

    keys: tuple[ObjectKey, ...]
    plan: TransferPlan
    """Of a single part; its ranges tile the objects."""
    fingerprint: bytes
    """Of the layout; a store with headers keeps it and refuses another one at the read."""

    def __post_init__(self) -> None:
        if len(self.keys) != self.plan.num_pages or len(self.plan.part_bytes) != 1:
            msg = (
                f"pool {self.plan.pool!r}: {len(self.keys)} keys for {self.plan.num_pages} pages "
                f"of {len(self.plan.part_bytes)} objects; pass one key per object"
            )
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Objects of one pool to read, and what they must look like."""

    keys: tuple[ObjectKey, ...]
    object_bytes: int
    """Payload bytes; an object of another length is a miss."""
    fingerprint: bytes

    def check(self, plan: TransferPlan) -> None:
        """Refuse a plan that is not of these objects, before anything is read.

        Raises:
            ContractError: it has another number of pages, or pages of another length.
        """
        if plan.num_pages != len(self.keys) or plan.object_bytes != self.object_bytes:
            msg = (
                f"pool {plan.pool!r}: a plan of {plan.num_pages} objects of {plan.object_bytes} B "
                f"does not fit a request of {len(self.keys)} objects of {self.object_bytes} B"
            )
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds now."""

    objects: int
    used_bytes: int
    """Bytes that count against the capacity."""
    capacity_bytes: int | None
    counters: Mapping[str, int] = field(default_factory=dict)
    """Events since the store was opened, such as `evicted` or `corrupt`."""


class ReadSession(ABC):
    """An open read of some objects, layer by layer or whole; it keeps them readable while it lasts."""

    @abstractmethod
    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """Read the plan's ranges of every object into pool memory.

        Page i of the plan is object i of the request. Bytes that are not right never reach pool
        memory, or are reported with a status other than OK.

        Returns:
            One status per object of the request, in order.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the objects. Idempotent."""

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session."""
        self.close()


class Hold(ABC):
    """Objects that a store keeps from eviction until the hold is released or expires."""

    @property
    @abstractmethod
    def present(self) -> tuple[bool, ...]:
        """Which of the asked keys exist and are held, in order."""

    @abstractmethod
    def release(self) -> None:
        """Let the objects be evicted again. Idempotent."""


class Store(ABC):
    """Where objects are kept under keys; every method may be called from any thread."""

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this store can do; the same for its whole life."""

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return one hint per key, in order."""

    @abstractmethod
    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """Write objects and make them visible batch by batch, in order; in one step where batches are atomic.

        Pool memory is read only during the call. `may_publish` is asked once, after the bytes were
        copied and before the first object becomes visible; after False nothing of the call stays.

        Returns:
            One status per object, in the shape of the batches.
        """

    @abstractmethod
    def open_read(self, request: ReadRequest) -> ReadSession:
        """Return a session over the objects; an absent or foreign one reads as MISS, and a foreign one stays."""

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """Keep objects from eviction for at most `seconds`.

        Raises:
            UnsupportedOperationError: the store has no leases.
        """
        msg = f"{type(self).__name__} cannot hold {len(keys)} objects for {seconds} s: it has no leases"
        raise UnsupportedOperationError(msg)

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:  # noqa: ARG002  # for stores that have tiers
        """Begin to bring objects to where they are read fastest, behind this call, and return of how many.

        A hint: what is absent, or more than the store does at a time, stays where it is. A store that is
        one place has nothing to do and returns 0.

        Args:
            request: the objects, as a read asks for them.
            range_bytes: bytes of each range that they will be read by, in object order; one range by default,
                which is checked as a whole whenever a part of it is read.

        Raises:
            ContractError: the ranges do not make an object.
        """
        return 0

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register device memory, all regions or none.

        Raises:
            RegistrationError: names the region, its bytes and the store's code; earlier ones were rolled back.
            UnsupportedOperationError: the store registers no memory.
        """
        msg = f"{type(self).__name__} cannot take {len(regions)} regions: it registers no memory"
        raise UnsupportedOperationError(msg)

    def unregister(self) -> None:  # noqa: B027  # a store that registers nothing has nothing to forget
        """Forget every registered region. Idempotent."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Remove objects; True where one was removed. Removing an absent one is no error."""

    @abstractmethod
    def clear(self, namespace: bytes) -> int:
        """Remove every object whose key begins with the 12 bytes of a namespace; return how many."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return what the store holds now."""

    def namespace_bytes(self, namespace: bytes) -> int | None:  # noqa: ARG002  # for stores that count
        """Return the payload bytes of a namespace's objects, whoever wrote them; None where the store cannot tell."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish or fail what runs, save what must be saved, release everything. Idempotent."""
