"""A span is one device buffer seen as rows of bytes; a region is the allocation it lies in.

Spans are plain numbers: no tensor API is needed to plan with them, and made-up addresses will do.
A span keeps memory alive only through the owner of its region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.errors import ContractError, StalePoolError

if TYPE_CHECKING:
    import torch

__all__ = ["AddressedOwner", "BufferSpan", "MemoryKind", "MemoryRegion", "unique_regions"]

_MAX_ADDRESS = 2**63 - 1
"""Plans hold addresses as int64; no platform hands out user addresses above this."""


class MemoryKind(Enum):
    """Who can dereference an address."""

    HOST = "host"
    DEVICE = "device"
    REGISTERED_HOST = "registered_host"
    """Host memory mapped for a device, whose alias there may differ from the host address."""


@runtime_checkable
class AddressedOwner(Protocol):
    """An owner that can say where its memory is now, such as a tensor."""

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """One whole allocation, as a store that registers memory needs it.

    Two regions are equal when they name the same bytes; the owner is never compared or shown.
    """

    base_ptr: int
    """Address of the first byte."""
    size_bytes: int
    device: str = "cpu"
    """Device in torch's notation, such as `cpu` or `cuda:0`."""
    kind: MemoryKind = MemoryKind.HOST
    owner: object = field(default=None, compare=False, repr=False)
    """What keeps the allocation alive; None for made-up addresses."""
    owner_ptr: int | None = field(default=None, compare=False, repr=False)
    """Where the owner said that its data was when the region was made."""

    def __post_init__(self) -> None:
        if self.base_ptr <= 0 or self.size_bytes <= 0:
            msg = (
                f"a region needs a non-null address and at least one byte, got address "
                f"{self.base_ptr:#x} and {self.size_bytes} B"
            )
            raise ContractError(msg)

    def __reduce__(self) -> tuple[object, ...]:
        msg = "a region names memory of this process and cannot be pickled; send a description"
        raise TypeError(msg)

    @property
    def end_ptr(self) -> int:
        """Address behind the last byte."""
        return self.base_ptr + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpan:
    """One device buffer seen as rows of bytes."""

    base_ptr: int
    """Address of row 0; may be 0 only where there are no rows."""
    rows: int
    row_bytes: int
    """Bytes of data in a row; the rest of the stride is padding."""
    row_stride: int
    """Bytes from one row to the next."""
    region: MemoryRegion | None = None
    """The allocation, where it is known."""
    label: str = ""
    """Name in messages and in the coverage check, unique within a description."""

    def __post_init__(self) -> None:
        for name in ("base_ptr", "rows", "row_bytes", "row_stride"):
            object.__setattr__(self, name, self._integer(name))
        self._check_shape()
        if self.rows:
            self._check_place()

    def _integer(self, name: str) -> int:
        value: object = getattr(self, name)
        if isinstance(value, bool):
            msg = f"span {self.label!r}: {name} must be an integer, got {value}"
            raise ContractError(msg)
        try:
            return operator.index(value)  # type: ignore[arg-type]  # refused below if it has no index
        except TypeError as error:
            msg = f"span {self.label!r}: {name} must be an integer, got {value!r}"
            raise ContractError(msg) from error

    def _check_shape(self) -> None:
        if self.rows < 0 or self.row_bytes <= 0:
            msg = (
                f"span {self.label!r}: needs rows >= 0 and row_bytes > 0, "
                f"got {self.rows} rows of {self.row_bytes} B"
            )
            raise ContractError(msg)
        if self.row_stride < self.row_bytes:
            msg = (
                f"span {self.label!r}: rows overlap, stride {self.row_stride} B is less than "
                f"row {self.row_bytes} B; pass the backing buffer, not an expanded or flipped view"
            )
            raise ContractError(msg)

    def _check_place(self) -> None:
        if self.base_ptr <= 0 or self.end_ptr > _MAX_ADDRESS:
            msg = (
                f"span {self.label!r}: {self.rows} rows at address {self.base_ptr:#x} are no memory; "
                f"meta tensors and freed buffers have no rows to move"
            )
            raise ContractError(msg)
        region = self.region
        if region and not (region.base_ptr <= self.base_ptr and self.end_ptr <= region.end_ptr):
            msg = (
                f"span {self.label!r}: bytes [{self.base_ptr:#x}, {self.end_ptr:#x}) leave their "
                f"region [{region.base_ptr:#x}, {region.end_ptr:#x})"
            )
            raise ContractError(msg)

    @property
    def end_ptr(self) -> int:
        """Address behind the data of the last row."""
        if not self.rows:
            return self.base_ptr
        return self.base_ptr + (self.rows - 1) * self.row_stride + self.row_bytes

    @property
    def is_dense(self) -> bool:
        """Whether rows follow each other without padding."""
        return self.row_stride == self.row_bytes

    @property
    def device(self) -> str:
        """Device of the region; `cpu` for a span without one."""
        return self.region.device if self.region else "cpu"

    def group_rows(self, count: int) -> BufferSpan:
        """Return the span whose row is `count` consecutive rows of this one.

        Rows that fill no whole group are cut: a state ring keeps spare rows behind its last page.

        Raises:
            ContractError: the count is not positive, or the rows are padded, so that a group is not one range.
        """
        if count < 1:
            msg = f"span {self.label!r}: cannot group {count} rows; the count must be at least 1"
            raise ContractError(msg)
        if count == 1:
            return self
        if not self.is_dense:
            msg = (
                f"span {self.label!r}: rows of {self.row_bytes} B with stride {self.row_stride} B "
                f"are padded, so that {count} of them are not one range"
            )
            raise ContractError(msg)
        size = self.row_bytes * count
        return replace(self, rows=self.rows // count, row_bytes=size, row_stride=size)

    def relabel(self, label: str) -> BufferSpan:
        """Return the same span under another label."""
        return replace(self, label=label)

    def verify(self) -> None:
        """Check that the owner's memory is still where it was planned.

        Raises:
            StalePoolError: the owner's data moved, such as by a swapped storage.
        """
        region = self.region
        if region is None or region.owner_ptr is None:
            return
        owner = region.owner
        if isinstance(owner, AddressedOwner) and owner.data_ptr() != region.owner_ptr:
            msg = (
                f"span {self.label!r}: its buffer moved from {region.owner_ptr:#x} to "
                f"{owner.data_ptr():#x}; describe the pools again and build a new group"
            )
            raise StalePoolError(msg)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, *, label: str = "") -> BufferSpan:
        """Return the span of a tensor: dimension 0 is the row, everything behind it must be dense.

        The tensor's own memory is described, never a copy of it.

        Raises:
            ContractError: the tensor is strided inside a row, expanded, transposed, on the meta device,
                or no plain memory.
        """
        _check_tensor(tensor, label)
        item = tensor.element_size()
        row_bytes = item
        for size in tensor.shape[1:]:
            row_bytes *= size
        rows = tensor.shape[0]
        # A single row has no next row: its stride carries no information and may be anything.
        stride = tensor.stride(0) * item if rows > 1 else row_bytes
        return cls(
            base_ptr=tensor.data_ptr(),
            rows=rows,
            row_bytes=row_bytes,
            row_stride=stride if rows else row_bytes,
            region=_tensor_region(tensor) if rows else None,
            label=label,
        )


