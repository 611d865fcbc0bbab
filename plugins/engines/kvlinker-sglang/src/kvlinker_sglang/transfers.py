"""Transfers: what SGLang's cache asks of a linker, in the core's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvlinker.transfers import HitPolicy, PoolTransfer

__all__ = ["EngineTransfer", "HasValue", "core_transfers"]


class HasValue(Protocol):
    """A member of one of SGLang's enumerations."""

    @property
    def value(self) -> object:
        """Its text."""
        ...


class EngineTransfer(Protocol):
    """SGLang's `PoolTransfer`, as far as a linker reads it."""

    @property
    def name(self) -> HasValue:
        """Logical pool."""
        ...

    @property
    def keys(self) -> Sequence[str] | None:
        """One per page."""
        ...

    @property
    def device_indices(self) -> object:
        """Slots, in a tensor; None in lookups."""
        ...

    @property
    def hit_policy(self) -> HasValue:
        """Which pages a boundary needs."""
        ...


def core_transfers(transfers: Iterable[EngineTransfer]) -> tuple[PoolTransfer, ...]:
    """Return the transfers that name pages; an empty one asks for nothing.

    Raises:
        ContractError: one names no pool, or a policy that the core does not know.
    """
    return tuple(
        PoolTransfer(
            name=str(transfer.name.value),
            keys=tuple(transfer.keys),
            device_indices=transfer.device_indices,
            hit_policy=HitPolicy(transfer.hit_policy.value),
        )
        for transfer in transfers
        if transfer.keys
    )
