"""Chosen writes hand some objects of a call on to a store, and answer for the others themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.store import Store, WriteBatch, WriteStatus

__all__ = ["write_chosen"]


def write_chosen(
    store: Store,
    batches: Sequence[WriteBatch],
    chosen: Sequence[bool],
    memory: DeviceAccess,
    *,
    may_publish: Callable[[], bool],
    otherwise: WriteStatus,
) -> tuple[tuple[WriteStatus, ...], ...]:
    """Write some objects of some batches; the store is not asked where there are none.

    Args:
        store: which takes them.
        batches: as `Store.write` takes them.
        chosen: one for each object of all batches, in order.
        memory: as `Store.write` takes it.
        may_publish: as `Store.write` takes it.
        otherwise: the status of an object that is not chosen.

    Returns:
        One status per object, in the shape of the batches.
    """
    if all(chosen):
        return store.write(batches, memory, may_publish=may_publish)
    flags = iter(chosen)
    positions = [[i for i in range(len(batch.keys)) if next(flags)] for batch in batches]
    parts = [(batch, own) for batch, own in zip(batches, positions, strict=True) if own]
    answers = [[otherwise] * len(batch.keys) for batch in batches]
    if parts:
        written = iter(
            store.write(
                [_part(batch, own) for batch, own in parts], memory, may_publish=may_publish
            )
        )
        for answer, own in zip(answers, positions, strict=True):
            for position, status in zip(own, next(written) if own else (), strict=True):
                answer[position] = status
    return tuple(map(tuple, answers))


def _part(batch: WriteBatch, positions: Sequence[int]) -> WriteBatch:
    if len(positions) == len(batch.keys):
        return batch
    keys = tuple(batch.keys[i] for i in positions)
    return replace(batch, keys=keys, plan=batch.plan.select(positions))
