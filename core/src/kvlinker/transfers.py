"""Transfers: what an engine asks for one logical pool, and how it resolves to physical pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self, TypeAlias, cast, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.protocols import Implementers

__all__ = [
    "HitPolicy",
    "PageKey",
    "PoolTransfer",
    "Resolution",
    "ResolutionStatus",
    "TensorIndices",
    "as_index_array",
]

PageKey: TypeAlias = str | bytes
"""An engine's key of one page: a digest chained over the prefix that ends with it."""


class HitPolicy(Enum):
    """Which pages of a pool must exist for a boundary to be restorable."""

    ALL_PAGES = "all_pages"
    """Every page before the boundary."""
    TRAILING_PAGES = "trailing_pages"
    """Only the window of pages that ends at the boundary."""


@runtime_checkable
class TensorIndices(Protocol):
    """Indices in a tensor, on any device."""

    def detach(self) -> Self:
        """Return the tensor without its graph."""
        ...

    def cpu(self) -> Self:
        """Return the tensor on the host."""
        ...

    def numpy(self) -> NDArray[np.generic]:
        """Return the tensor as an array."""
        ...


def as_index_array(indices: object, *, pool: str) -> IndexArray:
    """Return slots as a one-dimensional int64 array on the host, in memory of its own.

    Args:
        indices: a numpy array, a tensor on any device, or a sequence of integers; integer dtype.
        pool: named in messages.

    Raises:
        ContractError: the dtype is bool, float or another, or there is not one dimension.
    """
    array = _as_array(indices, pool)
    if array.ndim != 1:
        msg = f"pool {pool!r}: indices must have one dimension, got shape {array.shape}"
        raise ContractError(msg)
    if array.dtype.kind not in "iu":
        msg = f"pool {pool!r}: indices must be integers, got dtype {array.dtype}; a mask or a float is no slot"
        raise ContractError(msg)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        msg = f"pool {pool!r}: index {int(array.max())} is no slot"
        raise ContractError(msg)
    return array.astype(np.int64)


_TENSORS = Implementers(TensorIndices)


def _as_array(indices: object, pool: str) -> NDArray[np.generic]:
    try:
        if isinstance(indices, np.ndarray):  # first: the next test costs more than many calls do
            return indices
        if _TENSORS.has_type_of(indices):
            return np.asarray(cast("TensorIndices", indices).detach().cpu().numpy())
        if isinstance(indices, Sequence) and not isinstance(indices, str | bytes):
            return _sequence_as_array(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"pool {pool!r}: a {type(indices).__name__} cannot be read as indices: {error}"
        raise ContractError(msg) from error
    msg = f"pool {pool!r}: indices must be an array, a tensor or a sequence, got {type(indices).__name__}"
    raise ContractError(msg)


def _sequence_as_array(indices: Sequence[object]) -> NDArray[np.generic]:
    if not indices:
        return np.empty(0, dtype=np.int64)
    if any(isinstance(item, bool) for item in indices):
        return np.asarray(indices, dtype=np.bool_)  # numpy would read True among integers as 1
    return np.asarray(indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolTransfer:
    """An engine's request for one pool: which pages, and where they are in device memory."""

    name: str
    """Logical pool; after `resolve_transfers`, the physical one."""
    keys: tuple[PageKey, ...] = ()
    """One key per page, in prefix order."""
    device_indices: object = None
    """The engine's slots (see `as_index_array`); None in lookups, which carry keys alone."""
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES

    def __post_init__(self) -> None:
        where = f"pool {self.name!r}"
        if not self.name:
            msg = "a transfer needs the name of a logical pool, such as kv"
            raise ContractError(msg)
        if isinstance(self.keys, str | bytes) or not isinstance(self.keys, Iterable):
            msg = f"{where}: keys must be a sequence of page keys, got {self.keys!r}"
            raise ContractError(msg)
        object.__setattr__(self, "keys", tuple(self.keys))
        if bad := [key for key in self.keys if not isinstance(key, str | bytes) or not key]:
            msg = f"{where}: a page key must be non-empty text or bytes, got {bad[0]!r}"
            raise ContractError(msg)
        try:
            object.__setattr__(self, "hit_policy", HitPolicy(self.hit_policy))
        except ValueError as error:
            allowed = ", ".join(policy.value for policy in HitPolicy)
            msg = f"{where}: {self.hit_policy!r} is no hit policy; use one of {allowed}"
            raise ContractError(msg) from error


class ResolutionStatus(Enum):
    """Why a resolution holds what it holds."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    """Some logical pools were absent, and the caller allowed it."""
    EMPTY = "empty"
    """No transfer carries keys."""
    MISSING_KV = "missing_kv"
    MISSING_POOLS = "missing_pools"
    """Some logical pools were absent, and the caller did not allow it."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolution(Sequence[PoolTransfer]):
    """Physical transfers in entry order, and why they are all there is."""

    transfers: tuple[PoolTransfer, ...]
    status: ResolutionStatus
    missing: tuple[str, ...] = ()
    """Logical pools that no transfer named with keys: those that entries take their indices from, and kv."""
    unused: tuple[str, ...] = ()
    """Logical pools that a transfer named and no entry takes its indices from."""

    @overload
    def __getitem__(self, index: int) -> PoolTransfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PoolTransfer, ...]: ...
    def __getitem__(self, index: int | slice) -> PoolTransfer | tuple[PoolTransfer, ...]:
        return self.transfers[index]

    def __len__(self) -> int:
        return len(self.transfers)

    def __iter__(self) -> Iterator[PoolTransfer]:
        return iter(self.transfers)
