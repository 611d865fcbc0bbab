"""A span is one device buffer seen as rows of bytes; a region is the allocation it lies in.

Spans are plain numbers: no tensor API is needed to plan with them, and made-up addresses will do.
A span keeps memory alive only through the owner of its region.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from kvlinker.errors import ContractError, StalePoolError
from kvlinker.integers import as_integer
from kvlinker.protocols import Implementers

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


_ADDRESSED = Implementers(AddressedOwner)


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
        base = as_integer(self.base_ptr, "a region's base_ptr", at_least=1, at_most=_MAX_ADDRESS)
        room = _MAX_ADDRESS - base
        size = as_integer(self.size_bytes, "a region's size_bytes", at_least=1, at_most=room)
        object.__setattr__(self, "base_ptr", base)
        object.__setattr__(self, "size_bytes", size)
        if not self.device:
            msg = f"the region at {base:#x} needs a device, such as cpu or cuda:0"
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
    """One device buffer seen as rows of bytes.

    >>> rings = BufferSpan(base_ptr=0x1000, rows=17, row_bytes=64, row_stride=64, label="state[0]")
    >>> rings.group_rows(8).rows, rings.group_rows(8).row_bytes
    (2, 512)
    """

    base_ptr: int
    """Address of row 0; may be 0 only where there are no rows."""
    rows: int
    row_bytes: int
    """Bytes of data in a row; the rest of the stride is padding."""
    row_stride: int
    """Bytes from one row to the next, at least `row_bytes`."""
    region: MemoryRegion | None = None
    """The allocation, where it is known."""
    label: str = ""
    """Name in messages and in the coverage check, unique within a description."""

    def __post_init__(self) -> None:
        smallest = (
            ("base_ptr", self.base_ptr, 0),
            ("rows", self.rows, 0),
            ("row_bytes", self.row_bytes, 1),
            ("row_stride", self.row_stride, None),
        )
        for name, value, at_least in smallest:
            what = f"span {self.label!r}: {name}"
            number = as_integer(value, what, at_least=at_least, at_most=_MAX_ADDRESS)
            object.__setattr__(self, name, number)
        if self.row_stride < self.row_bytes:
            msg = (
                f"span {self.label!r}: rows overlap, stride {self.row_stride} B is less than "
                f"row {self.row_bytes} B; pass the backing buffer, not an expanded or flipped view"
            )
            raise ContractError(msg)
        if self.rows:
            self._check_place()

    def _check_place(self) -> None:
        if not self.base_ptr or self.end_ptr > _MAX_ADDRESS:
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
        count = as_integer(count, f"span {self.label!r}: rows in a group", at_least=1)
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
        if not _ADDRESSED.has_type_of(region.owner):
            return
        now = _address_of(cast("AddressedOwner", region.owner))
        if now != region.owner_ptr:
            place = "nowhere" if now is None else f"{now:#x}"
            msg = (
                f"span {self.label!r}: its buffer moved from {region.owner_ptr:#x} to {place}; "
                f"describe the pools again and build a new group"
            )
            raise StalePoolError(msg)

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, *, label: str = "", owner: AddressedOwner | None = None
    ) -> BufferSpan:
        """Return the span of a tensor: dimension 0 is the row, everything behind it must be dense.

        The tensor's own memory is described, never a copy of it.

        Args:
            tensor: [rows, ...] on any device that has memory.
            label: name in messages.
            owner: what `verify` asks for its address, where the engine holds another tensor of which
                this one is a view, or may replace it; the tensor itself by default.

        Raises:
            ContractError: the tensor is strided inside a row, expanded, transposed, on the meta device,
                or no plain memory.
        """
        _check_tensor(tensor, label)
        rows, item = tensor.shape[0], tensor.element_size()
        row_bytes = math.prod(tensor.shape[1:]) * item
        # One row has no next one: its stride carries no information and may be anything.
        stride = tensor.stride(0) * item if rows > 1 else row_bytes
        return cls(
            base_ptr=_data_ptr(tensor, label) if rows else 0,
            rows=rows,
            row_bytes=row_bytes,
            row_stride=stride,
            region=_tensor_region(tensor, tensor if owner is None else owner) if rows else None,
            label=label,
        )


def _check_tensor(tensor: torch.Tensor, label: str) -> None:
    import torch

    where = f"span {label!r}"
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        msg = f"{where}: a {tensor.layout} {tensor.dtype} tensor is no plain memory; pass its strided backing buffer"
        raise ContractError(msg)
    if tensor.is_conj() or tensor.is_neg():
        msg = f"{where}: a lazily conjugated or negated view shows other values than its memory; resolve it first"
        raise ContractError(msg)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not _has_storage(tensor):
        kind = type(tensor).__name__
        msg = f"{where}: a {kind} of shape {shape} on {tensor.device} has no memory; materialize it first"
        raise ContractError(msg)
    if not shape or 0 in shape[1:]:
        msg = f"{where}: shape {shape} has no rows of at least one byte; pass [rows, ...] with dense rows"
        raise ContractError(msg)
    if not _is_dense(shape[1:], stride[1:]):
        msg = (
            f"{where}: shape {shape} with stride {stride} is strided inside a row; "
            f"pass the backing buffer (a copy would move bytes that the engine never reads)"
        )
        raise ContractError(msg)


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        # A fake tensor claims the device that it stands for; its storage tells.
        return tensor.untyped_storage().device.type != "meta"
    except RuntimeError:
        return False  # batched tensors and other wrappers


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _data_ptr(tensor: torch.Tensor, label: str) -> int:
    address = _address_of(tensor)
    if not address:
        msg = (
            f"span {label!r}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no address; "
            f"pass a tensor that owns memory"
        )
        raise ContractError(msg)
    return address


def _address_of(owner: AddressedOwner) -> int | None:
    try:
        return owner.data_ptr()
    except RuntimeError:
        return None  # an owner that was torn down has no address to give


def _tensor_region(tensor: torch.Tensor, owner: AddressedOwner) -> MemoryRegion:
    storage = tensor.untyped_storage()
    on_host = tensor.device.type == "cpu"
    return MemoryRegion(
        base_ptr=storage.data_ptr(),
        size_bytes=storage.nbytes(),
        device=str(tensor.device),
        kind=MemoryKind.HOST if on_host else MemoryKind.DEVICE,
        owner=tensor if owner is tensor else _WatchedTensor(tensor, owner),
        owner_ptr=owner.data_ptr(),
    )


class _WatchedTensor:
    """Keeps a view's memory alive and says where the engine's own buffer is."""

    __slots__ = ("_owner", "_tensor")

    def __init__(self, tensor: torch.Tensor, owner: AddressedOwner) -> None:
        self._tensor = tensor
        self._owner = owner

    def data_ptr(self) -> int:
        """Return the address of the engine's buffer."""
        return self._owner.data_ptr()


def unique_regions(spans: Iterable[BufferSpan]) -> tuple[MemoryRegion, ...]:
    """Return the distinct regions of the spans, by address."""
    found = {span.region for span in spans if span.region is not None}
    return tuple(
        sorted(found, key=lambda region: (region.device, region.base_ptr, region.size_bytes))
    )
