"""Chosen writes hand some objects of a call on to a store, and answer for the others themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvlinker.store import WriteBatch, WriteStatus
from kvlinker.stores.tier_copy import select_objects

__all__ = ["write_chosen"]

_Statuses: TypeAlias = tuple[tuple[WriteStatus, ...], ...]


def write_chosen(
    write: Callable[[Sequence[WriteBatch]], _Statuses],
    batches: Sequence[WriteBatch],
    chosen: Sequence[bool],
    *,
    otherwise: WriteStatus,
) -> _Statuses:
    """Write some objects of some batches; the store is not asked where there are none.

    Args:
        write: writes some batches, and returns one status per object.
        batches: as `Store.write` takes them.
        chosen: one for each object of all batches, in order.
        otherwise: the status of an object that is not chosen.

    Returns:
        One status per object, in the shape of the batches.
    """
    if all(chosen):
        return write(batches)
    flags = iter(chosen)
    positions = [[i for i in range(len(batch.keys)) if next(flags)] for batch in batches]
    parts = [(batch, own) for batch, own in zip(batches, positions, strict=True) if own]
    answers = [[otherwise] * len(batch.keys) for batch in batches]
    if parts:
        written = iter(write([select_objects(batch, own) for batch, own in parts]))
        for answer, own in zip(answers, positions, strict=True):
            for position, status in zip(own, next(written) if own else (), strict=True):
                answer[position] = status
    return tuple(map(tuple, answers))