def _check_tensor(tensor: torch.Tensor, label: str) -> None:
    import torch

    shape, where = tuple(tensor.shape), f"span {label!r}"
    if (
        tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        msg = f"{where}: a {tensor.layout} tensor of shape {shape} is no plain memory; pass its strided backing buffer"
        raise ContractError(msg)
    if tensor.device.type == "meta":
        msg = f"{where}: a meta tensor of shape {shape} has no memory; materialize it first"
        raise ContractError(msg)
    if tensor.dim() == 0 or 0 in shape[1:]:
        msg = f"{where}: shape {shape} has no rows of at least one byte; pass [rows, ...] with dense rows"
        raise ContractError(msg)
    expected = 1
    for size, stride in zip(reversed(shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            msg = (
                f"{where}: shape {shape} with stride {tuple(tensor.stride())} is strided inside a row; "
                f"pass the backing buffer (a copy would move bytes that the engine never reads)"
            )
            raise ContractError(msg)
        expected *= size


def _tensor_region(tensor: torch.Tensor) -> MemoryRegion:
    storage = tensor.untyped_storage()
    on_host = tensor.device.type == "cpu"
    return MemoryRegion(
        base_ptr=storage.data_ptr(),
        size_bytes=storage.nbytes(),
        device=str(tensor.device),
        kind=MemoryKind.HOST if on_host else MemoryKind.DEVICE,
        owner=tensor,
        owner_ptr=tensor.data_ptr(),
    )


def unique_regions(spans: Iterable[BufferSpan]) -> tuple[MemoryRegion, ...]:
    """Return the distinct regions of the spans, by address."""
    found = {span.region for span in spans if span.region is not None}
    return tuple(
        sorted(found, key=lambda region: (region.device, region.base_ptr, region.size_bytes))
    )
